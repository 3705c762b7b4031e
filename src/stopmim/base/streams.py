"""Standard streams of a command, which may be closed, full, or unable to show a name."""

import io
import os
import sys
from typing import Any

from stopmim.base.errors import StorageError


class _Lossy(io.FileIO):
    """A file that loses what it has no room for: a log on a full disk must not end a run."""

    problem: OSError | None = None  # the first one

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError as error:
            self.problem = self.problem or error
            return len(data)


_stdout: _Lossy | None = None


def prepare() -> None:
    """Makes the streams safe to print to, whatever they lead to; for a command alone.

    The next file that is opened would take the place of a closed one, and get what is printed.
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
    """A stream like `old`, None if that is closed, that shows what it cannot encode escaped."""
    encoding, by_line = getattr(old, "encoding", None), getattr(old, "line_buffering", True)
    writer = io.BufferedWriter(file)
    return io.TextIOWrapper(writer, encoding, "backslashreplace", line_buffering=by_line)


def lost_output() -> int:
    """The exit code of a command whose output was lost, in part or all; 0 if none was."""
    sys.stdout.flush()
    lost = _stdout.problem if _stdout else None
    if lost is None or isinstance(lost, BrokenPipeError):  # `stopmim ... | head`
        return 0
    print(f"stopmim: error: stdout: cannot write: {lost.strerror}", file=sys.stderr)
    return StorageError.exit_code
