"""Finds what is intact in a run directory, restores what can be, and moves the rest aside.

Only leftovers of killed processes are deleted; damaged files go to ``RUN/damaged/``. A run that
could be repaired resumes with the same bits as one that was never damaged.
"""

import contextlib
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stopmim.base.console import visible
from stopmim.base.errors import CheckpointError, StorageError
from stopmim.base.files import (
    Line,
    count_lines,
    leftovers,
    open_to_append,
    own_folder,
    parse_jsonl,
    remove,
    write_whole,
)
from stopmim.base.tables import counted
from stopmim.runs import checkpoint, shards
from stopmim.runs.identity import (
    About,
    about_if_any,
    broken_seal,
    foreign,
    is_complete,
    planned,
    read_about,
    rebuilt,
    sealed,
)
from stopmim.runs.lock import claimed, owner_of, refuse_if_used

Verdict = Literal["intact", "restored", "moved", "removed", "lost"]
LOGS = ("metrics.jsonl", "results.jsonl", "bad_files.jsonl", "hashes.jsonl")
ASIDE = "damaged"


@dataclass
class Repair:
    """Findings in the run directory `path`, and the action taken or planned for each."""

    path: Path
    dry_run: bool = False
    found: list[tuple[Verdict, str]] = field(default_factory=list)
    resumes_at: int | None = None  # the step that the run continues from; None: it cannot
    total: int | None = None  # updates of the whole run, as far as is known

    def __str__(self) -> str:
        # Names in a received run directory could forge lines.
        lines = [f"{verdict:8}  {visible(text)}" for verdict, text in self.found]
        if self.resumes_at is None:
            end = "this run cannot be resumed: its config and data are lost"
        elif self.resumes_at and self.resumes_at == self.total:
            end = f"the run is finished, all {self.total:,} updates are done"
        elif self.resumes_at:
            end = f"the run resumes at step {self.resumes_at}: give the command that started it"
        else:
            end = "no checkpoint is left: the command that started the run starts it again"
        would = "nothing was changed (--dry-run); after the repair, " if self.dry_run else ""
        if all(verdict == "intact" for verdict, _ in self.found):
            would = "nothing is damaged; "
        return "\n".join([*lines, f"{would}{end}"])

    def say(self, verdict: Verdict, text: str) -> None:
        self.found.append((verdict, text))

    # -------------------------------------------------------------------------- the parts

    def link(self) -> None:
        """Refuses a checkpoints/ that links to another run's: a repair would move them."""
        folder, ids = self.path / "checkpoints", list[object]()
        own = about_if_any(self.path).get("id")
        if not folder.is_symlink() or not own or not isinstance(own, str):
            return
        for path in checkpoint.steps(self.path):
            with contextlib.suppress(CheckpointError, OSError):
                run = checkpoint.state(path).get("run")
                ids.append(run.get("id") if isinstance(run, dict) else None)
        if ids and own not in ids:
            what = f"run id {str(ids[0])[:80]!r}, that of run.json is {own[:80]!r}"
            raise CheckpointError(f"{folder}: a link to another run's: {what}; remove the link")

    def lock(self) -> None:
        """Moves a run.lock that is not a regular file; `claimed` then deals with its owner."""
        file = self.path / "run.lock"
        if _is_odd(file):
            self.aside(file, "is not a regular file")
        elif owner_of(self.path):
            self.say("removed", "run.lock of a process that has ended")

    def temporaries(self) -> None:
        """Removes unfinished files of killed processes."""
        folder = self.path / "checkpoints"
        old = [path for path in self.path.glob(".*.tmp*") if not path.is_dir()]  # old versions
        folders = [*folder.glob(f"{checkpoint.TEMPORARY}*"), *folder.glob(shards.STAGING)]
        halves = [*folders, *leftovers(self.path), *old]
        for path in halves:
            if not self.dry_run:
                remove(path)
            if path.exists() and not self.dry_run:
                self.aside(path, "cannot be removed")
            else:
                self.say("removed", f"{path.relative_to(self.path)}, left by a killed process")

    def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """The states of the intact checkpoints, newest first; the others are moved."""
        intact = {}
        folder = self.path / "checkpoints"
        if not folder.is_dir():
            self.aside(folder, "is no folder")
        for path in reversed(checkpoint.steps(self.path)):
            try:
                problem = checkpoint.verify(path) or checkpoint.misnamed(path)
                state = {} if problem else checkpoint.state(path)
            except (CheckpointError, OSError) as error:
                problem = str(error)
            if problem:
                self.aside(path, problem)
            else:
                intact[path] = state
        return intact

    def about(self, states: dict[Path, dict[str, Any]]) -> About | None:
        """run.json as it is, or restored from the newest checkpoint that can."""
        try:
            about = read_about(self.path)
            problem = "not as stopmim writes it" if not is_complete(about) else broken_seal(about)
        except CheckpointError as error:
            about, problem = {}, str(error).partition("not a run directory: ")[2] or str(error)
        if not problem:
            self.say("intact", "run.json")
            return about
        for path, state in states.items():
            if (new := rebuilt(state)) is None:
                continue
            starts = about.get("starts")
            if isinstance(starts, list) and all(isinstance(start, dict) for start in starts):
                new["starts"] += starts[1:]  # the first decides numbers, the others inform
            self.aside(self.path / "run.json", problem)
            if not self.dry_run:
                write_whole(self.path / "run.json", json.dumps(sealed(new), indent=1))
            self.say("restored", f"run.json from checkpoints/{path.name}")
            return new
        self.say("lost", f"run.json: {problem}; no checkpoint says what was in it")
        return None

    def strangers(self, about: About, states: dict[Path, dict[str, Any]]) -> None:
        """Moves checkpoints of other runs, and finds the newest one of this run."""
        self.resumes_at, self.total = 0, planned(about)
        for path, state in states.items():
            if other := foreign(about, state):
                self.aside(path, f"of another run: {other}")
            else:
                self.resumes_at = max(self.resumes_at, int(state["step"]))
                self.say("intact", f"checkpoints/{path.name}")

    def log(self, name: str, logged: int = 0) -> None:
        """Moves damaged lines of a log that had `logged` lines or more, and counts missing ones."""
        file = self.path / name
        if _is_odd(file):
            self.aside(file, "is not a regular file")
            return
        try:
            lines = parse_jsonl(file)
        except StorageError as error:  # too large to be read
            self.aside(file, str(error))
            lines = []
        if not self.dry_run and any(line.tree is None for line in lines):
            lines = self.without_damage(file)
        bad = [line for line in lines if line.tree is None]
        missing = count_lines(lines, logged).missing
        if bad:
            self.say("moved", f"{counted(len(bad), 'damaged line')} of {name} to {ASIDE}/{name}")
        if missing:
            verb = "is" if missing == 1 else "are"
            self.say("lost", f"{counted(missing, 'line')} of {name} {verb} missing")
        if lines:
            self.say("intact", f"{counted(len(lines) - len(bad), 'line')} of {name}")

    def without_damage(self, file: Path) -> list[Line]:
        """Moves the damaged lines of a log; returns all that were there."""
        handle = open_to_append(file)  # an evaluation may be about to add a line
        try:
            lines = parse_jsonl(file)
            place = own_folder(self.path / ASIDE) / file.name
            with open(open_to_append(place), "ab") as rest:
                rest.write(_text([line for line in lines if line.tree is None]))
            write_whole(file, _text([line for line in lines if line.tree is not None]))
            return lines
        finally:
            os.close(handle)

    def aside(self, path: Path, why: str) -> None:
        """Moves a file or folder, or the link itself, into ``damaged/``."""
        if not path.exists() and not path.is_symlink():
            return  # there is nothing to move
        # A link of checkpoints/ to another disk is followed, and nothing is moved between disks.
        is_near = path.parent.stat().st_dev == self.path.stat().st_dev
        folder = (self.path if is_near else path.parent) / ASIDE
        place = folder / path.name
        number = 1
        while place.exists() or place.is_symlink():
            number += 1
            place = place.with_name(f"{path.name}.{number}")
        if not self.dry_run:
            own_folder(folder)
            path.rename(place)
        what = " ".join(why.replace(f"{path}/", "").replace(f"{path}: ", "").split())
        names = path.relative_to(self.path), place.relative_to(self.path)
        self.say("moved", f"{names[0]} to {names[1]}: {what[:200]}")


