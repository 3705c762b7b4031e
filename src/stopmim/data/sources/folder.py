"""Folders of image files, nested or flat, with or without classes, or divided into splits."""

import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.base.files import read_regular
from stopmim.data import index_cache as cache
from stopmim.data.decode import EXTENSIONS, READS_HEIC, BadImageError, decode
from stopmim.data.images import stamp_files
from stopmim.data.sources.source import PackedPaths, Source, Split, no_split, printable

SUFFIXES = tuple(f".{extension}".encode() for extension in EXTENSIONS)
TEST_NAMES = ("val", "validation", "test")  # of the folder or the files to test on, best first
HEIC = ("heic", "heif", "hif")
# Raw and other images that are never read.
FOREIGN = (*("arw", "cr2", "cr3", "dng", "nef", "orf", "pef", "raf", "rw2", "srw"),
           *("jp2", "jxl", "psd", "svg", "tga", "exr", "hdr", "ico"))  # fmt: skip
KINDS = 1000  # extensions that are counted; the rest count as ""
SPOT_CHECKS = 1000  # files whose sizes are compared with a stored index
# A file is read whole. No image within MAX_PIXELS needs more, and a mistaken one may be a disk.
MAX_BYTES = 2**30


class Files:
    """Image files at given paths below `root`, with their paths and sizes as fingerprint."""

    label_hint = "put them in one folder per class, or give FOLDER@LIST with a list of PATH,LABEL"

    def __init__(self, root: Path | str, paths: Sequence[bytes]) -> None:
        self._set_root(root)
        outside = [p for p in paths if p.startswith(b"/") or b".." in p.split(b"/") or b"\0" in p]
        if outside:
            raise DataError(f"{printable(root)}: {printable(outside[0])}: not a path below it")
        self._paths = PackedPaths.pack(paths)
        sizes = _sizes(self._root, paths)
        if missing := np.flatnonzero(sizes < 0).tolist():
            raise DataError(
                f"{printable(root)}: {len(missing)} of {len(paths)} files are missing, first "
                f"{printable(paths[missing[0]])}; is this the folder that the list is for?"
            )
        self.fingerprint = _hash(paths, sizes)

    def _set_root(self, root: Path | str) -> None:
        self.root = Path(os.path.abspath(root))
        self._root = os.fsencode(self.root) + b"/"
        self.labels: dict[str, np.ndarray] = {}
        self.classes: list[str] = []

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int) -> np.ndarray:
        try:
            data = read_regular(self._root + self._paths[i], MAX_BYTES)
        except OSError as error:
            raise BadImageError(error.strerror or type(error).__name__) from None
        return decode(data)

    def name(self, i: int) -> str:
        """Path of image `i` relative to the root."""
        return printable(self._paths[i])

    def stamp(self) -> str:
        return stamp_files(self._root + path for path in self._paths)


