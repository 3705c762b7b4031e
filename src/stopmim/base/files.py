"""Files that survive a crash: growing JSON lines, and texts that are replaced as a whole."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stopmim.base.errors import StorageError


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the intact lines of `path`; a kill can leave a torn one at the end."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
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
