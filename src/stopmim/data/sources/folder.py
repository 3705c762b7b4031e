"""Folders of image files, nested or flat, with or without classes, or divided into splits."""

import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from stopmim.base.console import is_first_rank, warn
from stopmim.base.errors import DataError
from stopmim.base.files import read_regular
from stopmim.data import index_cache
from stopmim.data.decode import EXTENSIONS, MAX_BYTES, BadImageError
from stopmim.data.images import LATEST, stamp_files
from stopmim.data.rasters.open import ARRAYS, load, open_raster
from stopmim.data.rasters.open import EXTENSIONS as ARRAY_EXTENSIONS
from stopmim.data.rasters.raster import Raster, Stored, form_of
from stopmim.data.rasters.windows import read_whole
from stopmim.data.rasters.zarr import metadata_size
from stopmim.data.sources.file_images import FileImages
from stopmim.data.sources.scanning import (
    SUFFIXES,
    class_folders,
    describe_others,
    pack_counts,
    path_classes,
    refuse_unknown,
    scan,
    unpack_counts,
)
from stopmim.data.sources.source import PackedPaths, Source, Split, printable, refuse_split

TEST_NAMES = ("val", "validation", "test")  # of the folder or the files to test on, best first
SPOT_CHECKS = 1000  # files whose sizes are compared with a stored index


class Files(FileImages):
    """Image files at given paths below `root`, with their paths and sizes as fingerprint."""

    label_hint = "put them in one folder per class, or give FOLDER@LIST with a list of PATH,LABEL"

    def __init__(self, root: Path | str, paths: Sequence[bytes]) -> None:
        self._set_root(root)
        outside = [p for p in paths if p.startswith(b"/") or b".." in p.split(b"/") or b"\0" in p]
        if outside:
            raise DataError(f"{printable(root)}: {printable(outside[0])}: not a path below it")
        self._paths = PackedPaths.pack(paths)
        sizes = file_sizes(self._root, paths)
        if missing := np.flatnonzero(sizes < 0).tolist():
            raise DataError(
                f"{printable(root)}: {len(missing)} of {len(paths)} files are missing, first "
                f"{printable(paths[missing[0]])}; is this the folder that the list is for?"
            )
        self.fingerprint = hash_files(paths, sizes)
        self.detect_form(printable(root), self._paths)

    def _set_root(self, root: Path | str) -> None:
        self.root = Path(os.path.abspath(root))
        self._root = os.fsencode(self.root) + b"/"
        self.labels: dict[str, np.ndarray] = {}
        self.classes: list[str] = []
        self.ignored: list[str] = []

    def _label(
        self, name: str, found: list[str], label: np.ndarray, classes: Sequence[str]
    ) -> None:
        """Numbers the classes `found`, which `label` (n,) indexes, as in `classes` if given."""
        self.classes = list(classes) or (found if len(found) > 1 else [])
        if found and self.classes:
            refuse_unknown(name, found, self.classes)
            # Maps the classes found here to the given ones: a test set may lack some.
            numbers = np.array([self.classes.index(c) for c in found], np.int64)
            self.labels = {"class": np.append(numbers, -1)[label]}

    def __len__(self) -> int:
        return len(self._paths)

    def _glance(self, i: int) -> Stored | Raster:
        return load(self._root + self._paths[i], small=0)

    def _raster(self, i: int) -> Raster:
        return open_raster(self._root + self._paths[i])

    def _data(self, i: int) -> bytes:
        if self._paths[i].lower().endswith(ARRAYS):  # among pictures, or no array could be read
            read_whole(raster := self._raster(i))  # says why, in the second case
            raise BadImageError(f"an array, {form_of(raster)}, where pictures are read")
        try:
            return read_regular(self._root + self._paths[i], MAX_BYTES)
        except OSError as error:
            raise BadImageError(error.strerror or type(error).__name__) from None

    def name(self, i: int) -> str:
        """Path of image `i` relative to the root."""
        return printable(self._paths[i])

    def stamp(self) -> str:
        return stamp_files(self._root + path for path in self._paths)


