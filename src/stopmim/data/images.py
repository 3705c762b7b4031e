"""The interface of a source of images, and the optional abilities that loading uses.

Any object that satisfies `Images` works everywhere. It may also have

    classes     list of str: names of the values of the label "class"
    unreadable  list of str: files or folders that could not be read in full
    others      dict of str and int: files beside the images that are not read, by extension
    ignored     list of str: columns of a list that are no labels
    loose       int: images beside class folders, whose "class" is -1
    label_hint  str: what to do where labels are missing
    any_order   bool: chunks are few and cheap enough to be read in any order
    in_process  bool: reading is so cheap that worker processes only slow it down
    channels    int: C, if it is not 3
    kind        config.data.Kind: type of the numbers, if it is not uint8
    channel_names  list of str: of the channels, if they have names

and satisfy `Chunked`, `InMemory`, `Together`, `Windowed`, `Reduced` or `FileBacked`.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from stopmim.data.rasters.raster import Raster

LATEST = 2**63 - 1  # nanoseconds that an array holds, of a file dated later as well


class Images(Protocol):
    """Numbered images, with or without labels."""

    labels: dict[str, np.ndarray]  # name of a label -> (n,) int64
    fingerprint: str  # changes when the images do

    def __len__(self) -> int: ...

    def read(self, i: int) -> np.ndarray:
        """Returns image `i`, (H, W, C); raises BadImageError if it cannot be read."""

    def name(self, i: int) -> str:
        """Names image `i` in messages."""


@runtime_checkable
class Chunked(Images, Protocol):
    """Images stored many to a file: neighbours should be read at about the same time."""

    chunks: np.ndarray  # (k + 1,) int64: images chunks[j] to chunks[j + 1] are contiguous
    window: int  # how many images the order of an epoch mixes at a time; see order.py


@runtime_checkable
class InMemory(Images, Protocol):
    """Images in one array, which may be copied to the GPU instead of being read one by one."""

    def resident_pixels(self) -> np.ndarray | None:
        """All images as `read` returns them, (n, H, W, C); None if that needs a copy."""


@runtime_checkable
class Together(Images, Protocol):
    """Images that may be read many at a time."""

    def read_together(self, numbers: np.ndarray) -> np.ndarray | None:
        """Images `numbers` (B,) as one array (B, H, W, C); None if that is not possible."""


@runtime_checkable
class Windowed(Images, Protocol):
    """Images of which parts may be read."""

    def open(self, i: int) -> Raster | None:
        """Opens image `i`; None if the images of this source are only read whole.

        Its pixels are those of `read(i)`, which reduces an image that is too large to be read.
        """


@runtime_checkable
class Reduced(Images, Protocol):
    """Images that are read faster in a smaller size."""

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        """Image `i`, each side of which may be reduced to no less than `enough`, if given."""


@runtime_checkable
class FileBacked(Images, Protocol):
    """Images read from files that others of the same name and size may overwrite.

    The fingerprint then stays: a run may resume with them, but cached results are not valid.
    """

    def stamp(self) -> str:
        """Changes whenever one of the files is rewritten."""


@runtime_checkable
class LazyLabels(Protocol):
    """Labels that are read on demand."""

    def at(self, numbers: np.ndarray) -> dict[str, np.ndarray]: ...


def read_together(images: Images, numbers: np.ndarray) -> np.ndarray | None:
    """Images `numbers` (B,) as one array (B, H, W, C); None if read one by one."""
    return images.read_together(numbers) if isinstance(images, Together) else None


def read_image(images: Images, i: int, enough: int | None) -> np.ndarray:
    """Image `i`; reduced to sides of no less than `enough`, if that is faster."""
    # Not isinstance, as in `open_image`.
    reader: Callable[[int, int | None], np.ndarray] | None = getattr(images, "read_reduced", None)
    return reader(i, enough) if reader and enough else images.read(i)


def open_image(images: Images, i: int) -> Raster | None:
    """Image `i`, open to read parts of it; None if it is only read whole."""
    # Not isinstance, which asks a protocol for its attributes each time: 2 % of reading a JPEG.
    opener: Callable[[int], Raster | None] | None = getattr(images, "open", None)
    return opener(i) if opener else None


def stamp(images: Images) -> str:
    """The stamp of `images`; "" if not in files: the fingerprint then covers their content."""
    return images.stamp() if isinstance(images, FileBacked) else ""


def labels_at(images: Images, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """The labels of images `numbers` only, since labels of remote images may have to be fetched."""
    if isinstance(images.labels, LazyLabels):
        return images.labels.at(numbers)
    return {name: np.asarray(values)[numbers] for name, values in images.labels.items()}


def stamp_files(files: Iterable[Path | str | bytes]) -> str:
    """Hash of the sizes and modification times of these files; one stat each."""
    digest = hashlib.sha256()
    for file in files:
        size, time = file_state(file)
        digest.update(b"%d %d\n" % (size, time) if size >= 0 else b"none\n")
    return digest.hexdigest()


def file_state(file: Path | str | bytes) -> tuple[int, int]:
    """Size and modification time; (-1, -1) without a file: reading it will say why."""
    try:
        status = os.stat(file)
        return status.st_size, min(LATEST, status.st_mtime_ns)
    except OSError:
        return -1, -1
