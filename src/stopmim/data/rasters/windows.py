"""Parts of large images: read in bounded memory, and not at a higher resolution than is of use."""

import math

import numpy as np

from stopmim.data.crops import SPARE, Box, averaged
from stopmim.data.decode import BadImageError, one_reason
from stopmim.data.rasters.raster import MOST, Raster, bytes_of, cut

LARGE = 2**26  # bytes of pixels: a smaller image is read whole, and then cut
# Bytes of pixels times `slow`: to read more of them for one image would take more than 20 s.
SHRUNK = 2**32
STRIP, STRIPS = 2**26, 2**28  # bytes that are read at a time of a part that does not fit
PARTS, PART = 16, 256  # number and side of the squares that statistics of a large image are of
SAMPLED = 2**30  # bytes that are decoded for them: of large tiles there are fewer squares


def read_whole(raster: Raster) -> np.ndarray:
    """The image; one of more than `MOST` bytes is shrunk while it is read."""
    every = [raster, *raster.levels]
    fits = next((level for level in every if bytes_of(level) <= MOST), None)
    with one_reason():
        return fits.read() if fits else _shrunk(raster, Box(0, 0, *raster.shape[:2]))


def read_sample(raster: Raster, rng: np.random.Generator) -> np.ndarray:
    """The image; of a large one `PARTS` squares at random places, one below the other."""
    if bytes_of(raster) <= LARGE:
        return read_whole(raster)
    height, width = (min(side, PART) for side in raster.shape[:2])
    size = bytes_of(raster)
    # Of large tiles, or of an image that is one, each part would decode most of it again.
    at_once = size <= MOST and raster.tile * PARTS >= size
    parts = PARTS if at_once else max(1, min(PARTS, SAMPLED // (_touched(raster) * raster.slow)))
    places = [rng.integers((raster.shape[0] - height + 1, raster.shape[1] - width + 1))
              for _ in range(parts)]  # fmt: skip
    boxes = [Box(int(top), int(left), height, width) for top, left in places]
    with one_reason():
        if at_once:
            whole = raster.read()
            return np.concatenate([cut(whole, box) for box in boxes])
        return np.concatenate([raster.read(box) for box in boxes])


def _touched(raster: Raster) -> int:
    """Bytes of the tiles that a square of `PART` pixels reaches into, at most."""
    row = raster.tall * bytes_of(raster) // (raster.shape[0] * raster.shape[1])
    wide = max(1, raster.tile // max(1, row))
    down, across = (min(PART // side, -(-whole // side)) + 1 for side, whole in
                    zip((raster.tall, wide), raster.shape[:2], strict=True))  # fmt: skip
    return max(1, down * across * raster.tile)


def read_view(raster: Raster, box: Box, size: int) -> np.ndarray:
    """The pixels of `box`, or fewer: at least `SPARE` times `size` along each side, if it has them.

    If the file has smaller copies, the smallest that is good enough is read.
    """
    for level in reversed(raster.levels):
        part = _on_level(box, raster, level)
        if min(part.height, part.width) >= SPARE * size:
            return _bounded(level, part)
    return _bounded(raster, box)


def _on_level(box: Box, raster: Raster, level: Raster) -> Box:
    """The box of a smaller copy that shows what `box` does."""
    down, across = level.shape[0] / raster.shape[0], level.shape[1] / raster.shape[1]
    top, left = int(box.top * down), int(box.left * across)
    height = min(round(box.height * down), level.shape[0] - top)
    return Box(top, left, height, min(round(box.width * across), level.shape[1] - left))


def _bounded(raster: Raster, box: Box) -> np.ndarray:
    with one_reason():
        return raster.read(box) if bytes_of(raster, box) <= MOST else _shrunk(raster, box)


def _shrunk(raster: Raster, box: Box) -> np.ndarray:
    """The pixels of `box`, each the mean of a square of them, read in strips."""
    size, most = bytes_of(raster, box), SHRUNK // raster.slow
    if size > most:  # a sparse or compressed file of them may be small
        raise BadImageError(
            f"{box.width}x{box.height} pixels are {size / 2**30:.4g} GiB, more than the "
            f"{most / 2**30:g} GiB that are shrunk in this format; add smaller copies to the file "
            f"(overviews, levels) or cut it"
        )
    by = math.ceil(math.sqrt(size / STRIP))
    height, width = box.height // by, box.width // by
    found = np.empty((height, width, raster.shape[2]), raster.kind)
    row, tall = size // box.height, raster.tall
    if tall * row > MOST:
        raise BadImageError(
            f"tiles of {tall} rows, of which {box.width} pixels across take {tall * row >> 20} "
            f"MiB; write lower ones"
        )
    # Of the result. A tile is decoded anew for each part that it reaches into: parts are high.
    rows = max(1, max(STRIP, min(4 * tall * row, STRIPS)) // (row * by))
    for top in range(0, height, rows):
        n = min(rows, height - top)
        pixels = raster.read(Box(box.top + top * by, box.left, n * by, width * by))
        found[top : top + n] = averaged(pixels, by)
    return found
