"""The directories of a TIFF or BigTIFF file: where the planes are, and how they are stored.

Only what is needed to find the pixels is read. Every number in a file may be a lie: directories
that loop, tables beyond the end and absurd counts are errors, found before memory is allocated.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stopmim.data.decode import BadImageError
from stopmim.data.rasters.raster import Stored, check_shape

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_PAGES = 1024
MAX_ENTRIES = 512  # of a directory
MAX_TABLE = 2**26  # bytes of one value, such as the offsets of all tiles

WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, DESCRIPTION = 256, 257, 258, 259, 262, 270
STRIP_OFFSETS, SAMPLES, STRIP_ROWS, STRIP_BYTES, PLANAR, PREDICTOR = 273, 277, 278, 279, 284, 317
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_BYTES, SUBFILES = 322, 323, 324, 325, 330
SUBFILE_TYPE, EXTRA_SAMPLES, SAMPLE_FORMAT, JPEG_TABLES, GDAL_METADATA = 254, 338, 339, 347, 42112
_TEXTS = {DESCRIPTION, GDAL_METADATA, JPEG_TABLES}
_READ = {
    *(WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, STRIP_OFFSETS, SAMPLES, STRIP_ROWS),
    *(STRIP_BYTES, PLANAR, PREDICTOR, TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_BYTES),
    *(SUBFILES, SUBFILE_TYPE, EXTRA_SAMPLES, SAMPLE_FORMAT, *_TEXTS),
}
# Code of a type -> letter of `struct`, which is NumPy's as well.
_TYPES = {1: "B", 2: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i", 13: "I", 16: "Q", 18: "Q"}
_COLOURS = {2: 3, 5: 4, 6: 3, 8: 3}  # samples of RGB, CMYK, YCbCr and CIELAB; others have one
Values = tuple[int, ...] | bytes


class Segments(NamedTuple):
    """The strips or tiles of a plane; strips are as wide as the image."""

    height: int
    width: int
    offsets: Sequence[int]
    sizes: tuple[int, ...]  # bytes, as stored


class Page(NamedTuple):
    """One directory: a plane, or several in one."""

    height: int
    width: int
    samples: int
    dtype: np.dtype  # as stored, with the byte order of the file
    bits: int  # of a number: fewer than `dtype` has if they are packed
    separate: bool  # one plane after the other, not one pixel after the other
    compression: int
    predictor: int
    photometric: int
    alpha: bool  # all samples beyond the colours are said to be opacity
    reduced: bool  # a smaller copy of another page
    tiled: bool
    tags: dict[int, Values]  # all but the offsets
    segments: Segments

    @property
    def layout(self) -> tuple[object, ...]:
        """Properties that all planes of one image share."""
        return self.height, self.width, self.samples, self.dtype, self.bits, self.separate

    def text(self, tag: int) -> str:
        value = self.tags.get(tag, b"")
        return value.rstrip(b"\0").decode("utf-8", "replace") if isinstance(value, bytes) else ""


class Directories:
    """Reads the directories of one file."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        start = stored.part(0, 8)
        if start[:4] not in MAGIC:
            raise BadImageError("not a TIFF file")
        self.order = "<" if start[:2] == b"II" else ">"
        self.big = start[2:4] in (b"+\0", b"\0+")
        # How a directory begins, an entry of it, and how it ends.
        count, entry, self.link = ("Q", "HHQ8s", "Q") if self.big else ("H", "HHI4s", "I")
        self.count, self.entry = (struct.Struct(self.order + form) for form in (count, entry))
        self.next = struct.Struct(self.order + self.link)
        at = 8 if self.big else 4
        (self.first,) = self.next.unpack(stored.part(at, self.next.size))
        self.seen = set[int]()
        self.known: dict[tuple[int, int, int, bytes], Values] = {}  # most entries recur

    def chain(self) -> list[Page]:
        """The main pages of the file."""
        pages, at = list[Page](), self.first
        while at:
            page, at = self._page(at, pages[-1] if pages else None)
            pages.append(page)
        if not pages:
            raise BadImageError("no image in this TIFF file")
        return pages

    def below(self, page: Page) -> list[Page]:
        """The subfiles of a page, such as smaller copies of it."""
        offsets = page.tags.get(SUBFILES, ())
        return [self._page(at)[0] for at in offsets if at not in self.seen]

    def _page(self, at: int, before: Page | None = None) -> tuple[Page, int]:
        """The page whose directory is at byte `at`, and where the next one is."""
        if at in self.seen:
            raise BadImageError("directories that loop")
        if len(self.seen) == MAX_PAGES:
            raise BadImageError(f"more than {MAX_PAGES} directories")
        self.seen.add(at)
        tags, following = self._tags(at)
        offsets = tags.pop(TILE_OFFSETS if TILE_OFFSETS in tags else STRIP_OFFSETS, ())
        # The pages of a stack differ in little else.
        page = before if before and before.tags == tags else _page(tags, self.order)
        if len(offsets) != len(page.segments.sizes):
            raise BadImageError(f"{len(offsets)} parts, but {len(page.segments.sizes)} sizes")
        return page._replace(segments=page.segments._replace(offsets=offsets)), following

    def _tags(self, at: int) -> tuple[dict[int, Values], int]:
        (n,) = self.count.unpack(self.stored.part(at, self.count.size))
        if n > MAX_ENTRIES:
            raise BadImageError(f"a directory of {n} entries")
        table = self.stored.part(at + self.count.size, n * self.entry.size + self.next.size)
        tags: dict[int, Values] = {}
        for entry in self.entry.iter_unpack(table[: -self.next.size]):
            if entry[0] in _READ and entry[1] in _TYPES:
                if (value := self.known.get(entry)) is None:
                    value = self.known[entry] = self._value(*entry)
                tags[entry[0]] = value
        return tags, self.next.unpack(table[-self.next.size :])[0]

    def _value(self, tag: int, kind: int, count: int, inline: bytes) -> Values:
        letter = _TYPES[kind]
        size = struct.calcsize(f"={letter}") * count
        if size > MAX_TABLE:
            raise BadImageError(f"a directory with a value of {size} bytes")
        if size > len(inline):
            (at,) = self.next.unpack(inline)
            inline = self.stored.part(at, size)
        if tag in _TEXTS:
            return inline[:size]
        return struct.unpack_from(f"{self.order}{count}{letter}", inline)


