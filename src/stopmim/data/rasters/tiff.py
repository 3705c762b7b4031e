"""TIFF, BigTIFF, OME-TIFF and GeoTIFF as arrays.

Every plane of the full size is a channel, in the order of the file: the samples of a pixel, the
bands of a GeoTIFF, and the pages of a stack, whatever a microscope varied between them. Smaller
copies of the image, in subfiles or pages of their own, are its levels.

The pixels of a small uncompressed file are a view of its bytes. Otherwise the strips or tiles that
a box touches are read, each decoded into memory of the size that it must have.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from stopmim.data.crops import Box
from stopmim.data.decode import MAX_PIXELS, BadImageError
from stopmim.data.rasters import tiff_tags as tags
from stopmim.data.rasters.raster import (
    MOST,
    SLOW,
    Plain,
    Raster,
    Stored,
    check_bytes,
    check_shape,
    check_tiles,
    decompressed,
    extra,
    kind_of,
    paste,
)
from stopmim.data.rasters.tiff_tags import Directories, Page

# Compression -> codec, see raster.decompressed; 1 is none.
CODECS = {8: "zlib", 32946: "zlib", 5: "lzw", 32773: "packbits", 34925: "lzma", 50000: "zstd"}
PICTURES = {7: "jpeg8", 33003: "jpeg2k", 33005: "jpeg2k", 34712: "jpeg2k", 50001: "webp",
            50002: "jpegxl", 34933: "png"}  # fmt: skip
RGB, YCBCR = 2, 6  # photometric interpretations
_OME_NAME = re.compile(r"<(?:\w+:)?Channel\b[^>]*?\bName=\"([^\"]*)\"")
_GDAL_NAME = re.compile(r'<Item name="DESCRIPTION" sample="\d+" role="description">([^<]*)<')
_STACK = re.compile(r'<(?:\w+:)?OME[ >]|ImageJ=|\{"shape": \[')  # how programs describe a stack


def open_tiff(stored: Stored) -> Raster:
    pages, levels = _planes(Directories(stored))
    names = _names(pages)
    if (pixels := _plain(stored, pages)) is not None and not levels:
        return Plain(pixels, names, stored)
    return Tiff(stored, pages, names, [Tiff(stored, level, names) for level in levels])


def is_picture(stored: Stored) -> bool:
    """Whether a TIFF is an ordinary picture: 8 bits, grey or in colours, perhaps with opacity.

    Several pages are several pictures, of which the first counts, unless a description says that
    they are one stack.
    """
    pages, _ = _planes(Directories(stored))
    page = pages[0]
    one = len(pages) == 1 or not _STACK.search(page.text(tags.DESCRIPTION))
    eight = page.dtype == np.uint8
    return one and eight and page.alpha and page.height * page.width <= MAX_PIXELS


def _planes(directories: Directories) -> tuple[list[Page], list[list[Page]]]:
    """The pages that together are the image, and those of each smaller copy."""
    every = directories.chain()
    first = every[0]
    layout = first.layout
    pages = [page for page in every if page.layout == layout and not page.reduced]
    pages = pages or [first]
    check_shape(first.height, first.width, first.samples * len(pages))
    below = [directories.below(page) for page in pages]
    levels = [list(level) for level in zip(*below, strict=False) if len(level) == len(pages)]
    if len(pages) == 1:
        levels += [[page] for page in every if _is_copy(page, first)]
    alike = [level for level in levels if all(_is_copy(page, first) for page in level)]
    return pages, sorted(alike, key=lambda level: -level[0].height)


def _is_copy(page: Page, first: Page) -> bool:
    """Whether `page` shows what `first` does, with fewer pixels."""
    same = (page.samples, page.dtype, page.tiled) == (first.samples, first.dtype, first.tiled)
    scale = first.height / page.height
    return same and scale > 1.5 and abs(page.width * scale - first.width) <= 2 * scale


def _names(pages: list[Page]) -> list[str]:
    """Names of the channels, if the file has one for each."""
    first = pages[0]
    names = _OME_NAME.findall(first.text(tags.DESCRIPTION))
    names = names or _GDAL_NAME.findall(first.text(tags.GDAL_METADATA))
    return names if len(names) == first.samples * len(pages) else []


def _plain(stored: Stored, pages: list[Page]) -> np.ndarray | None:
    """A view (H, W, C) of the bytes of a file; None if the planes do not follow one another."""
    first = pages[0]
    if first.tiled or first.compression != 1 or first.bits != 8 * first.dtype.itemsize:
        return None
    if len(pages) > 1 and first.samples > 1:
        return None
    row = first.width * first.dtype.itemsize * (1 if first.separate else first.samples)
    starts = list[int]()  # of the planes
    total = row * first.height * (first.samples if first.separate else 1)
    for page in pages:
        offsets, sizes = page.segments.offsets, page.segments.sizes
        if sum(sizes) != total or page.compression != 1:
            return None
        if len(offsets) > 1 and not _follow(offsets, sizes):
            return None
        starts.append(offsets[0])
    step = starts[1] - starts[0] if len(starts) > 1 else row * first.height
    if any(b - a != step for a, b in itertools.pairwise(starts)) or step < 0:
        return None
    count = first.samples if first.separate else len(pages)
    if starts[0] + (count - 1) * step + row * first.height > len(stored):
        raise BadImageError("ends within its pixels")
    item = first.dtype.itemsize
    strides = (row, item * first.samples, item) if count == 1 else (row, item, step)
    shape = first.height, first.width, first.samples if count == 1 else count
    return np.ndarray(shape, first.dtype, stored.data, starts[0], strides)


def _follow(offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether each strip begins where the one before it ends."""
    return all(a + n == b for a, n, b in zip(offsets, sizes, offsets[1:], strict=False))


