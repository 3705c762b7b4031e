"""Part of the images of a source: those not skipped, those on a list, or one side of a split."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.base.random_keys import numpy_generator
from stopmim.data.images import Chunked, Images, read_together, stamp


class Subset:
    """The `kept` of `images`, renumbered in ascending order, with a fingerprint of their own."""

    def __init__(self, images: Images, kept: Sequence[int] | np.ndarray) -> None:
        self.images, self.kept = images, np.unique(np.asarray(kept, np.int64))
        self.labels = {name: label[self.kept] for name, label in images.labels.items()}
        self.classes: list[str] = getattr(images, "classes", [])
        if isinstance(images, Chunked):  # the rest of a chunk is still contiguous
            self.chunks = np.searchsorted(self.kept, images.chunks)
            self.window = images.window
            self.any_order: bool = getattr(images, "any_order", False)
        left_out = np.setdiff1d(np.arange(len(images)), self.kept).astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(images.fingerprint.encode() + left_out).hexdigest()

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, i: int) -> np.ndarray:
        return self.images.read(int(self.kept[i]))

    def read_together(self, numbers: np.ndarray) -> np.ndarray | None:
        return read_together(self.images, self.kept[numbers])

    def name(self, i: int) -> str:
        return self.images.name(int(self.kept[i]))

    def stamp(self) -> str:
        return stamp(self.images)


def underlying(images: Images) -> Images:
    """The images that a subset, or a subset of a subset, is taken from; or `images` itself."""
    return underlying(images.images) if isinstance(images, Subset) else images


def without_loose(images: Images) -> Images:
    """The images of class folders, without those that lie beside these folders."""
    if not getattr(underlying(images), "loose", 0):
        return images
    inside = images.labels["class"] >= 0
    return images if inside.all() else Subset(images, np.flatnonzero(inside))


def split_by_class(images: Images, share: float, seed: int) -> tuple[Subset, Subset]:
    """Images to fit on, and `share` of each class to test on, but neither none nor all of it.

    A class of one image is only fitted on. Classes are those of the label "class", or else of the
    first label.
    """
    none = np.zeros(len(images), np.int64)
    label = images.labels.get("class", next(iter(images.labels.values()), none))
    rng = numpy_generator("hold out", seed)
    tested = np.zeros(len(images), bool)
    for one in np.unique(label):
        own = rng.permutation(np.flatnonzero(label == one))
        tested[own[: min(len(own) - 1, max(1, round(share * len(own))))]] = True
    return Subset(images, np.flatnonzero(~tested)), Subset(images, np.flatnonzero(tested))


def find_named(images: Images, file: Path) -> list[int]:
    """Indices of the images that `file` names, one per line: by path, or by a unique base name.

    The published list of 1 % of ImageNet (``1percent.txt`` of SimCLR, MSN and StoP) has 12,811 base
    names, such as ``n04235860_14959.JPEG``. Extensions may be left out.
    """
    listed = _read_names(file)
    names = _Names(images, {_base(name) for name in listed})
    found, missing = set[int](), list[str]()
    for name in listed:
        match names.find(name):
            case [i]:
                found.add(i)
            case []:
                missing.append(name)
            case [i, j, *_]:
                which = f"{name} could be {images.name(i)} or {images.name(j)}"
                raise DataError(f"{file}: {which}; write its whole path")
    if missing:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        which = f"not among the {len(images)} training images: {missing[0]}{others}"
        raise DataError(f"{file}: {which}")
    return sorted(found)


def _read_names(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: not a list of file names: {why}") from None
    names = [line.strip().removeprefix("./") for line in lines if line.strip()]
    if not names:
        raise DataError(f"{file}: an empty list; expected the name of an image per line")
    return names


class _Names:
    """Images by path and by base name, with and without extension; only those of `bases`."""

    def __init__(self, images: Images, bases: set[str]) -> None:
        self.folders = set[str]()  # that hold images
        self.by_path = defaultdict[str, list[int]](list)
        self.by_base = defaultdict[str, list[tuple[str, int]]](list)  # paths and images
        for i in range(len(images)):
            folder, slash, base = images.name(i).rpartition("/")
            self.folders.add(folder)
            for name in bases.intersection((base, base.rpartition(".")[0])):
                path = f"{folder}{slash}{name}"
                self.by_path[path].append(i)
                self.by_base[name].append((path, i))

    def find(self, name: str) -> list[int]:
        """Images that a list may mean by `name`.

        Folders in front, as train/ or those of another layout, are ignored. But in a folder that
        holds images, only the file itself counts: cat/7.jpg is never dog/7.jpg.
        """
        end = name
        while end:
            if end in self.by_path:
                return self.by_path[end]
            if (folder := end.rpartition("/")[0]) and folder in self.folders:
                return []
            end = end.partition("/")[2]
        alike = self.by_base[_base(name)]
        # Sources put something in front as well, such as the name of a shard.
        return [i for path, i in alike if path.endswith(f"/{name}")] or [i for _, i in alike]


def _base(path: str) -> str:
    return path.rpartition("/")[2]
