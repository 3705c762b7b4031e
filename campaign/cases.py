"""Families of cases: a case is a fork, and a function of (seed, number): one command repeats it."""

import json
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from campaign.processes import (
    USUAL,
    Ended,
    Limits,
    Started,
    command,
    die_with_parent,
    ended,
    in_session,
    kill_all,
)

DOCUMENTED = {0, 2, 3, 4, 5, 6, 7, 8, 9, 130, 143}
VERDICTS = {10, 11, 12, 13}  # of `stopmim doctor`
LINES = 20  # of errors about keys of a config
LONGEST = 1200  # characters of a line of an error
LOUDEST = 20_000  # bytes of everything on stderr
CASE_SECONDS = 300.0


class Failed(Exception):  # noqa: N818 - as unittest and pytest call it
    """Says what is wrong, in one line."""


def need(fits: bool, what: str) -> None:
    if not fits:
        raise Failed(what)


@dataclass
class Case:
    """One case: its dice, its folder, what the family has prepared, and what was counted."""

    family: str
    seed: int
    number: int
    shared: Path  # read only
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    commands: int = 0
    about: str = ""  # what was done, to begin the line about a failure

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.family}/{self.seed}/{self.number}")

    def start(
        self,
        *words: str | Path,
        limits: Limits = USUAL,
        before: Callable[[], object] = lambda: None,
    ) -> Started:
        """Starts ``stopmim WORDS``."""
        self.commands += 1
        self.counts["commands"] += 1
        env = {"STOPMIM_CACHE": str(self.folder / "cache")}
        where = self.folder / f"command{self.commands}"
        return command([str(word) for word in words], where, limits, env=env, before=before)

    def run(
        self,
        *words: str | Path,
        limits: Limits = USUAL,
        before: Callable[[], object] = lambda: None,
    ) -> Ended:
        """``stopmim WORDS`` from beginning to end, which must be a documented one."""
        done = self.start(*words, limits=limits, before=before).finish()
        about = self.about
        self.about = f"{about}; {' '.join(map(str, words))[:100]}"
        self.judge(done)
        self.about = about
        return done

    def judge(self, done: Ended, allowed: Iterable[int] = DOCUMENTED | VERDICTS) -> None:
        """Fails unless a command has ended within its limits, as documented, leaving nothing.

        An error is one line; wrong keys of a config are one line each.
        """
        need(not done.beyond, f"took more than {done.beyond}: {done}")
        need(done.code in set(allowed), f"{done}")
        need(not done.left, f"left behind {', '.join(done.left)[:300]}: {done}")
        if 2 <= done.code <= 9:
            need(0 < len(done.errors) <= (LINES if done.code == 2 else 1), f"not one line: {done}")
        for line in done.said.splitlines():
            need(len(line) <= LONGEST, f"a line of {len(line)} characters: {line[:200]!r}")
            need(line.isprintable(), f"control characters: {line[:200]!r}")
        need(len(done.said) <= LOUDEST, f"{len(done.said)} characters on stderr: {done}")
        need("Traceback" not in done.said, f"a traceback: {done}")
        self.counts[f"exit {done.code}"] += 1


@dataclass(frozen=True)
class Family:
    """Cases of one kind: how many in minutes and in hours, and what one of them does."""

    name: str
    claim: str  # of which every failure is a counterexample
    quick: int
    long: int
    case: Callable[[Case], None]
    prepare: Callable[[Path], None] = lambda folder: None  # writes what cases share
    load: Callable[[], object] = lambda: None  # fills caches that forks inherit


@dataclass
class Outcome:
    """What came out of the cases of a family."""

    family: str
    claim: str
    cases: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def run_family(
    family: Family,
    numbers: Iterable[int],
    *,
    seed: int,
    jobs: int,
    root: Path,
    keep: bool = False,
    tell: Callable[[Outcome, int, str], None] = lambda outcome, number, problem: None,
) -> Outcome:
    """Runs the cases `numbers`, `jobs` at a time; `tell` hears of each when it is over.

    Folders of failed cases stay under `root`, and all of them with `keep`.
    """
    shared = root / family.name / "shared"
    shared.mkdir(parents=True)
    begin = time.monotonic()
    family.load()
    _prepare(family, shared)
    outcome = Outcome(family.name, family.claim)
    waiting, running = iter(numbers), dict[int, tuple[int, Path, float]]()
    while True:
        while len(running) < jobs and (number := next(waiting, None)) is not None:
            folder = root / family.name / str(number)
            pid = _fork(family, Case(family.name, seed, number, shared, folder))
            running[pid] = number, folder, time.monotonic()
        if not running:
            break
        for pid in _over(running):
            number, folder, _ = running.pop(pid)
            outcome.cases += 1
            if problem := _read(folder, outcome):
                outcome.failures[number] = problem
            if not (problem or keep):
                shutil.rmtree(folder, ignore_errors=True)
            outcome.seconds = time.monotonic() - begin
            tell(outcome, number, problem)
    return outcome


def _prepare(family: Family, shared: Path) -> None:
    """In a fork, which ends with its threads: forks of this process must not inherit any."""
    pid = os.fork()
    if not pid:
        die_with_parent()
        os.environ["STOPMIM_CACHE"] = str(shared / "cache")
        log = os.open(shared / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        ended(lambda: family.prepare(shared))
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"{family.name}: cannot prepare:\n{(shared / 'log').read_text()}")


def _fork(family: Family, case: Case) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    problem = "the case itself has crashed"
    try:
        die_with_parent()
        os.setsid()
        case.folder.mkdir()
        os.chdir(case.folder)
        family.case(case)
        problem = ""
    except Failed as error:
        problem = f"{case.about}: {error}"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        problem = f"{case.about}: {type(error).__name__}: {error} ({place})"
    finally:
        said = {"problem": " ".join(problem.split())[:1000], "counts": case.counts}
        (case.folder / "case.json").write_text(json.dumps(said))
        os._exit(0)


def _over(running: dict[int, tuple[int, Path, float]]) -> list[int]:
    """Waits until some cases are over; ends those that take too long."""
    while True:
        over = [pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]]
        if over:
            return over
        for pid, (_, _, began) in running.items():
            if time.monotonic() - began > CASE_SECONDS:
                kill_all([*in_session(pid), pid])
        time.sleep(0.005)


def _read(folder: Path, outcome: Outcome) -> str:
    """Adds up the counts of a case; returns its problem or ""."""
    try:
        said = json.loads((folder / "case.json").read_text())
    except (OSError, ValueError):
        return f"the case has crashed or taken more than {CASE_SECONDS:g} s"
    outcome.counts.update(said["counts"])
    return said["problem"]
