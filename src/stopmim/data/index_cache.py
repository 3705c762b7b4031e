"""Cached indexes of large sources.

They are in ``$STOPMIM_CACHE``, or ``$XDG_CACHE_HOME/stopmim``, or ``~/.cache/stopmim``; an empty
STOPMIM_CACHE turns them off. A file is a plain .npz, never a pickle, replaced atomically. A source
stores the state of its files with the index, and compares it when loading. A cache that cannot be
read or written is silently ignored: it only saves time.
"""

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np

from stopmim.base.errors import StorageError
from stopmim.base.files import open_to_read, replaced

VERSION = 3  # of the format; others are never read

WORTH_IT = 10_000  # images: smaller sources are indexed each time

# File systems round times, some to two seconds: a file changed this recently may change again
# without a new time. Such a source is not cached.
SETTLED_NS = 3_000_000_000


def load(kind: str, key: bytes) -> dict[str, np.ndarray] | None:
    """Returns the arrays stored for `key`, or None."""
    if (path := _path(kind, key)) is None:
        return None
    try:
        with open_to_read(path) as file, np.load(file, allow_pickle=False) as arrays:
            found = dict(arrays)  # checks the CRC of every array
    except Exception:  # damaged in any way: the source is indexed again
        return None
    return found if found.pop("key", np.zeros(0)).tobytes() == key else None


def store(kind: str, key: bytes, arrays: dict[str, np.ndarray]) -> None:
    if (path := _path(kind, key)) is None:
        return
    with contextlib.suppress(OSError, StorageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary, temporary.open("wb") as file:
            np.savez(file, key=np.frombuffer(key, np.uint8), **arrays)  # type: ignore[arg-type]


def folder() -> Path | None:
    """The cache directory, for anything that only saves time; None if there is none."""
    own = os.environ.get("STOPMIM_CACHE")
    if own is not None:
        return Path(own) if own else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stopmim"
    except RuntimeError:  # a user without a home
        return None


def _path(kind: str, key: bytes) -> Path | None:
    where = folder()
    return where and where / f"{kind}-v{VERSION}-{hashlib.sha256(key).hexdigest()[:32]}.npz"