class Folder(Files):
    """Every image file below `root`, sorted by path, without hidden files and folders.

    A folder that is reached twice, as through a looping link, counts once, under its real path if
    that lies below `root`. Only regular files are opened: a pipe would block forever. The index of
    a large folder is cached while its folders and `SPOT_CHECKS` file sizes do not change.

    The label "class" is the first folder of a path, if there are at least two; it indexes
    `classes`, by default the sorted names of these folders. It is -1 for the `loose` images beside
    them. `others` counts files that are not read, by extension.
    """

    def __init__(self, root: Path | str, classes: Sequence[str] = ()) -> None:
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
        self.others = _unpack_counts(index["others"])
        found = [printable(c) for c in PackedPaths(index["classes"], index["class_offsets"])]
        self.classes = list(classes) or (found if len(found) > 1 else [])
        if found and self.classes:
            if unknown := sorted(set(found) - set(self.classes)):
                raise DataError(f"{name}: class {unknown[0]} is not among those of training")
            # Maps the classes found here to the given ones: a test set may lack some.
            numbers = np.array([self.classes.index(c) for c in found], np.int64)
            self.labels = {"class": np.append(numbers, -1)[index["label"]]}

    @property
    def loose(self) -> int:
        """Number of images that lie beside the class folders."""
        return int((self.labels.get("class", np.empty(0)) < 0).sum())

    def _make_index(self, name: str) -> dict[str, np.ndarray]:
        began = time.time_ns()
        visited: dict[bytes, int] = {}
        others: Counter[str] = Counter()
        paths = sorted(scan(self._root, visited, self.unreadable, others))
        self.unreadable.sort()
        if "." in self.unreadable:
            raise DataError(f"{name}: this folder cannot be read; check its permissions")
        if not paths:
            closed = f" (unreadable folders: {len(self.unreadable)})" if self.unreadable else ""
            found = f"; found {describe_others(others)}" if others else ""
            raise DataError(
                f"{name}: no images in this folder or below{closed}; "
                f"looked for files that end in {', '.join(EXTENSIONS)}{found}"
            )
        sizes, names = _sizes(self._root, paths), PackedPaths.pack(paths)
        folders = PackedPaths.pack(list(visited))
        classes, label = _classes(paths)
        index = {
            "names": names.text,
            "offsets": names.offsets,
            "sizes": sizes,
            "folders": folders.text,
            "folder_offsets": folders.offsets,
            "times": np.fromiter(visited.values(), np.int64, len(visited)),
            "fingerprint": np.frombuffer(_hash(paths, sizes).encode(), np.uint8),
            "classes": classes.text,
            "class_offsets": classes.offsets,
            "label": label,
            "others": _pack_counts(others),
            "extensions": np.array(EXTENSIONS),
        }
        settled = max(visited.values()) < began - cache.SETTLED_NS
        if len(paths) >= cache.WORTH_IT and settled and not self.unreadable:
            cache.store("folder", self._root, index)
        return index

    def _load_index(self) -> dict[str, np.ndarray] | None:
        """The cached index, if it is still valid."""
        if (index := cache.load("folder", self._root)) is None:
            return None
        if index["extensions"].tolist() != EXTENSIONS:
            return None  # they depend on what is installed
        folders = PackedPaths(index["folders"], index["folder_offsets"])
        try:
            times = [os.stat(self._root + folder).st_mtime_ns for folder in folders]
        except OSError:
            return None
        names = PackedPaths(index["names"], index["offsets"])
        checked = np.unique(np.linspace(0, len(names) - 1, SPOT_CHECKS).astype(np.int64))
        sizes = _sizes(self._root, [names[i] for i in checked.tolist()])
        same_sizes = np.array_equal(sizes, index["sizes"][checked])
        return index if same_sizes and times == index["times"].tolist() else None


def scan(
    root: bytes, visited: dict[bytes, int], unreadable: list[str], others: Counter[str]
) -> Iterator[bytes]:
    """Relative paths of all images below `root`, unordered. As bytes: not all are valid UTF-8.

    Adds every folder to `visited`, with its modification time, and whatever could not be followed
    to `unreadable`. Counts other files in `others`.
    """
    seen: set[tuple[int, int]] = set()
    folders, links = [b""], list[bytes]()
    while folders or links:
        if not folders:
            # Links come last, the lowest path first, so that real paths win.
            links.sort(reverse=True)
            folders.append(links.pop())
        folder = folders.pop()
        try:
            status = os.stat(root + folder)
            visited[folder] = status.st_mtime_ns
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(root + folder) as entries:
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    path = folder + entry.name
                    try:
                        if entry.is_dir():
                            (links if entry.is_symlink() else folders).append(path + b"/")
                        elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                            yield path
                        elif entry.is_file():
                            kind = _extension(entry.name)
                            others[kind if kind in others or len(others) < KINDS else ""] += 1
                    except OSError:  # a link to itself, or into a closed folder
                        unreadable.append(printable(path))
        except OSError:
            unreadable.append(printable(folder or b"."))


