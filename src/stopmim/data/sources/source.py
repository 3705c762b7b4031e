"""A kind of source: its name, how it is recognised and how it is opened.

Each kind is one file of this folder that ends in a `Source`, and one line of the list in open.py.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stopmim.base.errors import DataError, NoPartError
from stopmim.data.images import Images
from stopmim.data.sources.paths import printable

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Source:
    """One kind of source.

    Attributes:
        name: the prefix that selects it, as in ``tar:some/folder``.
        open: opens the text after the prefix. Split None means every image of a source without
            splits, otherwise its training images. Raises `no_split` if the split is missing.
        suffix: files with this suffix are of this kind.
        recognise: whether any other text, such as a folder or a pattern, is of this kind.
        generated: images are made on demand, so that a test split need not be looked for.
    """

    name: str
    open: Callable[[str, Split | None], Images]
    suffix: str = ""
    recognise: Callable[[str], bool] = lambda text: False
    generated: bool = False

    def matches(self, text: str) -> bool:
        named = bool(self.suffix) and text.lower().endswith(self.suffix)
        return (named and os.path.isfile(text)) or self.recognise(text)


def no_split(text: str | os.PathLike[str], split: Split) -> NoPartError:
    return NoPartError(
        f"{printable(text)}: no {split} split in this source; looked for train/ and val/, or for "
        f"these words in file names; eval --hold-out 0.2 makes one"
    )


def contains(folder: str, *names: str) -> bool:
    """Whether at least one of these files or folders exists in `folder`."""
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:  # a missing file is a missing split: each has its own
        kind = NoPartError if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"{printable(path)}: {error.strerror}") from None


def read_json(path: Path) -> Any:
    data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{printable(path)}: not JSON: {str(error)[:100]}") from None
