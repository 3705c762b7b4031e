"""The description of a kind of source, and the handling of paths and files that kinds share.

Each kind is one file of this folder that ends in a `Source`, and one line of the list in open.py.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stopmim.base.console import visible
from stopmim.base.errors import DataError, NoPartError, setting
from stopmim.base.files import read_regular
from stopmim.data.images import Images

Split = Literal["train", "test"]

MAX_SHARD = 2**46  # bytes of a file that is read in parts: more than any file system has
# Bytes to which a compressed archive or table may expand in memory, if it is small itself.
MAX_EXPANDED = int(setting("STOPMIM_MAX_BYTES", 2**29, "bytes"))
MAX_FILE = 400_000_000  # bytes of a list or a description; the scenes of CLEVR are the longest


@dataclass(frozen=True)
class Source:
    """One kind of source."""

    name: str  # the prefix that selects it, as in tar:some/folder
    # Opens the text after the prefix. Split None means every image of a source without splits,
    # otherwise its training images. Raises `no_split` if the split is missing.
    open: Callable[[str, Split | None], Images]
    suffix: str = ""  # of files of this kind
    recognise: Callable[[str], bool] = lambda text: False  # any other text, such as a folder
    generated: bool = False  # on demand: `open_test` need not look for a test split

    def matches(self, text: str) -> bool:
        named = bool(self.suffix) and text.lower().endswith(self.suffix)
        return (named and os.path.isfile(text)) or self.recognise(text)


def no_split(text: str | os.PathLike[str], split: Split) -> NoPartError:
    return NoPartError(
        f"{printable(text)}: no {split} split in this source; looked for train/ and val/, or for "
        f"these words in file names; eval --hold-out 0.2 makes one"
    )


def refuse_split(text: str | os.PathLike[str], split: Split | None) -> None:
    """Raises NoPartError if a split is asked for; for sources that have none."""
    if split is not None:
        raise no_split(text, split)


def contains(folder: str, *names: str) -> bool:
    """Whether at least one of these files or folders exists in `folder`."""
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file of at most `MAX_FILE` bytes."""
    try:
        return read_regular(path, MAX_FILE)
    except OSError as error:  # a missing file is a missing split: each has its own
        kind = NoPartError if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"{printable(path)}: {error.strerror}") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{printable(path)}: not JSON: {str(error)[:100]}") from None


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """One line of valid Unicode that names a file, for logs and JSON; different for every path.

    Control characters, bytes that are not UTF-8, and the backslash itself are escaped.
    """
    text = os.fsencode(path).decode("utf-8", "surrogateescape")
    return visible(text.replace("\\", "\\\\"))


class PackedPaths(Sequence[bytes]):
    """A sequence of byte strings in one array, and an array of where each begins.

    Worker processes share the pages of an array. The reference counts of a million objects would
    make each worker copy them.
    """

    def __init__(self, text: np.ndarray, offsets: np.ndarray) -> None:
        self.text, self.offsets = text, offsets  # (bytes,) uint8, (n + 1,) int64

    @classmethod
    def pack(cls, items: Sequence[bytes]) -> "PackedPaths":
        return cls(np.frombuffer(b"".join(items), np.uint8), np.cumsum([0, *map(len, items)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> bytes:  # type: ignore[override]  # never sliced
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        return self.text[self.offsets[i] : self.offsets[i + 1]].tobytes()
