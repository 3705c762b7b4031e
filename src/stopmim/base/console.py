"""Messages and progress on stderr: one live line in a terminal, plain lines elsewhere."""

import os
import time
from typing import Self

from rich import progress
from rich.console import Console

console = Console(stderr=True, highlight=False, emoji=False)

QUIET_SECONDS = 10.0  # between two plain lines, to keep log files short


class Ticker:
    """Progress through `total` items with an ETA, and a few numbers beside it."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.first = what, total, done
        self.begin = self.last_line = time.monotonic()
        self.live = console.is_terminal
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task(what, total=total, completed=done, numbers="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, done: int, numbers: str = "") -> None:
        self.bar.update(self.task, completed=done, numbers=numbers)
        now = time.monotonic()
        is_due = now - self.last_line > QUIET_SECONDS or done == self.total
        if not self.live and numbers and is_due:
            self.last_line = now
            left = (now - self.begin) * (self.total - done) / max(1, done - self.first)
            say(f"{self.what} {done}/{self.total}  {numbers}  {duration(left)} left")


def is_first_rank() -> bool:
    """Whether this process, of those that torchrun or SLURM started, is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    say(f"stopmim: warning: {text}")


def duration(seconds: float) -> str:
    """``h:mm:ss``, or ``m:ss`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