class Folder(Files):
    """Every image file below `root`, sorted by path, without hidden files and folders.

    If there is none that may be a picture, every file that is an array (.npy, .zarr, ...).

    A folder that is reached twice, as through a looping link, counts once, under its real path if
    that lies below `root`. Only regular files are opened: a pipe would block forever. The index of
    a large folder is cached while its folders and `SPOT_CHECKS` file sizes do not change.

    The label "class" is the first folder of a path, if there are at least two; it indexes
    `classes`, by default the sorted names of these folders. It is -1 for the `loose` images beside
    them. `others` counts files that are not read, by extension.
    """

    def __init__(
        self, root: Path | str, classes: Sequence[str] = (), *, arrays: bool | None = None
    ) -> None:
        self._set_root(root)
        self.unreadable: list[str] = []
        name = printable(root)
        if not os.path.exists(root):
            raise DataError(f"{name}: no such folder; give a folder of images")
        if not os.path.isdir(root):
            raise DataError(f"{name}: not a folder; give the folder that holds the images")
        index = self._load_index() or self._make_index(name)
        self._paths = PackedPaths(index["names"], index["offsets"])
        self.fingerprint = index["fingerprint"].tobytes().decode()
        self.others = unpack_counts(index["others"])
        found = [printable(c) for c in PackedPaths(index["classes"], index["class_offsets"])]
        self._label(name, found, index["label"], classes)
        self.detect_form(name, self._paths, arrays=arrays)

    @property
    def loose(self) -> int:
        """Number of images that lie beside the class folders."""
        return int((self.labels.get("class", np.empty(0)) < 0).sum())

    def _make_index(self, name: str) -> dict[str, np.ndarray]:
        began = time.time_ns()
        visited: dict[bytes, int] = {}
        others: Counter[str] = Counter()
        paths = sorted(scan(self._root, visited, self.unreadable, others))
        if not paths and any(others[extension] for extension in ARRAY_EXTENSIONS):
            visited, self.unreadable, others = {}, [], Counter()
            paths = sorted(scan(self._root, visited, self.unreadable, others, ARRAYS))
        self.unreadable.sort()
        if "." in self.unreadable:
            raise DataError(f"{name}: this folder cannot be read; check its permissions")
        if not paths:
            closed = f" (unreadable folders: {len(self.unreadable)})" if self.unreadable else ""
            found = f"; found {describe_others(others)}" if others else ""
            raise DataError(
                f"{name}: no images in this folder or below{closed}; "
                f"looked for files that end in {', '.join([*EXTENSIONS, *ARRAY_EXTENSIONS])}{found}"
            )
        sizes, names = file_sizes(self._root, paths), PackedPaths.pack(paths)
        folders = PackedPaths.pack(list(visited))
        classes, label = path_classes(paths)
        index = {
            "names": names.text,
            "offsets": names.offsets,
            "sizes": sizes,
            "folders": folders.text,
            "folder_offsets": folders.offsets,
            "times": np.fromiter(visited.values(), np.int64, len(visited)),
            "fingerprint": np.frombuffer(hash_files(paths, sizes).encode(), np.uint8),
            "classes": classes.text,
            "class_offsets": classes.offsets,
            "label": label,
            "others": pack_counts(others),
            "extensions": np.array(EXTENSIONS),
        }
        settled = max(visited.values()) < began - index_cache.SETTLED_NS
        if len(paths) >= index_cache.WORTH_IT and settled and not self.unreadable:
            index_cache.store("folder", self._root, index)
        return index

    def _load_index(self) -> dict[str, np.ndarray] | None:
        """The cached index, if it is still valid."""
        if (index := index_cache.load("folder", self._root)) is None:
            return None
        if index["extensions"].tolist() != EXTENSIONS:
            return None  # they depend on the installed libraries
        folders = PackedPaths(index["folders"], index["folder_offsets"])
        try:
            stats = [os.stat(self._root + folder) for folder in folders]
        except OSError:
            return None
        names = PackedPaths(index["names"], index["offsets"])
        checked = np.unique(np.linspace(0, len(names) - 1, SPOT_CHECKS).astype(np.int64))
        sizes = file_sizes(self._root, [names[i] for i in checked.tolist()])
        same_sizes = np.array_equal(sizes, index["sizes"][checked])
        times = [min(LATEST, status.st_mtime_ns) for status in stats]
        return index if same_sizes and times == index["times"].tolist() else None


