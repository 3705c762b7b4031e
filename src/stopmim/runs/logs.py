"""The logs of a run that grow while it trains: metrics.jsonl and bad_files.jsonl."""

import math
from pathlib import Path
from shlex import quote
from typing import Any

from stopmim.base.console import warn
from stopmim.base.errors import DataError
from stopmim.base.files import (
    Line,
    append_jsonl,
    count_lines,
    number,
    parse_jsonl,
    read_regular,
    write_whole,
)
from stopmim.runs.lock import place_of


class Log:
    """A growing .jsonl file. Lines that do not fit on a full disk wait for the next call."""

    def __init__(self, path: Path, lines: list[Line], logged: int = 0) -> None:
        self.path = path
        self.count = count_lines(lines, logged)
        self.waiting: list[dict[str, Any]] = []

    def write(self, *lines: dict[str, Any]) -> None:
        is_first_failure = not self.waiting
        self.waiting += lines
        if place_of(self.path.parent).path != self.path.parent:
            return  # of another run, perhaps: the next save finds out
        try:
            while self.waiting:
                append_jsonl(self.path, self.waiting[0], count=self.count)
                self.count = self.count._replace(following=self.count.following + 1)
                del self.waiting[0]
        except OSError as error:
            if is_first_failure:
                warn(f"{self.path}: cannot write: {error.strerror}; will try again")

    @property
    def logged(self) -> int:
        """Number of lines so far, including waiting and lost ones."""
        return self.count.following + len(self.waiting)

    def move(self, folder: Path) -> None:
        """Continues the file of the same name in `folder`."""
        self.path = folder / self.path.name
        self.write()


class Metrics(Log):
    """metrics.jsonl, truncated to the step that a run resumes at.

    Damaged lines before that stay in place, visible; `logged` lines were there when the checkpoint
    of that step was saved.
    """

    def __init__(self, path: Path, step: int, logged: int = 0) -> None:
        file = path / "metrics.jsonl"
        lines = parse_jsonl(file)
        if not step and (reached := max((x for x in map(_step, lines) if x < math.inf), default=0)):
            warn(
                f"{path}: nothing had been saved, or the disk of checkpoints/ is missing: begins "
                f"again at its first update, as does its log, which had reached {reached:.0f}"
            )
        own = [i for i, line in enumerate(lines) if _step(line) <= step]
        upto = lines[: max(own[-1] + 1 if own else 0, logged)]
        kept = [line for line in upto if not step < _step(line) < math.inf]
        text = b"".join(line.text + b"\n" for line in kept)
        if file.is_symlink() or not file.exists() or read_regular(file) != text:
            write_whole(file, text)
        super().__init__(file, kept, logged)
        if lost := lost_lines(file, logged):
            warn(f"{path}: {lost}; training continues")


def _step(line: Line) -> float:
    """The step of a line; infinity if it does not say."""
    step = number(line.tree.get("step")) if line.tree else None
    return math.inf if step is None else step


class BadFiles(Log):
    """bad_files.jsonl: every unreadable image once; too many of them end the run."""

    def __init__(self, path: Path, total: int, share: float) -> None:
        lines = parse_jsonl(path / "bad_files.jsonl")
        super().__init__(path / "bad_files.jsonl", lines)
        self.total, self.share = total, share
        self.names = {str(line.tree["name"]) for line in lines if line.tree and "name" in line.tree}

    def add(self, bad: list[tuple[str, str]], *, usable: bool) -> None:
        """Records the bad images of a batch, which is not `usable` if one cannot be replaced."""
        new = {name: reason for name, reason in bad if name not in self.names}
        self.names |= new.keys()
        self.write(*({"name": name, "reason": reason} for name, reason in new.items()))
        if bad and (not usable or len(self.names) > self.share * self.total):
            name, reason = bad[-1]
            raise DataError(
                f"{len(self.names)} of {self.total} images cannot be read, such as {name}: "
                f"{reason}; raise --data.max_bad to continue, or leave them out of a new run with "
                f"--data.skip {quote(str(self.path))}"
            )


def lost_lines(path: Path, logged: int = 0) -> str:
    """Numbers of damaged and missing lines of a log, in words, or ""."""
    damaged, missing, following, _ = count_lines(parse_jsonl(path), logged)
    counts = {"damaged": damaged, "missing": missing}
    lost = ", ".join(f"{n} {word}" for word, n in counts.items() if n)
    return f"{path.name}: {lost} of {following} lines" if lost else ""
