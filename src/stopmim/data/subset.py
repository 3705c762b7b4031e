"""Parts of a source: images that are not skipped, one side of a split, or some channels."""

import codecs
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from stopmim.base.console import warn
from stopmim.base.errors import DataError, UserError
from stopmim.base.files import read_regular
from stopmim.base.random_keys import numpy_generator
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError
from stopmim.data.images import Chunked, Images, open_image, read_image, read_together, stamp
from stopmim.data.rasters.raster import Raster


class Subset:
    """The images `kept` of `images`, renumbered in ascending order, with their own fingerprint."""

    def __init__(self, images: Images, kept: Sequence[int] | np.ndarray) -> None:
        self.images, self.kept = images, np.unique(np.asarray(kept, np.int64))
        self.labels = {name: label[self.kept] for name, label in images.labels.items()}
        self.classes: list[str] = getattr(images, "classes", [])
        forward(self, images, "channels", "kind", "channel_names")
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

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        return read_image(self.images, int(self.kept[i]), enough)

    def read_together(self, numbers: np.ndarray) -> np.ndarray | None:
        return read_together(self.images, self.kept[numbers])

    def open(self, i: int) -> Raster | None:
        return open_image(self.images, int(self.kept[i]))

    def name(self, i: int) -> str:
        return self.images.name(int(self.kept[i]))

    def stamp(self) -> str:
        return stamp(self.images)


class Selected:
    """Some channels of every image, in this order: by number, or by name if they have names."""

    def __init__(self, images: Images, channels: Sequence[str]) -> None:
        self.images, self.labels = images, images.labels
        names: list[str] = getattr(images, "channel_names", None) or []
        total: int = getattr(images, "channels", 64)  # not known before an image is read
        known = {str(i): i for i in range(total)} | {name: i for i, name in enumerate(names)}
        for one in channels:
            if one not in known:
                which = ", ".join(names) or f"0 to {total - 1}"
                raise UserError(f"channels:{one}: no such channel; there are {which}")
        self.index = [known[one] for one in channels]
        self.classes: list[str] = getattr(images, "classes", [])
        forward(self, images, "in_process", "unreadable", "chunks", "window")
        if hasattr(images, "channels") or hasattr(images, "kind"):
            self.channels, self.kind = len(self.index), getattr(images, "kind", "uint8")
        self.channel_names = [names[i] for i in self.index] if names else []
        chosen = repr(self.index).encode()
        self.fingerprint = hashlib.sha256(images.fingerprint.encode() + chosen).hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def __str__(self) -> str:
        return f"channels:{','.join(map(str, self.index))}:{self.images}"

    def read(self, i: int) -> np.ndarray:
        return self.read_reduced(i, None)

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        pixels = read_image(self.images, i, enough)
        if max(self.index) >= pixels.shape[2]:
            raise BadImageError(f"{pixels.shape[2]} channels; channel {max(self.index)} is missing")
        return pixels[..., self.index]

    def read_together(self, numbers: np.ndarray) -> np.ndarray | None:
        found = read_together(self.images, numbers)
        return None if found is None else found[..., self.index]

    def open(self, i: int) -> Raster | None:
        whole = open_image(self.images, i)
        return None if whole is None else _SomeChannels(whole, self.index)

    def name(self, i: int) -> str:
        return self.images.name(i)

    def stamp(self) -> str:
        return stamp(self.images)


class _SomeChannels(Raster):
    """Some channels of an image, in this order."""

    def __init__(self, whole: Raster, index: Sequence[int]) -> None:
        self.whole, self.index = whole, list(index)
        if max(self.index) >= whole.shape[2]:
            raise BadImageError(f"{whole.shape[2]} channels; channel {max(self.index)} is missing")
        self.kind = whole.kind
        self.shape = whole.shape[0], whole.shape[1], len(self.index)
        self.tall, self.tile, self.slow = whole.tall, whole.tile, whole.slow
        self.names = [whole.names[i] for i in self.index] if whole.names else []
        self.levels = [_SomeChannels(level, index) for level in whole.levels]

    def read(self, box: Box | None = None) -> np.ndarray:
        return self.whole.read(box)[:, :, self.index]


def forward(part: object, images: Images, *abilities: str) -> None:
    """Copies to `part` those of these abilities that `images` has."""
    for name in abilities:
        if hasattr(images, name):
            setattr(part, name, getattr(images, name))


