"""The form of an image: its channels and the type of its numbers."""

from typing import Any, NamedTuple

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


class Form(NamedTuple):
    """Channels of an image and the type of its numbers; by default 8-bit RGB, as in pictures."""

    channels: int = 3
    kind: Kind = "uint8"
    names: tuple[str, ...] = ()  # of the channels, if they have names

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Form":
        """The form of an image (H, W, C)."""
        kind: Any = pixels.dtype.name
        return cls(pixels.shape[2], kind)

    @property
    def is_rgb(self) -> bool:
        return self.is_like(Form())

    def is_like(self, other: "Form") -> bool:
        """Whether both have the same channels and type, whatever the names."""
        return self[:2] == other[:2]

    def __str__(self) -> str:
        plural = "s" if self.channels != 1 else ""
        return f"{self.channels} channel{plural}, {WORDS.get(self.kind, self.kind)}"


def as_kind(pixels: np.ndarray) -> np.ndarray | None:
    """`pixels` in a type of `Kind`, converted if need be; None if they are not real numbers."""
    name = pixels.dtype.name
    if name in WORDS:
        return pixels
    if name not in _CONVERTED:
        return None
    if name == "bool":
        return pixels.view(np.uint8)
    with np.errstate(over="ignore"):  # infinity counts as missing, see crops.resized
        return pixels.astype(_CONVERTED[name])


def fitting(pixels: np.ndarray, like: Form | PixelStats) -> np.ndarray:
    """The image, in a type of `Kind`; raises BadImageError unless it has the form of the others."""
    if pixels.ndim != 3:
        raise BadImageError(
            f"an array of {pixels.ndim} dimensions; expected height, width, channels"
        )
    converted = as_kind(pixels)
    form = Form.of(pixels if converted is None else converted)
    if converted is not None and form == (like.channels, like.kind, ()):
        return converted
    others = Form(like.channels, like.kind)
    raise BadImageError(f"{form}, where the others have {others}")
