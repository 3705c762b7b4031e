"""What a source of images is to the rest of the package."""

from typing import Protocol, runtime_checkable

import numpy as np


class Images(Protocol):
    """Numbered images, with or without labels."""

    labels: dict[str, np.ndarray]  # name of a label -> (n,) int64
    fingerprint: str  # changes when the images do

    def __len__(self) -> int: ...

    def read(self, i: int) -> np.ndarray:
        """Image `i`, (H, W, 3) uint8; BadImageError if it cannot be read."""

    def name(self, i: int) -> str:
        """What a message calls image `i`."""


@runtime_checkable
class Chunked(Images, Protocol):
    """Images that lie many to a file, so that neighbours should be read near each other in time."""

    chunks: np.ndarray  # (k + 1,) int64: images chunks[j] to chunks[j + 1] lie side by side
    window: int  # how many images the order of an epoch mixes at a time; see order.py
