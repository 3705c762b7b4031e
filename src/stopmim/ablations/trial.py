"""Runs of an ablation: a `Trial` is trained and evaluated, and its findings are an `Outcome`.

`carry_out` runs trials side by side as processes, ``python -m stopmim.ablations.trial TRIAL.json``.
A trial that was killed at any moment resumes and gives the same answers.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from stopmim.ablations.questions import Question
from stopmim.ablations.table import Table
from stopmim.base.console import Ticker, complain, say
from stopmim.base.errors import InterruptedRunError, RunInUseError, UserError
from stopmim.base.faults import faultpoint
from stopmim.base.files import append_jsonl, read_jsonl, write_whole
from stopmim.base.signals import signals
from stopmim.config.schema import Config
from stopmim.data.workers import cores
from stopmim.evals.protocols import PROTOCOLS, from_options
from stopmim.evals.recipes import TASKS
from stopmim.evals.suite import evaluate
from stopmim.health.doctor import diagnose
from stopmim.health.log import training_seconds
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain

PATIENCE = 60.0  # seconds that a process without its parent has to save and exit
POLL = 0.2  # seconds between two looks at the processes
NO_SEED = -1  # of a given checkpoint
UNFINISHED = "not finished"  # problem of a run without answers that has not failed

Answer = dict[str, Any]  # a line of results.jsonl


@dataclass(frozen=True)
class Trial:
    """A run of the plan: what is trained and what is asked. Equal rows have the same `path`."""

    path: Path  # run directory
    data: str
    config: Config | None  # None: nothing is trained, `encoder` is evaluated
    questions: tuple[Question, ...]
    encoder: str = ""
    row: str = ""
    updates: int = 0  # of the whole run

    def __str__(self) -> str:
        return f"{self.row} (seed {self.seed})" if self.config else self.row

    @property
    def seed(self) -> int:
        return self.config.seed if self.config else NO_SEED

    @property
    def answers_file(self) -> Path:
        asked = json.dumps([dataclasses.asdict(q) for q in self.questions], sort_keys=True)
        return self.path / f"answers-{hashlib.sha256(asked.encode()).hexdigest()[:12]}.json"

    def answers(self) -> list[Answer] | None:
        """Answers to these questions; None before they are known."""
        try:
            return json.loads(self.answers_file.read_bytes())
        except (OSError, ValueError):
            return None


TRIAL_JSON = TypeAdapter(Trial)


@dataclass(frozen=True)
class Plan:
    """All runs of an ablation, checked and ready to be carried out."""

    name: str
    table: Table
    preset: str
    base: Config  # the preset, with the changes that all rows share
    data: str
    trials: tuple[Trial, ...]  # one per row and seed, then the given checkpoints
    out: Path

    @property
    def runs(self) -> dict[Path, Trial]:
        """Every run once, by its directory; the first seed of all rows comes first."""
        found: dict[Path, Trial] = {}
        for trial in sorted(self.trials, key=lambda trial: trial.seed):
            found.setdefault(trial.path, trial)
        return found


@dataclass(frozen=True)
class Outcome:
    """Findings of one trial so far; `problem` says why it has no answers."""

    row: str
    seed: int
    run: str  # name of the run directory
    answers: Sequence[Answer]
    problem: str
    verdict: str  # of stopmim doctor
    norms: tuple[float, float] | None  # of A and of the mask token, after the last update
    updates: int
    seconds: float
    rank: float | None = None  # last RankMe

    @classmethod
    def of_trial(cls, trial: Trial, problem: str = "") -> "Outcome":
        metrics = list(read_jsonl(trial.path / "metrics.jsonl"))
        answers = trial.answers()
        return cls(
            row=trial.row,
            seed=trial.seed,
            run=trial.path.name,
            answers=answers or [],
            problem=problem or (UNFINISHED if answers is None else ""),
            verdict=diagnose(metrics).verdict if metrics else "-",
            updates=metrics[-1].get("step", 0) if metrics else 0,
            seconds=training_seconds(metrics, trial.config.optim.batch_size if trial.config else 1),
            **norms_and_rank(metrics),
        )


def norms_and_rank(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Last values in metrics.jsonl, as fields of `Outcome`."""
    last = metrics[-1] if metrics else {}
    measured = ([row for row in metrics if "target_rank" in row] or [{}])[-1]
    return {
        "norms": (last["norm_A"], last["norm_mask_token"]) if "norm_A" in last else None,
        # With pixels as targets, only the rank of the encoder's features says something.
        "rank": measured.get("feature_rank", measured.get("target_rank")),
    }


# ------------------------------------------------------------------------------ in the process


def perform(trial: Trial) -> list[Answer]:
    """Trains and evaluates, unless that is done already."""
    if (known := trial.answers()) is not None:
        return known
    name, device = trial.encoder, "auto"
    if trial.config is not None:
        name, device = str(_train(trial, trial.config).checkpoint), trial.config.runtime.device
    trial.path.mkdir(parents=True, exist_ok=True)
    found = [answer for q in trial.questions for answer in ask(name, q, device)]
    for answer in found:
        append_jsonl(trial.path / "results.jsonl", answer)
    faultpoint("trial.asked")
    write_whole(trial.answers_file, json.dumps(found, indent=1))
    return found


def _train(trial: Trial, config: Config) -> Run:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return pretrain(trial.data, trial.path, config)
        except RunInUseError:
            # A process of an ablation that was killed a moment ago may still be saving.
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL)


def ask(name: str, question: Question, device: str = "auto") -> list[Answer]:
    """Asks the encoder called `name`."""
    # The seeds of an ablation tell more than several untrained networks.
    options = {"random_inits": 1} | question.request | {"device": device}
    options |= {key: Path(options[key]) for key in ("list", "skip") if key in options}
    recipe = options.pop("recipe", None)  # others show its crops, linear trains by it
    options |= {"crops": recipe} if recipe in TASKS else {}
    options |= {"recipe": recipe} if recipe and "linear" in question.protocols else {}
    kinds = [kind for kind in PROTOCOLS if kind.name in question.protocols]
    results, facts = evaluate(name, *from_options(kinds, options))
    return [facts | result.as_dict() | {"on": question.on} for result in results]


def main(words: Sequence[str]) -> int:
    """``[--watched] TRIAL.json``; watched: saves and exits when its stdin is closed."""
    *options, file = words
    if options == ["--watched"]:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        perform(TRIAL_JSON.validate_json(Path(file).read_bytes()))
    except UserError as error:
        complain(error)
        return error.exit_code
    return 0


def _exit_with_parent() -> None:
    # Not sys.stdin: a thread blocked in there would keep the process from exiting.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


# ------------------------------------------------------------------------------ side by side


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
        trial.path.parent.mkdir(parents=True, exist_ok=True)
        file, self.log = (trial.path.with_name(trial.path.name + s) for s in (".json", ".log"))
        write_whole(file, TRIAL_JSON.dump_json(trial, indent=1).decode())
        self.log.unlink(missing_ok=True)  # whatever lies there, nothing is written through it
        with self.log.open("xb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stopmim.ablations.trial", "--watched", str(file)],
                env=os.environ | environment,
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the others
            )

    def problem(self) -> str:
        """Why the ended process failed, or ""."""
        code = self.process.returncode
        if code == 0:
            return ""
        if code < 0:
            return f"killed by signal {-code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()] or ["no message"]
        return f"{said[-1].removeprefix('stopmim: error: ')} (exit code {code})"

    def stop(self) -> None:
        """Tells the process to save and exit; harmless if it has exited."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self) -> None:
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


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
    with contextlib.suppress(OSError), (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