class Tiff(Raster):
    """An image in strips or tiles."""

    def __init__(
        self,
        stored: Stored,
        pages: list[Page],
        names: list[str],
        levels: Sequence[Raster] = (),
    ) -> None:
        self.stored, self.pages, self.names, self.levels = stored, pages, names, levels
        first = pages[0]
        self.kind = kind_of(first.dtype)
        self.shape = first.height, first.width, first.samples * len(pages)
        parts = first.segments
        self.tall = parts.height
        self.slow = max(_slow(page) for page in pages)
        each = parts.height * parts.width * (1 if first.separate else first.samples)
        self.tile = each * first.dtype.itemsize
        check_tiles(self, len(parts.sizes) * len(pages))

    def read(self, box: Box | None = None) -> np.ndarray:
        check_bytes(self, box)
        box = box or Box(0, 0, *self.shape[:2])
        # Planes are contiguous while they are filled, in the order of the channels.
        found = np.empty((self.shape[2], box.height, box.width), self.kind)
        for number, page in enumerate(self.pages):
            self._fill(found[number * page.samples : (number + 1) * page.samples], page, box)
        return found.transpose(1, 2, 0)

    def _fill(self, planes: np.ndarray, page: Page, box: Box) -> None:
        """Reads `box` of a page into `planes` (S, h, w)."""
        height, width = page.segments.height, page.segments.width
        across, down = -(-page.width // width), -(-page.height // height)
        for plane in range(page.samples if page.separate else 1):
            mine = planes[plane : plane + 1] if page.separate else planes
            for y in range(box.top // height, -(-(box.top + box.height) // height)):
                for x in range(box.left // width, -(-(box.left + box.width) // width)):
                    number = (plane * down + y) * across + x
                    rows = height if page.tiled else min(height, page.height - y * height)
                    pixels = self._segment(page, number, (rows, width, len(mine)))
                    start = 0, y * height - box.top, x * width - box.left
                    paste(mine, pixels.transpose(2, 0, 1), start)

    def _segment(self, page: Page, number: int, shape: tuple[int, int, int]) -> np.ndarray:
        """One strip or tile, (h, w, S)."""
        at, size = page.segments.offsets[number], page.segments.sizes[number]
        count = int(np.prod(shape))
        if count * page.dtype.itemsize > MOST:
            raise BadImageError(f"a tile of {shape[1]}x{shape[0]} pixels is too large to be read")
        if not size:  # left out: nothing was measured there
            return np.zeros(shape, page.dtype)
        data = self.stored.part(at, min(size, 2 * MOST))
        if page.compression in PICTURES:
            return _decode_picture(page, data, shape)
        packed = -(-shape[1] * shape[2] * page.bits // 8) * shape[0]
        unpacked = _unpack(page, data, packed)
        if len(unpacked) < packed:
            raise BadImageError(f"a strip or tile of {len(unpacked)} bytes, expected {packed}")
        if page.bits != 8 * page.dtype.itemsize:
            codecs = extra("imagecodecs", "science", f"TIFF of {page.bits} bits")
            native = page.dtype.newbyteorder("=")
            pixels = codecs.packints_decode(
                unpacked[:packed], native, page.bits, shape[1] * shape[2]
            )
            return pixels.reshape(shape)
        pixels = np.frombuffer(unpacked, page.dtype, count).reshape(shape)
        if page.predictor == 2:
            # Each number is the difference to its left neighbour, and overflows like an integer.
            return np.cumsum(pixels, axis=1, dtype=page.dtype.newbyteorder("="))
        if page.predictor == 3:
            # A row has the most significant bytes of all numbers first, as differences as well.
            rows = np.frombuffer(unpacked, np.uint8, packed).reshape(shape[0], -1, shape[2])
            rows = np.cumsum(rows, axis=1, dtype=np.uint8)
            rows = rows.reshape(shape[0], page.dtype.itemsize, -1).swapaxes(1, 2)
            return np.ascontiguousarray(rows).view(page.dtype.newbyteorder(">")).reshape(shape)
        return pixels


def _slow(page: Page) -> int:
    """How many times as long as deflate a page takes; sums along its rows take as long again."""
    codec = CODECS.get(page.compression) or PICTURES.get(page.compression, "")
    return max(SLOW.get(codec, 1), 2 if page.predictor != 1 else 1)


def _unpack(page: Page, data: bytes, size: int) -> bytes | np.ndarray:
    """Decompresses a segment, which must not be larger than `size` bytes."""
    if page.compression == 1:
        return data
    if page.compression not in CODECS:
        raise BadImageError(f"TIFF of compression {page.compression} is not read; use deflate")
    return decompressed(CODECS[page.compression], data, size, "TIFF")


def _decode_picture(page: Page, data: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """A segment that is a picture of its own, as JPEG, whose header may claim any size."""
    name = PICTURES[page.compression]
    codecs = extra("imagecodecs", "science", f"TIFF compressed by {name}")
    out = np.empty(shape if shape[2] > 1 else shape[:2], page.dtype.newbyteorder("="))
    options: dict[str, Any] = {}
    if name == "jpeg8":
        ycbcr = page.photometric == YCBCR
        options["tables"] = page.tags.get(tags.JPEG_TABLES)
        if shape[2] == 3 and page.photometric in (RGB, YCBCR):
            options["colorspace"] = "YCBCR" if ycbcr else "RGB"
            options["outcolorspace"] = "RGB"
    return getattr(codecs, f"{name}_decode")(data, out=out, **options).reshape(shape)
