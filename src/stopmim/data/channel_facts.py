"""Facts about the channels of images that are not ordinary pictures: ranges, empty planes, NaN."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stopmim.config.data import Kind
from stopmim.data.channels import Form

SHOWN = 16  # channels that are listed


class ChannelFacts(NamedTuple):
    """Per channel, (C,) each, over all images."""

    images: int
    kind: Kind
    low: np.ndarray  # smallest finite value; infinity if there is none
    high: np.ndarray
    empty: np.ndarray  # images in which the channel is constant
    missing: np.ndarray  # images in which it has NaN or infinity

    @classmethod
    def of(cls, pixels: np.ndarray) -> "ChannelFacts":
        """The facts of one image (H, W, C)."""
        if pixels.dtype.kind == "f":
            known = np.isfinite(pixels)
            missing = ~known.all(axis=(0, 1))
            low = pixels.min(axis=(0, 1), where=known, initial=np.inf)
            high = pixels.max(axis=(0, 1), where=known, initial=-np.inf)
        else:
            low, high = pixels.min(axis=(0, 1)), pixels.max(axis=(0, 1))
            missing = np.zeros(len(low), bool)
        form, empty = Form.of(pixels), low == high
        return cls(1, form.kind, low.astype(float), high.astype(float), empty * 1, missing * 1)

    def joined(self, other: "ChannelFacts") -> "ChannelFacts":
        """The facts of both; the images must have the same channels."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        counts = (getattr(self, x) + getattr(other, x) for x in ("empty", "missing"))
        return ChannelFacts(self.images + other.images, self.kind, low, high, *counts)

    def rows(self, names: Sequence[str] | None) -> list[tuple[str, str]]:
        """Rows of the report of `check`: type, then a line per channel."""
        channels = len(self.low)
        rows = [("channels", str(Form(channels, self.kind)))]
        for c in range(min(channels, SHOWN)):
            name = names[c] if names and len(names) == channels else f"channel {c}"
            rows.append(("", f"{name}: {self._range(c)}{self._troubles(c)}"))
        if channels > SHOWN:
            low, high = self.low[SHOWN:].min(), self.high[SHOWN:].max()
            rows.append(("", f"and {channels - SHOWN} more, {low:g} to {high:g}"))
        return rows

    def _range(self, c: int) -> str:
        if self.low[c] > self.high[c]:
            return "no finite value"
        return f"{self.low[c]:g} to {self.high[c]:g}"

    def _troubles(self, c: int) -> str:
        text = ""
        for count, what in ((self.empty[c], "empty"), (self.missing[c], "with NaN or infinity")):
            if count:
                text += f", {what} in {'all' if count == self.images else f'{count:,}'} images"
        return text


def join_channel_facts(found: Sequence[ChannelFacts | None]) -> ChannelFacts | None:
    """All of them in one; None if there are none, as for ordinary pictures."""
    whole = None
    for one in found:
        if one is not None:
            whole = one if whole is None else whole.joined(one)
    return whole