def underlying(images: Images) -> Images:
    """The images that a subset, or a subset of a subset, is taken from; or `images` itself."""
    return underlying(images.images) if isinstance(images, Subset | Selected) else images


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
    names, such as ``n04235860_14959.JPEG``. Extensions may be left out. As a last resort, names are
    read as a list from Windows may write them: with \\ for / and an extension in capitals.
    """
    return sorted(set(_find_each(images, file).values()))


def _find_each(images: Images, file: Path) -> dict[str, int]:
    """The image of every name in `file`."""
    found, missing = dict[str, int](), _read_names(file)
    for spelling in (str, _portable):  # names as they are, then the missing ones
        names = _Names(images, missing, spelling)
        left, missing = missing, []
        for name in left:
            match names.find(spelling(name)):
                case [i]:
                    found[name] = i
                case []:
                    missing.append(name)
                case [i, j, *_]:
                    which = f"{name} could be {images.name(i)} or {images.name(j)}"
                    raise DataError(f"{file}: {which}; write its whole path")
        if not missing:
            break
    if missing:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        which = f"not among the {len(images)} training images: {missing[0]}{others}"
        raise DataError(f"{file}: {which}")
    return found


def check_named(images: Images, file: Path, labels: Sequence[str]) -> None:
    """Raises DataError unless `file` names images, of two classes or more for each of `labels`.

    Warns of images that are in another folder than the one in the list, which may be its class.
    """
    found = _find_each(images, file)
    index = sorted(set(found.values()))
    folders = {name: {_folder(name), _folder(images.name(i))} for name, i in found.items()}
    if moved := [name for name, both in folders.items() if len(both - {""}) > 1]:
        what = f"{len(moved)} of its {len(found)} images were found in another folder by their base"
        example = f"{moved[0]} as {images.name(found[moved[0]])}"
        warn(f"{file}: {what} names, such as {example}; check that their classes are right")
    for label in labels:
        if len(np.unique(images.labels[label][index])) < 2:
            raise DataError(f"{file}: its {len(index)} images have one {label}: nothing to fit")


def _read_names(file: Path) -> list[str]:
    try:
        data = read_regular(file)
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes
        lines = data.decode("utf-16" if wide else "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: not a list of file names: {why}") from None
    names = [line.strip().removeprefix("./") for line in lines if line.strip()]
    if not names:
        raise DataError(f"{file}: an empty list; expected the name of an image per line")
    return names


def _portable(name: str) -> str:
    """`name` as other systems may write it: with / for \\, and its extension in small letters."""
    stem, extension = os.path.splitext(name.replace("\\", "/"))
    return stem + extension.lower()


class _Names:
    """Images by path and by its ends, with and without extension; only those of `listed`.

    All names are in this `spelling`.
    """

    def __init__(
        self, images: Images, listed: Sequence[str], spelling: Callable[[str], str]
    ) -> None:
        bases = {_base(spelling(name)) for name in listed}
        self.images, self.spelling = images, spelling
        self.folders = set[str]()  # that hold images, by every end of their paths
        self.by_path = defaultdict[str, list[int]](list)
        self.by_end = defaultdict[str, list[int]](list)  # shorter, down to the base name
        for i in range(len(images)):
            folder, slash, base = spelling(images.name(i)).rpartition("/")
            if folder not in self.folders:
                self.folders.update(_ends(folder))
            for name in bases.intersection((base, base.rpartition(".")[0])):
                path = f"{folder}{slash}{name}"
                self.by_path[path].append(i)
                for end in _ends(path.partition("/")[2]):
                    self.by_end[end].append(i)

    def find(self, name: str) -> list[int]:
        """Images that `name` in a list may mean.

        Folders in front, as train/ or those of another layout, are ignored, on either side: sources
        have some as well, such as the name of a shard. But in a folder that holds images, only the
        file itself counts: cat/7.jpg is never dog/7.jpg.
        """
        for end in _ends(name):
            if found := self.by_path.get(end) or self.by_end.get(end):
                return self._exact(found, end)
            if end.rpartition("/")[0] in self.folders:
                return []
        return []

    def _exact(self, found: list[int], name: str) -> list[int]:
        """Images of `found` with this extension, or all if none has it: a.png is not a.png.jpg."""
        named = [i for i in found if self.spelling(self.images.name(i)).endswith(name)]
        return named or found


def _ends(path: str) -> Iterator[str]:
    """Yields `path`, and the rest of it without its first folders."""
    while path:
        yield path
        path = path.partition("/")[2]


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _folder(path: str) -> str:
    """Name of the folder that `path` is in, or ""."""
    return _base(_portable(path).rpartition("/")[0])
