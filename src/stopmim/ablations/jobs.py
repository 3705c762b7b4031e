"""Trials side by side, a core or a GPU each, in processes of which none outlives this one."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stopmim.ablations.trial import PATIENCE, Trial
from stopmim.base.console import Ticker, say
from stopmim.base.errors import InterruptedRunError, UserError
from stopmim.base.files import write_whole
from stopmim.base.signals import signals
from stopmim.config.schema import Config, override
from stopmim.data.workers import cores

POLL = 0.2  # seconds between two looks at the processes


@dataclass(frozen=True)
class Entry:
    """A run of the plan; rows that are the same run have the same trial."""

    row: str
    seed: int
    trial: Trial
    updates: int

    def __str__(self) -> str:
        return f"{self.row} (seed {self.seed})" if self.trial.config else self.row


def on_gpu(config: Config) -> bool:
    return config.runtime.device != "cpu" and torch.cuda.is_available()


def places(config: Config, jobs: int | None) -> list[dict[str, str]]:
    """The environment of each process that may run at a time: a core each, or a GPU each."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: at least one is needed")
    if not on_gpu(config):
        return [{"OMP_NUM_THREADS": "1"}] * (jobs or cores())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return [
        {"CUDA_VISIBLE_DEVICES": numbers[i % len(numbers)]} for i in range(jobs or len(numbers))
    ]


def carried(config: Config, workers: int) -> Config:
    """`config` as one of several at a time: on a CPU one thread, always, for equal rounding."""
    n = len(places(config, None))
    changes: dict[str, Any] = {}
    if not on_gpu(config) and config.runtime.threads is None:
        changes["runtime.threads"] = 1
    if workers and config.runtime.workers is None:
        changes["runtime.workers"] = max(1, workers // n)
    return override(config, changes)


class Child:
    """A trial under way, in a process that ends when this one does."""

    def __init__(self, entry: Entry, environment: dict[str, str]) -> None:
        self.entry, self.environment = entry, environment
        path = entry.trial.path
        path.parent.mkdir(parents=True, exist_ok=True)
        file, self.log = (path.with_name(path.name + end) for end in (".json", ".log"))
        write_whole(file, entry.trial.as_json())
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stopmim.ablations.trial", "--watched", str(file)],
                env=os.environ | environment,
                stdin=subprocess.PIPE,  # closed by the end of this process, however it comes
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us: we then tell them
            )

    def problem(self) -> str:
        """Why it failed; empty if it did not."""
        code = self.process.returncode
        if code == 0:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        reason = said[-1].removeprefix("stopmim: error: ") if said else "it said nothing"
        return f"{reason} (exit code {code})" if code > 0 else f"killed by signal {-code}"

    def dismiss(self) -> None:
        """Tells it to save and leave; a process that has left already does not mind."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self) -> None:
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def carry_out(
    what: str, entries: Mapping[Path, Entry], free: list[dict[str, str]]
) -> Iterator[dict[Path, str]]:
    """Trains and measures what is not yet, in the environments `free`.

    Whenever runs have ended, and at the end, it tells why runs failed so far, by their directories.
    """
    waiting = [entry for entry in entries.values() if entry.trial.answers() is None]
    ended = entries.keys() - {entry.trial.path for entry in waiting}
    busy, news, problems = list[Child](), list[Child](), dict[Path, str]()

    def done() -> int:  # updates, and the evaluation counts for one more
        return sum(e.updates + 1 if p in ended else updates_of(p) for p, e in entries.items())

    total = sum(entry.updates + 1 for entry in entries.values())
    with signals() as received, Ticker(what, total, done()) as ticker:
        try:
            while (waiting or busy) and not received:
                while free and waiting:
                    busy.append(Child(waiting.pop(0), free.pop()))
                if news:  # now that others are under way
                    yield problems
                news = [c for c in busy if c.process.poll() is not None]
                for child in news:
                    busy.remove(child)
                    child.dismiss()
                    free.append(child.environment)
                    ended.add(child.entry.trial.path)
                    if reason := child.problem():
                        problems[child.entry.trial.path] = reason
                        say(f"{child.entry}: {reason}")
                now = ", ".join(str(child.entry) for child in busy)
                ticker.update(done(), f"{len(ended)} of {len(entries)} runs done; {now}")
                time.sleep(POLL)
        finally:
            for child in busy:
                child.dismiss()
            for child in busy:
                child.wait()
    if received:
        raise InterruptedRunError(received[0], f"{what}: stopped, every run saved")
    yield problems


def updates_of(run: Path) -> int:
    """The last update that a run has logged."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return 0
