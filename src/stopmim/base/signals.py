"""Signals that end a run, for its loop to act on between updates."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM received, for the loop to act on between updates; a second one kills."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)

    try:
        old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever owns it gets the signals
        yield received
        return
    try:
        yield received
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
