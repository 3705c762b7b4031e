"""Images as the files of a shard: their own bytes, or resized and re-encoded."""

import io
from typing import NamedTuple

import numpy as np
from PIL import Image

from stopmim.data.crops import resized
from stopmim.data.decode import BadImageError, collect_files, format_of
from stopmim.data.workers import Watched

# By Pillow's names of the formats; a JPEG of several pictures is a JPEG.
_EXTENSION = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "HEIF": "heic"}


class Encoded(NamedTuple):
    """An image as a file."""

    number: int
    extension: str
    data: bytes
    reason: str = ""  # why it cannot be read


class FileEncoder:
    """Encodes images in worker processes.

    Without `size` a picture keeps its bytes. With it, one whose shorter side is longer becomes a
    JPEG of that size. Images of other channels or types become .npy files. The result depends on
    nothing but the image and these two numbers.
    """

    def __init__(self, watched: Watched, size: int | None, quality: int) -> None:
        self.images, self.watched = watched.images, watched
        self.size, self.quality = size, quality

    def __call__(self, numbers: list[int]) -> list[Encoded]:
        return [self._one(number) for number in numbers]

    def _one(self, number: int) -> Encoded:
        with collect_files() as files:
            try:
                pixels = self.watched.read(number)
            except BadImageError as error:
                return Encoded(number, "", b"", str(error))
        is_picture = pixels.dtype == np.uint8 and pixels.shape[2] == 3
        if self.size is not None and min(pixels.shape[:2]) > self.size:
            small = _shrunk(pixels, self.size)
            if is_picture:
                return Encoded(number, "jpg", _saved(small, "JPEG", quality=self.quality))
            return Encoded(number, "npy", _array(small))
        if files:
            kind = format_of(files[-1]).split()[0]
            return Encoded(number, _EXTENSION.get(kind, kind.lower()), files[-1])
        if is_picture:  # such as a row of an array
            return Encoded(number, "png", _saved(pixels, "PNG"))
        return Encoded(number, "npy", _array(pixels))


def _shrunk(pixels: np.ndarray, size: int) -> np.ndarray:
    """`pixels` with a shorter side of `size`, of the same type."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    small = resized(pixels, round(height * size / short), round(width * size / short))
    found = small.permute(1, 2, 0).numpy()
    if pixels.dtype.kind in "iu" and found.dtype != pixels.dtype:
        known = np.iinfo(pixels.dtype)
        found = found.round().clip(known.min, known.max)
    return found.astype(pixels.dtype, copy=False)


def _array(pixels: np.ndarray) -> bytes:
    """A .npy file: any channels and types, as quick to read as memory."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(pixels), allow_pickle=False)
    return file.getvalue()


def _saved(pixels: np.ndarray, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, kind, **options)
    return file.getvalue()
