"""Files that survive a crash: JSON lines that grow, and texts that are replaced at once."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stopmim.base.errors import StorageError


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of `path` that are whole; a kill can leave a torn one at the end."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            tree = json.loads(line)
        except ValueError:
            continue
        if isinstance(tree, dict):
            yield tree


def append_jsonl(path: Path, line: dict[str, Any]) -> None:
    with path.open("ab+") as file:
        # A full disk may have torn the last line: this one is not to be lost with it.
        at = file.seek(0, os.SEEK_END)
        file.seek(max(0, at - 1))
        begin = "" if file.read() in (b"", b"\n") else "\n"
        file.write(f"{begin}{json.dumps(line)}\n".encode())


def write_whole(path: Path, text: str) -> None:
    """Replaces the file at once: a reader, or a crash, sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from None
