"""Files that survive a crash: growing JSON lines, and texts that are replaced as a whole."""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from stopmim.base.errors import StorageError

MOST_BYTES = 2**30  # of a file that is read whole, unless its reader allows less


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the intact lines of `path`; a kill can leave a torn one at the end."""
    if not path.exists():
        return
    for line in read_regular(path).decode("utf-8", "replace").splitlines():
        try:
            tree = json.loads(line)
        except ValueError:
            continue
        if isinstance(tree, dict):
            yield tree


def append_jsonl(path: Path, *lines: dict[str, Any]) -> None:
    """Appends `lines` in one write: a kill before or after it leaves none of them, or all."""
    with path.open("ab+") as file:
        # If a full disk tore the last line, start a new one: this line must stay readable.
        at = file.seek(0, os.SEEK_END)
        file.seek(max(0, at - 1))
        begin = "" if file.read() in (b"", b"\n") else "\n"
        file.write((begin + "".join(f"{json.dumps(line)}\n" for line in lines)).encode())


def number(value: object) -> float | None:
    """`value` if it is a finite number: a line of JSON can hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # JSON has integers of any length
        return None


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically: a reader, or a crash, sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from None


def open_to_read(path: str | bytes | Path, limit: int = MOST_BYTES) -> BufferedReader:
    """Opens a regular file of at most `limit` bytes; OSError for any other.

    A pipe would block forever, a device such as /dev/zero never ends, and any name may lead there.
    """
    shown = os.fsdecode(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte
        raise OSError(errno.EINVAL, "no name of a file", shown) from None
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), shown)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", shown)
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"more than {limit} bytes", shown)
        return open(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_regular(path: str | bytes | Path, limit: int = MOST_BYTES) -> bytes:
    """The bytes of a file that `open_to_read` opens."""
    with open_to_read(path, limit) as file:
        # No more than that, should it grow meanwhile; `read` takes the memory for it at once.
        return file.read(os.fstat(file.fileno()).st_size)
