"""A command in a terminal of a given size, and what its screen shows."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from typing import Self

import pyte

CTRL_C = b"\x03"


class Terminal:
    """Runs ``stopmim WORDS`` in a terminal, whose screen `pyte` keeps."""

    def __init__(self, words: Sequence[str], columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        sizes = ("COLUMNS", "LINES")  # would be believed before the terminal
        own = {name: value for name, value in os.environ.items() if name not in sizes}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stopmim", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=own | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.ours)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def read(self, seconds: float = 0.02) -> bool:
        """Shows what arrives within `seconds`; whether there will be more."""
        if select.select([self.ours], [], [], seconds)[0]:
            try:
                self.stream.feed(os.read(self.ours, 65536))
            except OSError:  # the process has closed its end
                return False
        return True

    def until(self, is_so: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert self.read(), f"ended:\n{self.text}"
            assert time.monotonic() < end, self.text

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def end(self, seconds: float = 60.0) -> int:
        """Waits for the end and returns the exit code."""
        end = time.monotonic() + seconds
        while self.read() and time.monotonic() < end:
            pass
        return self.process.wait(max(0.0, end - time.monotonic()))
