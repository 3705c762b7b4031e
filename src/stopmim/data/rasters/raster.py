"""Code that all formats of arrays share: bytes of a file, checks of shapes, boxes, codecs.

A raster is one open image. Its pixels are read whole or by the box, and a box of a large file is
read without the rest where the format allows. Numbers of other types are converted as channels.py
says; NaN stays, as a mark of missing data.

Nothing trusts a header: sizes are compared with the length of the file, and with `MOST`, before
memory is allocated.
"""

import importlib
import io
import mmap
import os
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np

from stopmim.base.files import open_to_read
from stopmim.config.data import Kind
from stopmim.data.channels import MOST as MAX_CHANNELS
from stopmim.data.channels import Form, as_kind
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError

MAX_SIDE = 2**20
MAX_FILE = 2**62  # bytes: any file, of which no more is read than is asked for
MOST = 2**29  # bytes of pixels that are held at a time
# Bytes of all tiles of an image, beyond which they are at most so many times those of its pixels;
# and of a tile of an image that is not read at once.
PADDED, PADDING = 2**27, 8
SMALL = 2**24  # bytes: a smaller file is read whole, a larger one is mapped
STRIP = 2**25  # bytes that are converted at a time, and of a map that are held
# How many times as long as deflate a codec takes; those that are not here take as long, or less.
SLOW = {"bz2": 4, "jpeg2k": 4, "jpegxl": 4, "lzma": 4, "png": 2, "webp": 2}


_AXES = {"lat": "y", "latitude": "y", "lon": "x", "longitude": "x"}


class MissingExtraError(BadImageError):
    """A file that a package of an extra would read."""


class Raster(Protocol):
    """One open image."""

    shape: tuple[int, int, int]  # H, W, C
    kind: Kind
    names: Sequence[str] = ()  # of the channels, if the file says
    levels: Sequence["Raster"] = ()  # smaller copies that the file has as well, largest first
    tall: int  # rows that are decoded together
    tile: int  # bytes that are decoded together
    slow: int = 1  # how many times as long as deflate its codec takes for the same pixels

    def read(self, box: Box | None = None) -> np.ndarray:
        """Pixels (h, w, C) of `box`, or of the whole image, of type `kind`; may be read-only."""


def form_of(raster: Raster) -> Form:
    return Form(raster.shape[2], raster.kind, tuple(raster.names))