def _page(tags: dict[int, Values], order: str) -> Page:
    def one(tag: int, usual: int) -> int:
        return int((tags.get(tag) or (usual,))[0])

    height, width = one(HEIGHT, 0), one(WIDTH, 0)
    samples, photometric = one(SAMPLES, 1), one(PHOTOMETRIC, 1)
    check_shape(height, width, samples)
    bits, formats = set(tags.get(BITS) or (1,)), set(tags.get(SAMPLE_FORMAT) or (1,))
    if len(bits) > 1 or len(formats) > 1:
        raise BadImageError("channels of different types")
    depth, form = int(bits.pop()), int(formats.pop())
    extra = tags.get(EXTRA_SAMPLES, ())
    separate = one(PLANAR, 1) == 2 and samples > 1
    tiled = TILE_WIDTH in tags
    return Page(
        height=height,
        width=width,
        samples=samples,
        dtype=_dtype(depth, form, order),
        bits=depth,
        separate=separate,
        compression=one(COMPRESSION, 1),
        predictor=one(PREDICTOR, 1),
        photometric=photometric,
        alpha=all(value in (1, 2) for value in extra)
        and samples - len(extra) <= _COLOURS.get(photometric, 1),
        reduced=bool(one(SUBFILE_TYPE, 0) & 1),
        tiled=tiled,
        tags=tags,
        segments=_segments(tags, height, width, samples if separate else 1),
    )


def _segments(tags: dict[int, Values], height: int, width: int, planes: int) -> Segments:
    tiled = TILE_WIDTH in tags
    h = (tags.get(TILE_HEIGHT if tiled else STRIP_ROWS) or (height,))[0]
    w = (tags.get(TILE_WIDTH) or (width,))[0]
    h, w = (int(h), int(w)) if tiled else (min(int(h), height), width)
    sizes = tags.get(TILE_BYTES if tiled else STRIP_BYTES) or ()
    if h < 1 or w < 1:
        raise BadImageError(f"tiles of {w}x{h} pixels")
    expected = math.ceil(height / h) * math.ceil(width / w) * planes
    if len(sizes) != expected:
        parts = "tiles" if tiled else "strips"
        raise BadImageError(f"{len(sizes)} {parts} of {w}x{h} pixels, expected {expected}")
    return Segments(h, w, (), tuple(sizes))


def _dtype(bits: int, form: int, order: str) -> np.dtype:
    """The type of numbers of so many bits: 1 unsigned, 2 signed, 3 float, 4 not said."""
    letter = {1: "u", 2: "i", 3: "f", 4: "u"}.get(form)
    size = 1 if bits <= 8 else 2 if bits <= 16 else 4 if bits <= 32 else 8
    whole = bits in (8, 16, 32, 64)
    if letter is None or not 0 < bits <= 64 or (letter != "u" and not whole):
        raise BadImageError(f"numbers of {bits} bits of format {form} are not read")
    return np.dtype(f"{order}{letter}{size}") if (letter, size) != ("f", 1) else np.dtype("V1")