def file_sizes(root: bytes, paths: Sequence[bytes]) -> np.ndarray:
    """File sizes, (n,) int64; -1 for missing files and for anything but regular files.

    A zarr folder counts with the size of its metadata.
    """

    def size(path: bytes) -> int:
        try:
            status = os.stat(root + path)
            if stat.S_ISDIR(status.st_mode) and path.lower().endswith(b".zarr"):
                return metadata_size(root + path)
            return status.st_size if stat.S_ISREG(status.st_mode) else -1
        except OSError:
            return -1

    return np.fromiter(map(size, paths), np.int64, len(paths))


def hash_files(paths: Sequence[bytes], sizes: np.ndarray) -> str:
    digest = hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        digest.update(b"%b\0%d\n" % (path, size))  # no path contains a zero byte
    return digest.hexdigest()


def has_splits(root: Path | str) -> bool:
    """Whether `root` holds train/ and at least one of `TEST_NAMES`, and no other folder."""
    if not os.path.isdir(Path(root, "train")):
        return False  # without listing a folder of a million files
    _, folders, _ = next(os.walk(root), ("", [], []))
    visible = {name for name in folders if name[0] != "."}
    return "train" in visible and len(visible) > 1 and visible <= {"train", *TEST_NAMES}


def split_folder(root: Path | str, split: Split | None) -> Path:
    """The folder of one split of `root`."""
    folders = [Path(root, name) for name in (TEST_NAMES if split == "test" else ("train",))]
    return next((folder for folder in folders if os.path.isdir(folder)), folders[0])


def open_split(root: Path | str, split: Split | None, *, arrays: bool | None = None) -> Folder:
    """Opens one split; in all splits classes are numbered by the folders of train/."""
    _warn_of_strays(os.path.abspath(root))
    classes = class_folders(Path(root, "train")) if split == "test" else ()
    return Folder(split_folder(root, split), classes, arrays=arrays)


@cache
def _warn_of_strays(root: str) -> None:
    """Warns once of images beside the folders of the splits, which belong to none."""
    _, _, names = next(os.walk(os.fsencode(root)), (b"", [], []))
    images = [n for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(b".")]
    if images and is_first_rank():
        many = f"{len(images):,} images lie" if len(images) > 1 else "an image lies"
        what = f"{many} beside train/ and its test split, and belong to neither"
        warn(f"{printable(root)}: {what}: not read, such as {printable(min(images))}")


def _open(text: str, split: Split | None) -> Folder:
    refuse_split(text, split)
    return Folder(text)


def _open_as(text: str, split: Split | None, *, arrays: bool) -> Folder:
    """Opens a folder whose files are stated to be arrays or pictures, instead of detected."""
    if has_splits(text):
        return open_split(text, split, arrays=arrays)
    refuse_split(text, split)
    return Folder(text, arrays=arrays)


def _open_file(text: str, split: Split | None) -> Files:
    """Opens one image, large enough to be a data set: `data.crops_per_image` takes many crops."""
    refuse_split(text, split)
    folder, name = os.path.split(os.path.abspath(text))
    return Files(folder, [os.fsencode(name)])


def _is_image(text: str) -> bool:
    """Whether `text` is an array; not .npz, which may hold many."""
    named = text.lower().endswith(tuple(f".{e}" for e in FILES))
    return named and (os.path.isfile(text) or text.lower().endswith(".zarr"))


FILES = ("tif", "tiff", "btf", "tf8", "npy", "zarr")
FILE = Source("file", _open_file, recognise=_is_image)
PICTURES = Source("pictures", partial(_open_as, arrays=False))
AS_ARRAYS = Source("arrays", partial(_open_as, arrays=True))
SPLITS = Source("splits", open_split, recognise=has_splits)
FOLDER = Source("folder", _open, recognise=os.path.isdir)