def repair(path: str | Path, *, dry_run: bool = False) -> Repair:
    """Repairs the run directory `path`; `dry_run` only reports what it would do.

    Raises:
        RunInUseError: a process is training there.
        StorageError: it cannot be written to.
        CheckpointError: it is not a run, or its checkpoints/ links to those of another.
    """
    found = Repair(Path(path), dry_run)
    if not found.path.is_dir():
        raise CheckpointError(f"{path}: not a run directory: no such folder")
    if not any((found.path / name).exists() for name in ("run.json", "checkpoints", *LOGS)):
        raise CheckpointError(f"{path}: not a run directory: there is nothing of a run in it")
    try:
        refuse_if_used(found.path)
        found.link()
        found.lock()
        with contextlib.nullcontext() if dry_run else claimed(found.path):
            found.temporaries()
            states = found.checkpoints()
            if (about := found.about(states)) is not None:
                found.strangers(about, states)
            logged = max((state.get("logged") or 0 for state in states.values()), default=0)
            for name in LOGS:
                found.log(name, logged if name == "metrics.jsonl" else 0)
    except OSError as error:
        raise StorageError(f"{path}: cannot repair: {error}") from None
    return found


def _is_odd(path: Path) -> bool:
    """Whether something at `path` is not a regular file."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _text(lines: list[Line]) -> bytes:
    return b"".join(line.text + b"\n" for line in lines)
