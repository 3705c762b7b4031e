"""Messages and progress on stderr: one live line in a terminal, plain lines elsewhere."""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stopmim.base.secrets import shown

console = Console(stderr=True, highlight=False, emoji=False)

COLUMNS = 80  # of a plain line
GAP = "  "  # between two pieces of a line
BAR = 24  # columns of the widest bar
QUIET = 2.0  # seconds before the first sign of life
BETWEEN = 10.0, 60.0  # seconds between two plain lines, at first and later, to keep logs short
UNUSUAL = 20  # times slower than usual ...
SLOW = 1.0  # ... and slower than this, in seconds: such an item is left out of the estimate
LONGEST = 600  # characters of an error or a warning
MISTAKES = 10  # mistakes of one config that are printed


class Ticker:
    """Progress through `total` items: count, percent, time left, and a few numbers."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.done = what, total, done
        self.numbers: Sequence[str] = ()
        self.extra: Sequence[str] = ()  # for a wide terminal
        self.start = self.now = self.last_line = time.monotonic()
        self.mark: tuple[int, float] | None = None  # items and time that the estimate starts from
        self.live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self.live = Live(get_renderable=self.rendered, console=console, transient=True)
        self.early = threading.Timer(QUIET, self._say)
        self.early.daemon = True

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        else:
            self.early.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.early.cancel()
        if self.live:
            self.live.stop()

    def update(self, done: int, *numbers: str, extra: Sequence[str] = ()) -> None:
        """Advances to `done` items; `numbers` are always shown, `extra` where there is room."""
        now = time.monotonic()
        if done > self.done:
            self._skip_unusual(done, now)
        self.done, self.now = done, now
        if numbers:
            self.numbers, self.extra = numbers, extra
        least, most = BETWEEN
        wait = min(most, max(least, (self.now - self.start) / 10))
        is_due = self.now - self.last_line > wait or (done == self.total and numbers)
        if not self.live and self.numbers and is_due:
            self._say()

    def _skip_unusual(self, done: int, now: float) -> None:
        """Moves the mark past items that take minutes to compile while others take a moment."""
        if self.mark is None:  # the first item
            self.early.cancel()
            self.mark = done, now
            return
        count, at = self.mark
        if self.done == count:
            return
        took, usual = (now - self.now) / (done - self.done), (self.now - at) / (self.done - count)
        if took > max(SLOW, UNUSUAL * usual):
            self.mark = count + done - self.done, at + now - self.now  # it does not count
        elif UNUSUAL * took < usual:  # the items before were the unusual ones
            self.mark = self.done, self.now

    @property
    def seconds_left(self) -> float | None:
        """Expected time to the end; None before the second item is done."""
        if self.done >= self.total:
            return 0.0
        if self.mark is None or self.mark[0] == self.done:
            return None
        per_item = (self.now - self.mark[1]) / (self.done - self.mark[0])
        return max(0.0, per_item * (self.total - self.done) - (time.monotonic() - self.now))

    def rendered(self) -> Text:
        """The live line, or two if the terminal is narrow."""
        width = console.width - len("^C")  # which a terminal prints after the line
        lines = wrapped(self._needed(), width)
        if len(lines) > 1:
            return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        text = Text(f"{self.what} " if len(self.what) + 1 + len(lines[0]) <= width else "")
        line = fit(lines[0], self.extra, width - len(text))
        room = min(BAR, width - len(text) - len(line) - 1)
        if text and room >= BAR // 3:
            full = room * self.done // max(1, self.total)
            marks = "#-" if console.options.ascii_only else "\u2501\u2501"
            text.append(marks[0] * full, "bar.complete").append(
                marks[1] * (room - full) + " ", "bar.back"
            )
        return text.append(line)

    def _needed(self) -> list[str]:
        seconds = self.seconds_left
        waited = duration(time.monotonic() - self.start)
        begun = f"first one: {waited} so far" if self.mark is None else f"{waited} so far"
        left = begun if seconds is None else f"{duration(seconds)} left"
        percent = math.floor(100 * self.done / max(1, self.total))
        return [f"{self.done}/{self.total}", f"{percent} %", left, *self.numbers]

    def _say(self) -> None:
        self.last_line = time.monotonic()
        line = GAP.join(self._needed())
        say(f"{self.what} {line}" if len(self.what) + len(line) < COLUMNS else line)


def wrapped(pieces: Sequence[str], width: int) -> list[str]:
    """Lines of whole pieces, each line at most `width` long unless a piece is longer."""
    lines = [pieces[0]]
    for piece in pieces[1:]:
        longer = f"{lines[-1]}{GAP}{piece}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(piece)
    return lines


def fit(line: str, extra: Sequence[str], width: int) -> str:
    """`line` and as many pieces of `extra` as there is room for."""
    for piece in extra:
        if len(line) + len(GAP) + len(piece) <= width:
            line = f"{line}{GAP}{piece}"
    return line


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Prints `what` is going on if it takes longer than a moment."""
    timer = threading.Timer(QUIET, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_first_rank() -> bool:
    """Whether this process is the one that prints, among those that torchrun or SLURM started."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: str) -> None:
    """Prints lines; line breaks and control characters within one are escaped, as in a name."""
    for line in lines:
        console.print(visible(line), soft_wrap=True, markup=False)


def warn(text: str) -> None:
    say(f"stopmim: warning: {as_line(text)}")


def complain(error: Exception) -> None:
    """Prints the messages of `error`, one line each: no other place prints errors."""
    messages = [str(message) for message in error.args]
    if len(messages) > MISTAKES:
        messages[MISTAKES:] = [f"and {len(messages) - MISTAKES} more mistakes"]
    for message in messages:
        print(f"stopmim: error: {as_line(message)}", file=sys.stderr)


def as_line(text: str) -> str:
    """`text` as one line for a terminal, whatever it holds.

    Control characters, line breaks and lone surrogates are escaped, and long texts lose their
    middle: names in untrusted files could forge lines, or be megabytes. Credentials in URLs, which
    libraries quote, are removed.
    """
    return _clipped(visible(_clipped(shown(text))))


def visible(text: str) -> str:
    """`text` with control characters, direction marks and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _clipped(text: str) -> str:
    half = (LONGEST - len(" ... ")) // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


def duration(seconds: float) -> str:
    """``h:mm:ss``, or ``m:ss`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
