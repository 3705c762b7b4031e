"""What came out: a table for the terminal, a JSON record, and the section of a page."""

import datetime
import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from campaign import ROOT
from campaign.cases import Outcome
from stopmim import __version__
from stopmim.base.console import duration
from stopmim.base.memory import main_memory

BEGIN, END = "<!-- campaign -->", "<!-- end -->"
SHOWN = (
    "kills",
    "inside saves",
    "files",
    "refused",
    "exact",
    "trained",
    "rescued",
)  # counts beside commands


@dataclass(frozen=True)
class Record:
    """A campaign: when, where, of which code, and what came out of each family."""

    date: str
    machine: str
    commit: str
    version: str
    seed: str
    outcomes: Sequence[Outcome]

    @property
    def failed(self) -> int:
        return sum(len(outcome.failures) for outcome in self.outcomes)


def record(outcomes: Sequence[Outcome], code: str, seed: int) -> Record:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Record(now, machine(), code, __version__, str(seed), outcomes)


def sum_of(records: Sequence[Record]) -> Record:
    """Several campaigns as one: what came out of each family is added up."""
    total = dict[str, Outcome]()
    for one in (outcome for each in records for outcome in each.outcomes):
        held = total.setdefault(one.family, Outcome(one.family, one.claim))
        held.cases += one.cases
        held.seconds += one.seconds
        held.failures |= one.failures
        held.counts += one.counts

    def every(name: str) -> str:
        return ", ".join(sorted({getattr(each, name) for each in records}))

    last = max(each.date for each in records)
    return Record(
        last, every("machine"), every("commit"), every("version"), every("seed"), [*total.values()]
    )


def machine() -> str:
    memory = main_memory()
    size = f", {memory.total / 2**30:.0f} GiB" if memory else ""
    linux = platform.release().split("-")[0]
    what = f"{os.cpu_count()} CPU cores ({platform.machine()}){size}, Linux {linux}"
    return f"{what}, Python {platform.python_version()}, torch {torch.__version__}"


def commit() -> str:
    """The commit of this repository, with a + if tracked files have changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Family, cases, failures, time, and what was counted, with a header."""
    found = [["family", "cases", "failures", "time", "of these"]]
    for one in outcomes:
        names = [name for name in ("commands", *SHOWN) if one.counts[name]]
        counted = ", ".join(f"{one.counts[name]:,} {name}" for name in names)
        numbers = [f"{one.cases:,}", f"{len(one.failures):,}", duration(one.seconds)]
        found.append([one.family, *numbers, counted])
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Rows for the terminal."""
    found = rows(outcomes)
    widths = [max(len(row[i]) for row in found) for i in range(len(found[0]))]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in found]
    return "\n".join(line.rstrip() for line in lines)


def markdown(done: Record, long: Mapping[str, int]) -> str:
    """The same as a section of a page: what was run, of how many cases in the long form."""
    lines = [
        f"{done.date}, seed {done.seed}, stopmim {done.version} at commit `{done.commit}`; "
        f"{done.machine}.",
        "",
        "| family | claim | cases | of the long form | failures | time | of these |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for (name, cases, *cells), one in zip(rows(done.outcomes)[1:], done.outcomes, strict=True):
        numbers = [cases, f"{long[name]:,}", *cells]
        lines.append(f"| `{name}` | {one.claim} | {' | '.join(numbers)} |")
    ran = {one.family: one.cases for one in done.outcomes}
    short = [f"`{name}`" for name, count in long.items() if ran.get(name, 0) < count]
    if short:
        lines += ["", f"Below the long form: {', '.join(short)}."]
    return "\n".join(lines)


def write_json(done: Record, path: Path) -> None:
    tree: dict[str, Any] = vars(done) | {"outcomes": [vars(one) for one in done.outcomes]}
    path.write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: Path) -> Record:
    tree = json.loads(path.read_text(encoding="utf-8"))
    for one in tree["outcomes"]:
        one["counts"] = Counter(one["counts"])
    outcomes = [Outcome(**one) for one in tree.pop("outcomes")]
    return Record(**tree, outcomes=outcomes)


def write_page(done: Record, path: Path, long: Mapping[str, int]) -> None:
    """Replaces what stands in the page at `path` between two comments."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{path}: no {BEGIN} ... {END} in it")
    path.write_text(f"{before}{BEGIN}\n{markdown(done, long)}\n{END}{after}", encoding="utf-8")
