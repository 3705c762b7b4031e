"""Pictures of images with any channels: the one rule by which figures and reports show them.

8-bit RGB is shown as it is. Of other images three channels become red, green and blue: the
requested ones, or the ones with these names, or the first, the middle and the last. Each is scaled
from its range to 0..255, so that pictures of one run are comparable.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stopmim.base.errors import UserError, did_you_mean
from stopmim.data.pixels import COLOURS, PixelStats


@dataclass(frozen=True)
class FalseColour:
    """Turns images of `stats` into pictures: `shown` are the channels for red, green and blue."""

    stats: PixelStats
    shown: tuple[int, int, int]

    @classmethod
    def of(cls, stats: PixelStats, chosen: Sequence[str] = ()) -> "FalseColour":
        """The rule for images of `stats`; `chosen` are one or three channels, as ``--show``."""
        if chosen:
            numbers = [_number(word, stats) for word in chosen]
            if len(numbers) not in (1, 3):
                raise UserError(f"--show: one channel or three, got {len(numbers)}")
            red, *others = numbers
            green, blue = others or (red, red)
            return cls(stats, (red, green, blue))
        if stats.words and set(COLOURS) <= set(stats.words):
            red, green, blue = (stats.words.index(colour) for colour in COLOURS)
            return cls(stats, (red, green, blue))
        return cls(stats, (0, stats.channels // 2, stats.channels - 1))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Pictures (..., H, W, 3), uint8, of images (..., H, W, C) in stored units."""
        if self.stats.is_picture and images.dtype == np.uint8:
            return images[..., list(self.shown)] if self.shown != (0, 1, 2) else images
        stats, shown = self.stats, list(self.shown)
        low, high = np.array(stats.bounds)[:, shown]
        if stats.kind == "float32" and stats.low is None:  # its range is not known
            mean, std = np.array([stats.mean, stats.std])[:, shown]
            low, high = mean - 3 * std, mean + 3 * std
        scaled = (images[..., shown] - low) / np.where(high > low, high - low, 1.0)
        return np.rint(255 * scaled.clip(0, 1)).astype(np.uint8)

    @property
    def caption(self) -> str:
        """Names of the channels shown; "" for ordinary pictures."""
        if self.stats.is_picture and self.shown == (0, 1, 2):
            return ""
        names = [self.stats.name(channel) for channel in self.shown]
        of = f"of {self.stats.channels}"
        if len(set(names)) == 1:
            return f"shown: channel {names[0]} {of}"
        return f"red, green, blue: channels {names[0]}, {names[1]}, {names[2]} {of}"


def _number(word: str, stats: PixelStats) -> int:
    """The channel that `word` means, by name or by number from 0."""
    if stats.names and word in stats.names:
        return stats.names.index(word)
    if re.fullmatch("[0-9]{1,9}", word) and int(word) < stats.channels:
        return int(word)
    near = did_you_mean(word, stats.names or ())
    known = f"0 to {stats.channels - 1}" + (f", or {', '.join(stats.names)}" if stats.names else "")
    raise UserError(f"--show {word}: no such channel; {near}channels are {known}")