class Stored:
    """The bytes of a file: all of them, or a map of a file that is large."""

    def __init__(self, data: bytes | mmap.mmap, path: bytes | None = None) -> None:
        self.data, self.path = data, path
        self.read = 0  # bytes of a map since it was given back

    @classmethod
    def open(cls, path: bytes, small: int = SMALL) -> "Stored":
        """The file at `path`, read if it has no more bytes than `small`."""
        with open_to_read(path, MAX_FILE) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise BadImageError("empty file")
            if size > small:
                return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)
            return cls(file.read(), path)

    def __len__(self) -> int:
        return len(self.data)

    def part(self, at: int, size: int) -> bytes:
        """`size` bytes from `at` on; an error if the file ends before."""
        if not 0 <= at <= at + size <= len(self.data):
            raise BadImageError(f"ends at byte {len(self.data)}, but has data at {at + size}")
        self.read += size
        if self.read > STRIP:
            self.give_back()
        return self.data[at : at + size]

    def give_back(self) -> None:
        """Lets go of the pages of a map that were read: they would count as memory in use."""
        self.read = 0
        if isinstance(self.data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def stream(self) -> BinaryIO:
        """A file object with these bytes, for libraries."""
        if isinstance(self.data, bytes):
            return io.BytesIO(self.data)
        return open(self.path or b"", "rb")


class Plain(Raster):
    """An image that lies uncompressed in memory, or in a map of a file: any view (H, W, C)."""

    tall, tile = 1, 0

    def __init__(
        self, pixels: np.ndarray, names: Sequence[str] = (), stored: "Stored | None" = None
    ) -> None:
        self.pixels, self.names, self.stored = pixels, names, stored
        self.kind = kind_of(pixels.dtype)
        height, width, channels = pixels.shape
        self.shape = check_shape(height, width, channels)

    def read(self, box: Box | None = None) -> np.ndarray:
        check_bytes(self, box)
        if self.stored:
            self.stored.give_back()  # what the box before this one has read
        pixels = cut(self.pixels, box)
        if pixels.dtype == self.kind:
            return pixels
        found = np.empty(pixels.shape, self.kind)
        rows = max(1, STRIP // max(1, pixels[:1].nbytes))
        for top in range(0, len(pixels), rows):
            with np.errstate(over="ignore"):  # infinity counts as missing, see crops.resized
                found[top : top + rows] = pixels[top : top + rows]
            if self.stored:
                self.stored.give_back()
        return found


def kind_of(dtype: np.dtype) -> Kind:
    """The type that numbers of `dtype` are returned as."""
    converted = as_kind(np.empty(0, dtype.newbyteorder("=")))
    if converted is None:
        raise BadImageError(f"numbers of type {dtype} are not read")
    kind: Any = converted.dtype.name
    return kind


def check_shape(height: int, width: int, channels: int) -> tuple[int, int, int]:
    """The shape of an image, if it is one that can be used."""
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise BadImageError(f"{width}x{height} pixels are not an image")
    if not 0 < channels <= MAX_CHANNELS:
        raise BadImageError(
            f"{channels} planes of {width}x{height}: each is a channel, of which at most "
            f"{MAX_CHANNELS} are possible; write one image per file"
        )
    return height, width, channels


def bytes_of(raster: Raster, box: Box | None = None) -> int:
    """Bytes of the pixels of `box`, or of the whole image."""
    height, width = (box.height, box.width) if box else raster.shape[:2]
    return height * width * raster.shape[2] * np.dtype(raster.kind).itemsize


def check_bytes(raster: Raster, box: Box | None) -> None:
    if (size := bytes_of(raster, box)) > MOST:
        height, width = (box.height, box.width) if box else raster.shape[:2]
        raise BadImageError(
            f"{width}x{height} pixels, {form_of(raster)}, are {size >> 20} MiB, more than the "
            f"{MOST >> 20} MiB that are read at once"
        )


def check_tiles(raster: Raster, tiles: int) -> None:
    """Refuses tiles that would take too long to decode: a small file can claim any."""
    size = bytes_of(raster)
    if tiles * raster.tile > max(PADDED, PADDING * size) or (size > MOST and raster.tile > PADDED):
        raise BadImageError(
            f"{tiles} tiles of {raster.tile >> 10} KiB in an image of {size >> 10} KiB are too "
            f"large to be read one by one; write smaller ones"
        )


def cut(pixels: np.ndarray, box: Box | None) -> np.ndarray:
    """The pixels of `box` in an array (H, W, C)."""
    if box is None:
        return pixels
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def spatial_axes(shape: Sequence[int], axes: Sequence[str] = ()) -> tuple[int, int]:
    """The axes of y and x: those of these names, if `axes` has them.

    Otherwise axes of length 1 in front do not count, and of three others the shorter one of the
    first and the last are the channels.
    """
    named = [_AXES.get(name.lower(), name) for name in axes]
    if named.count("x") == named.count("y") == 1 and len(named) == len(shape):
        return named.index("y"), named.index("x")
    skipped = 0
    while len(shape) - skipped > 3 and shape[skipped] == 1:
        skipped += 1
    left = shape[skipped:]
    if len(left) not in (2, 3):
        raise BadImageError(
            f"an array {tuple(shape)} is not an image (H, W), (H, W, C) or (C, H, W); write a "
            f"stack as one file per image, or as an array (n, H, W, C) in one .npz"
        )
    first = skipped + (len(left) == 3 and left[0] < left[2])
    return first, first + 1


def channels_last(pixels: np.ndarray, axes: Sequence[str] = ()) -> np.ndarray:
    """A view (H, W, C) of an array of any layout: all axes but y and x are channels, in order."""
    pixels = np.moveaxis(pixels, spatial_axes(pixels.shape, axes), (0, 1))
    return pixels.reshape(*pixels.shape[:2], -1)


def paste(target: np.ndarray, piece: np.ndarray, start: Sequence[int]) -> None:
    """Copies the part of `piece`, which begins at `start` in `target`, that falls on `target`."""
    here, there = list[slice](), list[slice]()
    for at, length, total in zip(start, piece.shape, target.shape, strict=True):
        low, high = max(at, 0), min(at + length, total)
        here.append(slice(low, high))
        there.append(slice(low - at, high - at))
    target[tuple(here)] = piece[tuple(there)]


def decompressed(codec: str, data: bytes, size: int, what: str) -> bytes | np.ndarray:
    """`data` unpacked by `codec`, zlib's or a name of imagecodecs, to no more than `size` bytes."""
    if codec in ("gzip", "zlib"):
        return zlib.decompressobj(47).decompress(data, size)  # 47: either header
    codecs = extra("imagecodecs", "science", f"{what} compressed by {codec}")
    options = {"header": True} if codec == "lz4" else {}
    found: np.ndarray = getattr(codecs, f"{codec}_decode")(
        data, out=np.empty(size, np.uint8), **options
    )
    return found


def extra(module: str, name: str, what: str) -> Any:
    """Imports a package that an extra installs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(f'{what}: needs pip install "stopmim[{name}]"') from None
