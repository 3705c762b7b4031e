"""Millions of byte strings without millions of objects."""

from collections.abc import Iterator, Sequence

import numpy as np


class Names:
    """A sequence of byte strings in one array, and where each begins.

    Worker processes share the pages of an array, where the reference counts of objects would have
    each worker copy them.
    """

    def __init__(self, text: np.ndarray, offsets: np.ndarray) -> None:
        self.text, self.offsets = text, offsets  # (bytes,) uint8, (n + 1,) int64

    @classmethod
    def of(cls, items: Sequence[bytes]) -> "Names":
        offsets = np.zeros(len(items) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])
        return cls(np.frombuffer(b"".join(items), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> bytes:
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        return self.text[self.offsets[i] : self.offsets[i + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))
