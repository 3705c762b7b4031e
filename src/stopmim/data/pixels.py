"""Pixel statistics: the type of the numbers of an image, and how each channel is normalised.

An ordinary picture has three channels of 8 bits, normalised by ImageNet's statistics. Any other
image has C channels of some type, and statistics that were measured once on a sample of them; they
are part of the config of a run and of every export.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stopmim.config.data import DataConfig, Kind
from stopmim.config.schema import Config

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, of red, green and blue from 0 to 1
STD = (0.229, 0.224, 0.225)
Numbers = tuple[float, ...]  # (C,)
COLOURS = ("red", "green", "blue")  # the channels of an ordinary picture


@dataclass(frozen=True)
class PixelStats:
    """Statistics of the channels of images, in stored units: what an encoder was trained with."""

    mean: tuple[float, ...]  # (C,)
    std: tuple[float, ...]  # (C,)
    low: tuple[float, ...] | None = None  # (C,) values are clipped to low..high; None: not clipped
    high: tuple[float, ...] | None = None
    kind: Kind = "uint8"
    per_image: bool = False  # each channel of each view is normalised by its own mean and std
    names: tuple[str, ...] | None = None  # (C,) of the channels, where they are known

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def is_picture(self) -> bool:
        """Whether the images are ordinary pictures, which Pillow opens: 8-bit RGB."""
        known = self.names is None or self.words == COLOURS
        return self.channels == 3 and self.kind == "uint8" and known

    @property
    def words(self) -> tuple[str, ...] | None:
        """The names in lower case, to compare them; colours are called "red", "green", "blue"."""
        if self.names is None:
            return COLOURS if self.channels == 3 and self.kind == "uint8" else None
        short = {colour[0]: colour for colour in COLOURS}
        return tuple(short.get(name.lower(), name.lower()) for name in self.names)

    @property
    def bounds(self) -> tuple[Numbers, Numbers]:
        """The range of each channel: what it is clipped to, or else that of its type."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        if self.kind == "float32":  # in some unit of its own
            return (0.0,) * self.channels, (1.0,) * self.channels
        known = np.iinfo(self.kind)
        return (float(known.min),) * self.channels, (float(known.max),) * self.channels

    def unit(self) -> tuple[Numbers, Numbers]:
        """Mean and deviation of channels scaled from `bounds` to 0..1, for other libraries.

        Images with statistics of their own need none: 0 and 1.
        """
        if self.per_image:
            return (0.0,) * self.channels, (1.0,) * self.channels
        if self == RGB:
            return MEAN, STD  # without the rounding of 255 * x / 255
        each = list(zip(self.mean, self.std, *self.bounds, strict=True))
        return (
            tuple((m - low) / ((high - low) or 1) for m, _, low, high in each),
            tuple(s / ((high - low) or 1) for _, s, low, high in each),
        )

    @property
    def is_plain(self) -> bool:
        """Whether normalising is no more than ``(pixels / 255 - mean) / std`` of pictures.

        Any library can do that; clipping and per-image statistics only this one.
        """
        return self.is_picture and self.low is None and self.high is None and not self.per_image

    def describe(self) -> str:
        """Channels and their type in words: "12 channels of uint16"."""
        return f"{self.channels} {'channel' if self.channels == 1 else 'channels'} of {self.kind}"

    def name(self, channel: int) -> str:
        """A channel by number, from 0, and by name if it has one: "3 (nir)"."""
        return f"{channel} ({self.names[channel]})" if self.names else f"{channel}"

    def facts(self) -> dict[str, str]:
        """Label and value of each fact, as ``stopmim inspect`` and exports print them."""
        clipped = self.low is not None and self.high is not None
        own = "each image then by its own mean and deviation" if self.per_image else ""
        how = ("clipped" if clipped else "", "less the mean, over the deviation", own)
        found = {"channels": f"{self.channels} of {self.kind}"}
        found["normalised"] = ", ".join(filter(None, how))
        for i, (mean, std, low, high) in enumerate(
            zip(self.mean, self.std, *self.bounds, strict=True)
        ):
            name = f"{self.names[i]}: " if self.names else ""
            clip = f"{low:g} to {high:g}, " if clipped else ""
            found[f"channel {i}"] = f"{name}{clip}mean {mean:.6g}, deviation {std:.6g}"
        return found

    def tag(self) -> dict[str, Any]:
        """The statistics as keys of the section `data`, for exports; `from_tag` reads them."""
        found = asdict(self) | {"channels": self.channels, "channel_names": self.names}
        found["normalise"] = "per-image" if found.pop("per_image") else "measured"
        return {key: value for key, value in found.items() if key != "names" and value is not None}


RGB = PixelStats(tuple(255 * x for x in MEAN), tuple(255 * x for x in STD))


def from_tag(tag: Any) -> PixelStats:
    """The statistics that `PixelStats.tag` wrote to an export; ValueError if it is something else.

    The section `data` of a config checks it: types, lengths, finite numbers.
    """
    data = DataConfig.model_validate(tag, strict=False)
    if data.mean is None or data.std is None:
        raise ValueError("no mean or no std in it")
    return _stats(data)


def stats_of(config: Config) -> PixelStats:
    """The statistics of a run, as its settled config states them."""
    return _stats(config.data)


def _stats(data: DataConfig) -> PixelStats:
    if data.mean is None or data.std is None:
        return RGB
    return PixelStats(
        data.mean,
        data.std,
        data.low,
        data.high,
        data.kind or "uint8",
        data.normalise == "per-image",
        data.channel_names,
    )
