"""Runs of an ablation: a `Trial` is trained and evaluated, and its findings are an `Outcome`.

``python -m stopmim.ablations.trial TRIAL.json`` performs one, for jobs.py. A trial that is killed
at any moment can be resumed, and gives the same answers.
"""

import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from stopmim.ablations.questions import Question
from stopmim.ablations.table import Table
from stopmim.base.causes import cause
from stopmim.base.console import complain
from stopmim.base.errors import RunInUseError, UserError
from stopmim.base.faults import faultpoint
from stopmim.base.files import (
    append_jsonl,
    number,
    own_folder,
    read_jsonl,
    read_regular,
    write_whole,
)
from stopmim.config.schema import Config
from stopmim.evals.protocols import PROTOCOLS, from_options
from stopmim.evals.recipes import TASKS
from stopmim.evals.suite import evaluate
from stopmim.health.doctor import diagnose
from stopmim.health.log import training_seconds
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain

PATIENCE = 60.0  # seconds that a process without its parent has to save and exit
POLL = 0.2  # seconds between two looks at another process
NO_SEED = -1  # of a given checkpoint
NO_VERDICT = "-"  # of a run that has logged nothing
UNFINISHED = "not finished"  # problem of a run without answers that has not failed

Answer = dict[str, Any]  # a line of results.jsonl


def wrong_key(answer: object) -> str:
    """The first key with a value that no answer of ours has, or ""; `answer` may be anything."""
    if not isinstance(answer, dict):
        return "not an object"
    texts = ["protocol", "name", "label", *({"selection", "on", "unit"} & answer.keys())]
    texts.append("videos" if "videos" in answer else "test_data")
    wrong = [key for key in texts if not isinstance(answer.get(key), str)]
    numbers = ["value", *({"random_init"} & answer.keys())]
    wrong += [key for key in numbers if not is_number(answer.get(key))]
    wrong += [] if isinstance(answer.get("options", {}), dict) else ["options"]
    return (wrong or [""])[0] or ("" if answer["protocol"].strip() else "protocol")


def is_number(value: object) -> bool:
    """Whether `value` is a number, NaN included; JSON has integers of any length."""
    return isinstance(value, float) or number(value) is not None


@dataclass(frozen=True)
class Trial:
    """A run of the plan: its training and its questions. Equal rows have the same `path`."""

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
            found = json.loads(read_regular(self.answers_file))
        except (OSError, ValueError, RecursionError):
            return None
        fits = isinstance(found, list) and not any(map(wrong_key, found))
        return found if fits else None


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
    def trains(self) -> bool:
        """Whether anything is trained, beside given checkpoints."""
        return any(trial.config for trial in self.trials)

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
            verdict=diagnose(metrics).verdict if metrics else NO_VERDICT,
            updates=int(number(metrics[-1].get("step")) or 0) if metrics else 0,
            seconds=training_seconds(metrics, trial.config.optim.batch_size if trial.config else 1),
            **norms_and_rank(metrics),
        )


def norms_and_rank(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Last values in metrics.jsonl, as fields of `Outcome`."""
    last = metrics[-1] if metrics else {}
    measured = ([row for row in metrics if "target_rank" in row] or [{}])[-1]
    norms = number(last.get("norm_A")), number(last.get("norm_mask_token"))
    return {
        "norms": None if None in norms else norms,
        # With pixels as targets, only the rank of the encoder's features says something.
        "rank": number(measured.get("feature_rank", measured.get("target_rank"))),
    }


# ------------------------------------------------------------------------------ in the process


def perform(trial: Trial) -> list[Answer]:
    """Trains and evaluates, unless both are done already."""
    if (known := trial.answers()) is not None:
        return known
    own_folder(trial.path)
    name, device = trial.encoder, "auto"
    if trial.config is not None:
        name, device = str(_train(trial, trial.config).checkpoint), trial.config.runtime.device
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
    # The seeds of an ablation say more than several untrained networks.
    options = {"random_inits": 1} | question.request | {"device": device}
    options |= {key: Path(options[key]) for key in ("list", "skip") if key in options}
    recipe = options.pop("recipe", None)  # sets the crops of all protocols, and how linear trains
    options |= {"crops": recipe} if recipe in TASKS else {}
    options |= {"recipe": recipe} if recipe and "linear" in question.protocols else {}
    kinds = [kind for kind in PROTOCOLS if kind.name in question.protocols]
    results, facts = evaluate(name, *from_options(kinds, options))
    return [facts | result.as_dict() | {"on": question.on} for result in results]


def main(words: Sequence[str]) -> int:
    """``[--watched] TRIAL.json``; watched: saves and exits when its stdin is closed."""
    *options, file = words
    if options == ["--watched"]:
        if sys.platform == "linux":  # a stopped process continues when its parent is gone
            ctypes.CDLL(None).prctl(1, signal.SIGCONT)  # PR_SET_PDEATHSIG
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        perform(TRIAL_JSON.validate_json(Path(file).read_bytes()))
    except UserError as error:
        complain(error)
        return error.exit_code
    except Exception as error:
        if (known := cause(error)) is None:
            raise
        complain(known)
        return known.exit_code
    return 0


def _exit_with_parent() -> None:
    # Not sys.stdin: a thread blocked in there would keep the process from exiting.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
