"""Channels put together: those of several files, or some of an image."""

from collections.abc import Sequence

import numpy as np

from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError
from stopmim.data.rasters.raster import Raster, check_shape


class Stack:
    """Images of one size and type, one after the other along the channels."""

    def __init__(self, parts: Sequence[Raster], names: Sequence[str]) -> None:
        self.parts, self.names = parts, list(names)
        first = parts[0]
        for part, name in zip(parts, names, strict=True):
            if part.shape != (*first.shape[:2], 1):
                height, width, channels = part.shape
                raise BadImageError(
                    f"{name} has {width}x{height} pixels and {channels} channels; expected "
                    f"{first.shape[1]}x{first.shape[0]} pixels and one channel, as {names[0]}"
                )
            if part.kind != first.kind:
                raise BadImageError(f"{name} has {part.kind}, but {names[0]} has {first.kind}")
        self.kind = first.kind
        self.shape = check_shape(*first.shape[:2], len(parts))
        self.tall, self.tile = max(x.tall for x in parts), sum(x.tile for x in parts)
        self.slow = max(x.slow for x in parts)
        each = min(len(part.levels) for part in parts)
        self.levels: Sequence[Raster] = [
            Stack([part.levels[i] for part in parts], names) for i in range(each)
        ]

    def read(self, box: Box | None = None) -> np.ndarray:
        height, width = (box.height, box.width) if box else self.shape[:2]
        found = np.empty((height, width, len(self.parts)), self.kind)
        for i, part in enumerate(self.parts):
            found[:, :, i : i + 1] = part.read(box)
        return found


class SomeChannels:
    """Some channels of an image, in this order."""

    def __init__(self, whole: Raster, index: Sequence[int]) -> None:
        self.whole, self.index = whole, list(index)
        if max(self.index) >= whole.shape[2]:
            raise BadImageError(f"{whole.shape[2]} channels; channel {max(self.index)} is missing")
        self.kind = whole.kind
        self.shape = whole.shape[0], whole.shape[1], len(self.index)
        self.tall, self.tile, self.slow = whole.tall, whole.tile, whole.slow
        self.names = [whole.names[i] for i in self.index] if whole.names else []
        self.levels: Sequence[Raster] = [SomeChannels(level, index) for level in whole.levels]

    def read(self, box: Box | None = None) -> np.ndarray:
        return self.whole.read(box)[:, :, self.index]
