"""Paths of files: printed for messages, and millions of them packed into two arrays."""

import os
from collections.abc import Iterator, Sequence

import numpy as np


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """One line of valid Unicode that names a file, for logs and JSON; different for every path.

    Control characters, bytes that are not UTF-8, and the backslash itself are escaped.
    """
    text = os.fsencode(path).decode("utf-8", "surrogateescape")
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text
    )


def file_names(paths: Sequence[str]) -> list[str]:
    """Printable base names; if two are equal, paths relative to the common folder instead."""
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, common) for path in paths]
    return [printable(name) for name in names]


class PackedPaths:
    """A sequence of byte strings in one array, and an array of where each begins.

    Worker processes share the pages of an array. The reference counts of a million objects would
    make each worker copy them.
    """

    def __init__(self, text: np.ndarray, offsets: np.ndarray) -> None:
        self.text, self.offsets = text, offsets  # (bytes,) uint8, (n + 1,) int64

    @classmethod
    def pack(cls, items: Sequence[bytes]) -> "PackedPaths":
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
