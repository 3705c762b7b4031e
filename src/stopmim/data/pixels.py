"""What the numbers of an image mean: their type, and how each channel is normalised.

An ordinary picture has three channels of 8 bits, normalised by ImageNet's statistics. Any other
image has C channels of some type, and statistics that were measured once on a sample of them; they
are part of the config of a run and of every export.
"""

from dataclasses import dataclass

from stopmim.config.data import Kind
from stopmim.config.schema import Config

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, of red, green and blue from 0 to 1
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PixelStats:
    """Statistics of the channels of images, in stored units: what an encoder was trained with."""

    mean: tuple[float, ...]  # (C,)
    std: tuple[float, ...]  # (C,)
    low: tuple[float, ...] | None = None  # (C,) values are clipped to low..high; None: not clipped
    high: tuple[float, ...] | None = None
    kind: Kind = "uint8"
    per_image: bool = False  # each channel of each view is normalised by its own mean and std

    @property
    def channels(self) -> int:
        return len(self.mean)


RGB = PixelStats(tuple(255 * x for x in MEAN), tuple(255 * x for x in STD))


def stats_of(config: Config) -> PixelStats:
    """The statistics of a run, as its settled config states them."""
    data = config.data
    if data.mean is None or data.std is None:
        return RGB
    per_image = data.normalise == "per-image"
    return PixelStats(data.mean, data.std, data.low, data.high, data.kind or "uint8", per_image)
