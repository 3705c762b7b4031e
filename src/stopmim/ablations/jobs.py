"""Runs trials as parallel processes: one per GPU or per core, none of which outlives this one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from io import BufferedWriter
from pathlib import Path

import torch

from stopmim.ablations.trial import PATIENCE, POLL, TRIAL_JSON, Trial
from stopmim.base.console import Ticker, say
from stopmim.base.errors import InterruptedRunError, StorageError, UserError
from stopmim.base.files import number, open_to_read, write_whole
from stopmim.base.signals import signals
from stopmim.config.schema import Config
from stopmim.data.workers import cores


def on_gpu(config: Config) -> bool:
    return config.runtime.device != "cpu" and torch.cuda.is_available()


def places(config: Config, jobs: int | None) -> list[dict[str, str]]:
    """Environments of the processes to run side by side: one per GPU, or one per core."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: expected 1 or more")
    if not on_gpu(config):
        return [{"OMP_NUM_THREADS": "1"}] * (jobs or cores())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return [
        {"CUDA_VISIBLE_DEVICES": numbers[i % len(numbers)]} for i in range(jobs or len(numbers))
    ]


class Child:
    """A process that performs a trial and does not outlive this one."""

    def __init__(self, trial: Trial, environment: dict[str, str]) -> None:
        self.trial, self.environment = trial, environment
        file, self.log = (trial.path.with_name(trial.path.name + s) for s in (".json", ".log"))
        write_whole(file, TRIAL_JSON.dump_json(trial, indent=1).decode())
        with new_file(self.log) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stopmim.ablations.trial", "--watched", str(file)],
                env=os.environ | environment,
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the others
            )

    def problem(self) -> str:
        """Reason why the ended process failed, or ""."""
        code = self.process.returncode
        if code == 0:
            return ""
        if code < 0:
            return f"killed by signal {-code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        messages = [line.strip() for line in lines if line.strip()] or ["no message"]
        return f"{messages[-1].removeprefix('stopmim: error: ')} (exit code {code})"

    def stop(self) -> None:
        """Tells the process to save and exit, even if it is stopped; harmless if it has exited."""
        self.process.send_signal(signal.SIGCONT)
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self) -> None:
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def new_file(path: Path) -> BufferedWriter:
    """A new file in place of whatever is there: nothing is written through a link."""
    try:
        path.unlink(missing_ok=True)
        return path.open("xb")
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from None


def carry_out(
    what: str, trials: Mapping[Path, Trial], free: list[dict[str, str]]
) -> Iterator[dict[Path, str]]:
    """Performs the trials without answers, one at a time in each environment of `free`.

    Yields the problems so far, by run directory, whenever runs have ended and at the end.
    """
    waiting = [trial for trial in trials.values() if trial.answers() is None]
    ended = trials.keys() - {trial.path for trial in waiting}
    busy, news, problems = list[Child](), list[Child](), dict[Path, str]()

    def done() -> int:  # updates; the evaluation counts as one more
        return sum(t.updates + 1 if p in ended else last_update(p) for p, t in trials.items())

    total = sum(trial.updates + 1 for trial in trials.values())
    with signals() as received, Ticker(what, total, done()) as ticker:
        try:
            while (waiting or busy) and not received:
                while free and waiting:
                    busy.append(Child(waiting.pop(0), free.pop()))
                if news:  # the report is written while the next runs are under way
                    yield problems
                news = [child for child in busy if child.process.poll() is not None]
                for child in news:
                    busy.remove(child)
                    child.stop()
                    free.append(child.environment)
                    ended.add(child.trial.path)
                    if reason := child.problem():
                        problems[child.trial.path] = reason
                        say(f"{child.trial}: {reason}")
                now = ", ".join(str(child.trial) for child in busy)
                ticker.update(done(), f"{len(ended)} of {len(trials)} runs done; {now}")
                time.sleep(POLL)
        finally:
            for child in busy:
                child.stop()
            for child in busy:
                child.wait()
    if received:
        raise InterruptedRunError(received[0], f"{what}: stopped, every run saved")
    yield problems


def last_update(run: Path) -> int:
    """Last update that a run has logged."""
    with contextlib.suppress(OSError), open_to_read(run / "metrics.jsonl") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        for line in reversed(file.read(8192).splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                return int(number(json.loads(line)["step"]) or 0)
    return 0