def holds_images(root: Path | str | bytes) -> bool:
    """Whether there is an image at any depth; stops at the first."""
    return next(scan(os.fsencode(root) + b"/", {}, [], Counter()), None) is not None


def class_folders(root: Path | str) -> list[str]:
    """`Folder(root).classes`, without listing every file."""
    place = os.fsencode(os.path.abspath(root)) + b"/"
    _, folders, _ = next(os.walk(place), (place, [], []))
    folders = sorted(name for name in folders if not name.startswith(b"."))
    if any(os.path.islink(place + name) for name in folders):
        # The target of a link may count elsewhere: only a full scan tells.
        found = list(_classes(list(scan(place, {}, [], Counter())))[0])
    else:
        found = [name for name in folders if holds_images(place + name)]
    return [printable(name) for name in found] if len(found) > 1 else []


def _sizes(root: bytes, paths: Sequence[bytes]) -> np.ndarray:
    """File sizes, (n,) int64; -1 for what is missing or not a regular file."""

    def size(path: bytes) -> int:
        try:
            status = os.stat(root + path)
            return status.st_size if stat.S_ISREG(status.st_mode) else -1
        except OSError:
            return -1

    return np.fromiter(map(size, paths), np.int64, len(paths))


def _hash(paths: Sequence[bytes], sizes: np.ndarray) -> str:
    digest = hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        digest.update(b"%b\0%d\n" % (path, size))  # no path contains a zero byte
    return digest.hexdigest()


def _classes(paths: Sequence[bytes]) -> tuple[PackedPaths, np.ndarray]:
    """Sorted first folders of all paths, and each path's index; -1 for a path without a folder."""
    firsts = [path.partition(b"/")[0] if b"/" in path else b"" for path in paths]
    names = sorted(set(firsts) - {b""})
    index = {name: i for i, name in enumerate(names)} | {b"": -1}
    return PackedPaths.pack(names), np.fromiter(map(index.__getitem__, firsts), np.int64)


def _extension(name: bytes) -> str:
    """The extension of a file in lower case; "" if it is none that a person would recognise."""
    extension = name.rpartition(b".")[2].lower() if b"." in name else b""
    return extension.decode() if extension.isalnum() and len(extension) <= 8 else ""


def _pack_counts(counts: Mapping[str, int]) -> np.ndarray:
    return np.array([f"{n} {kind}" for kind, n in counts.items()], np.str_)


def _unpack_counts(packed: np.ndarray) -> dict[str, int]:
    pairs = [text.split(" ") for text in packed.tolist()]
    return {kind: int(n) for n, kind in pairs}


def describe_others(others: Mapping[str, int], shown: int = 6) -> str:
    """Counts of files that are not read, images first, and what would read them."""
    kinds = sorted(others, key=lambda kind: (kind not in (*HEIC, *FOREIGN), -others[kind], kind))
    counts = [f"{others[kind]:,} {f'.{kind}' if kind else 'without extension'}" for kind in kinds]
    rest = sum(others[kind] for kind in kinds[shown:])
    text = ", ".join([*counts[:shown], *([f"{rest:,} others"] if rest else [])])
    hints = []
    if not READS_HEIC and any(kind in HEIC for kind in kinds):
        hints.append('pip install "stopmim[heic]" reads .heic')
    if any(kind in FOREIGN for kind in kinds):
        which = next(kind for kind in kinds if kind in FOREIGN)
        hints.append(f"convert .{which} to JPEG or PNG to use them")
    return "; ".join([text, *hints])


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


def open_split(root: Path | str, split: Split | None) -> Folder:
    """Opens one split; in all splits classes are numbered by the folders of train/."""
    classes = class_folders(Path(root, "train")) if split == "test" else ()
    return Folder(split_folder(root, split), classes)


def _open(text: str, split: Split | None) -> Folder:
    if split is not None:
        raise no_split(text, split)
    return Folder(text)


SPLITS = Source("splits", open_split, recognise=has_splits)
FOLDER = Source("folder", _open, recognise=os.path.isdir)
