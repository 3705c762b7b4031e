"""Pictures as they are stored: PNG and PGM of 16 bits, and those of 8 bits without a conversion."""

import re

import numpy as np

from stopmim.config.data import Kind
from stopmim.data.crops import Box
from stopmim.data.decode import MAX_PIXELS, BadImageError, opened
from stopmim.data.rasters.raster import (
    Plain,
    Raster,
    Stored,
    bytes_of,
    check_bytes,
    check_shape,
    cut,
    extra,
)

PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by the type of colour; a palette has no 16 bits
# Width, height and largest value, with comments between them.
_PNM_HEADER = re.compile(rb"P[56]" + 3 * rb"\s+(?:#[^\n]*\n\s*)*(\d{1,7})" + rb"\s")
_MODES: dict[str, tuple[int, Kind]] = {
    **{"L": (1, "uint8"), "LA": (2, "uint8"), "RGB": (3, "uint8"), "RGBA": (4, "uint8")},
    **{"I;16": (1, "uint16"), "F": (1, "float32")},
}


def is_deep(start: bytes) -> bool:
    """Whether a picture has 16 bits, by its first bytes."""
    if start.startswith(PNG):
        return start[24:25] == b"\x10"
    header = _PNM_HEADER.match(start)
    return header is not None and int(header[3]) > 255


def open_picture(stored: Stored) -> Raster:
    """Any picture that decode.py knows, with its own number of channels and of bits."""
    start = bytes(stored.data[:1024])
    header = _PNM_HEADER.match(start)
    if not header or not is_deep(start):
        return Picture(stored)
    width, height, highest = (int(number) for number in header.groups())
    shape = check_shape(height, width, 1 if start[:2] == b"P5" else 3)
    if highest > 65535 or header.end() + 2 * height * width * shape[2] > len(stored):
        raise BadImageError("ends within its pixels")
    return Plain(np.ndarray(shape, ">u2", stored.data, header.end()), stored=stored)


class Picture(Raster):
    """A picture that is decoded whole, by imagecodecs if it is a PNG of 16 bits."""

    kind: Kind

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.deep = is_deep(bytes(stored.data[:1024]))
        if self.deep:
            width, height = np.frombuffer(stored.part(16, 8), ">u4").tolist()
            channels, self.kind = _PNG_CHANNELS.get(stored.part(25, 1)[0], 0), "uint16"
        else:
            with opened(bytes(stored.data)) as image:
                width, height = image.size
                channels, self.kind = _MODES.get(image.mode, (3, "uint8"))
        self.shape = check_shape(height, width, channels)
        self.tall, self.tile = height, bytes_of(self)
        if height * width > MAX_PIXELS:
            raise BadImageError(f"{width}x{height} is more than {MAX_PIXELS} pixels")

    def read(self, box: Box | None = None) -> np.ndarray:
        check_bytes(self, None)
        if self.deep:
            # Pillow reduces 16-bit colours to 8.
            codecs = extra("imagecodecs", "science", "PNG of 16 bits")
            out = np.empty(self.shape if self.shape[2] > 1 else self.shape[:2], np.uint16)
            try:
                pixels = codecs.png_decode(bytes(self.stored.data), out=out)
            except BaseException:
                out.resize(0, refcheck=False)  # imagecodecs holds on to it for good
                raise
        else:
            with opened(bytes(self.stored.data)) as image:
                pixels = np.asarray(image if image.mode in _MODES else image.convert("RGB"))
        return cut(pixels.reshape(self.shape), box)
