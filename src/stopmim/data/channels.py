"""Channels of an image and the type of its numbers: what is accepted, and how it is said."""

import numpy as np

from stopmim.config.data import Kind
from stopmim.data.decode import BadImageError
from stopmim.data.pixels import PixelStats

WORDS: dict[Kind, str] = {
    "uint8": "8 bit",
    "uint16": "16 bit",
    "int16": "16 bit signed",
    "float32": "float",
}
MOST = 64  # channels
# Other types become the smallest that holds their values, or float32.
_CONVERTED = {"bool": np.uint8, "int8": np.int16} | dict.fromkeys(
    ("uint32", "int32", "uint64", "int64", "float16", "float64"), np.float32
)


def as_kind(pixels: np.ndarray) -> np.ndarray | None:
    """`pixels` in a type of `Kind`, converted if need be; None if they are not real numbers."""
    name = pixels.dtype.name
    if name in WORDS:
        return pixels
    if name not in _CONVERTED:
        return None
    with np.errstate(over="ignore"):  # infinity counts as missing, see crops.resized
        return pixels.astype(_CONVERTED[name])


def described(channels: int, kind: str) -> str:
    """Number and type of the channels in words: "12 channels, 16 bit"."""
    return f"{channels} channel{'s' * (channels != 1)}, {WORDS.get(kind, kind)}"  # type: ignore[call-overload]


def fitting(pixels: np.ndarray, stats: PixelStats) -> np.ndarray:
    """The image, in a type of `Kind`; raises BadImageError unless it is like the others."""
    if pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 == stats.channels:
        if stats.kind == "uint8":  # an ordinary picture: nothing to convert
            return pixels
    elif pixels.ndim == 3 and (converted := as_kind(pixels)) is not None:
        pixels = converted
        if (pixels.shape[2], pixels.dtype.name) == (stats.channels, stats.kind):
            return pixels
    if pixels.ndim != 3:
        raise BadImageError(
            f"an array of {pixels.ndim} dimensions; expected height, width, channels"
        )
    found, others = (
        described(n, kind)
        for n, kind in ((pixels.shape[2], pixels.dtype.name), (stats.channels, stats.kind))
    )
    raise BadImageError(f"{found}, where the others have {others}")
