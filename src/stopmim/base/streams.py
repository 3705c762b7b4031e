"""Standard streams of a command, which may be closed, full, or unable to show a name."""

import io
import os
import sys
from typing import Any

from stopmim.base.errors import StorageError


class _Lossy(io.FileIO):
    """A file that drops data that does not fit: a log on a full disk must not end a run."""

    problem: OSError | None = None  # the first one

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError as error:
            self.problem = self.problem or error
            return len(data)


_stdout: _Lossy | None = None


def prepare() -> None:
    """Makes the streams safe to print to, wherever they lead; for commands only.

    Otherwise the next opened file would take the place of a closed stream, and get its output.
    """
    global _stdout
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    _stdout = _Lossy(1, "w", closefd=False)
    sys.stdout = _text(_stdout, sys.stdout)
    sys.stderr = _text(_Lossy(2, "w", closefd=False), sys.stderr)


def _text(file: _Lossy, old: Any) -> io.TextIOWrapper:
    """A stream like `old` (None if closed) that escapes whatever it cannot encode."""
    encoding, by_line = getattr(old, "encoding", None), getattr(old, "line_buffering", True)
    writer = io.BufferedWriter(file)
    return io.TextIOWrapper(writer, encoding, "backslashreplace", line_buffering=by_line)


def lost_output() -> int:
    """The exit code of a command whose output was lost, even in part; 0 if none was."""
    sys.stdout.flush()
    lost = _stdout.problem if _stdout else None
    if lost is None or isinstance(lost, BrokenPipeError):  # `stopmim ... | head`
        return 0
    print(f"stopmim: error: stdout: cannot write: {lost.strerror}", file=sys.stderr)
    return StorageError.exit_code
