"""Signals that end a run."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM for the loop to act on between updates; a second one kills."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)

    try:
        old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone can receive signals
        yield received
        return
    try:
        yield received
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
