"""Images as the files of a shard: their own bytes, or resized and encoded anew."""

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


class Encoder:
    """Encodes images in worker processes.

    Without `size` a file keeps its bytes. With it, a picture whose shorter side is longer becomes a
    JPEG of that size. The result depends on nothing but the image and these two numbers.
    """

    def __init__(self, watched: Watched, size: int | None, quality: int) -> None:
        self.watched, self.size, self.quality = watched, size, quality

    def __call__(self, numbers: list[int]) -> list[Encoded]:
        return [self._one(number) for number in numbers]

    def _one(self, number: int) -> Encoded:
        with collect_files() as files:
            try:
                pixels = self.watched.read(number)
            except BadImageError as error:
                return Encoded(number, "", b"", str(error))
        if self.size is not None and min(pixels.shape[:2]) > self.size:
            return Encoded(number, "jpg", self._resized(pixels, self.size))
        if files:
            kind = format_of(files[-1]).split()[0]
            return Encoded(number, _EXTENSION.get(kind, kind.lower()), files[-1])
        return Encoded(number, "png", _saved(pixels, "PNG"))  # such as a row of an array

    def _resized(self, pixels: np.ndarray, size: int) -> bytes:
        height, width = pixels.shape[:2]
        short = min(height, width)
        small = resized(pixels, round(height * size / short), round(width * size / short))
        return _saved(small.permute(1, 2, 0).numpy(), "JPEG", quality=self.quality)


def _saved(pixels: np.ndarray, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, kind, **options)
    return file.getvalue()
