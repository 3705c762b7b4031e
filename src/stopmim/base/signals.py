"""Signals that end a command: answers Ctrl-C within two seconds, whatever is going on.

Python runs a handler between two instructions of the main thread, so a long call (a backward pass,
a read from a slow disk) would delay the answer. A second thread therefore also receives signals,
through a pipe that the interpreter's own handler writes to at once.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

PATIENCE = 1.0  # seconds that the main thread has to answer by itself
TWICE = 0.5  # seconds within which two signals count as one: torchrun repeats the terminal's
WAIT = "stopping: the current step is finished and saved first; Ctrl-C again: at once"
STOPPED = "stopmim: stopped"
UNSAVED = f"{STOPPED} at once; the same command continues from the last checkpoint"
_ENDING = (signal.SIGINT, signal.SIGTERM)
STOPPED_CODES = tuple(128 + number for number in _ENDING)


class Received(list[int]):
    """Numbers of the signals so far, for a loop to act on when it can save."""

    nothing_to_save = False  # while it holds, Ctrl-C is a KeyboardInterrupt, as elsewhere
    since = 0.0  # when the first one came


class WaitEndedError(Exception):
    """A signal came while the loop waited for something that may never come."""


_loop: Received | None = None  # of the loop that now collects signals
_collected = False  # whether any loop has collected one
_interrupted = 0  # the signal that came outside such a loop
_answering = False  # whether the second thread runs
_printed = False  # whether the last line of the command is printed


def is_interrupted() -> bool:
    """Whether a signal came outside a loop that collects them: later errors follow from it."""
    return bool(_interrupted)


def interrupting() -> int:
    """The signal behind a KeyboardInterrupt."""
    return _interrupted or signal.SIGINT


def stopped(text: str = STOPPED, code: int | None = None) -> int:
    """Prints one line, that a signal ended the command, and returns the exit code."""
    global _printed
    _printed = True
    print(text, file=sys.stderr)
    return code or 128 + interrupting()


@contextlib.contextmanager
def signals() -> Iterator[Received]:
    """Collects SIGINT and SIGTERM for the loop to act on between updates; a second signal kills."""
    global _loop
    received = Received()

    def handler(number: int, frame: FrameType | None) -> None:
        global _collected
        if received and not _answering:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if received.nothing_to_save and number == signal.SIGINT:
            _interrupt(number, frame)
        _collected = True
        received.since = received.since or time.monotonic()
        received.append(number)

    try:
        old = {number: signal.signal(number, handler) for number in _ENDING}
    except ValueError:  # not the main thread, which alone can receive signals
        yield received
        return
    outer, _loop = _loop, received
    try:
        yield received
    finally:
        _loop = outer
        for number, previous in old.items():
            signal.signal(number, previous)


def end_wait_if_told() -> None:
    """Raises WaitEndedError if a signal is older than PATIENCE; for any long wait."""
    if _loop and time.monotonic() - _loop.since > PATIENCE:
        raise WaitEndedError


def answer() -> None:
    """Starts the thread that answers Ctrl-C when the main thread does not; for commands only."""
    global _answering
    _answering = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not so after nohup
        signal.signal(signal.SIGINT, _interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # the default could leave half a file
        signal.signal(signal.SIGTERM, _interrupt)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A forked worker shares the pipe: its own Ctrl-C would count as a second one here.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_answer, args=(reader,), daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if _answering:
        _interrupted = number
        sys.unraisablehook = lambda _: None  # an exception in a destructor would be printed
    raise KeyboardInterrupt


def _answer(pipe: int) -> NoReturn:
    """Main loop of the thread. It takes no lock that the main thread may hold."""
    while (first := os.read(pipe, 1)[0]) not in _ENDING:
        pass
    time.sleep(TWICE)
    while select.select([pipe], [], [], 0)[0]:
        os.read(pipe, 1)
    if not select.select([pipe], [], [], PATIENCE - TWICE)[0]:
        if not _will_save():
            _end(first)
        if _loop is not None:  # else the loop is over, and the process about to end
            _print(WAIT)
    while os.read(pipe, 1)[0] not in _ENDING:
        pass
    _end(first)


def _will_save() -> bool:
    """Whether a loop will act on the signal, at the latest when the main thread receives it."""
    return _collected or (_loop is not None and not _loop.nothing_to_save)


def _print(text: str) -> None:
    """Prints without buffers or locks, over the progress line of a terminal."""
    if os.environ.get("RANK", "0") != "0":
        return
    clear = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""  # and shows the cursor again
    with contextlib.suppress(OSError):
        os.write(2, f"{clear}{text}\n".encode())


def _end(number: int) -> NoReturn:
    """Ends the process at once, whatever it does."""
    if not _printed:
        _print(UNSAVED if _will_save() else STOPPED)
    os._exit(128 + number)
