"""Several commands at once on one run, and Ctrl-C at any moment: nobody reads or leaves half."""

import signal
import time
from pathlib import Path

from campaign.cases import DOCUMENTED, VERDICTS, Case, Family, need
from campaign.processes import Started
from campaign.sample import copy, need_same, train, words, write_config
from campaign.sample import prepare as prepare_runs
from campaign.storage import resumed, slowly

IN_USE, CHECKPOINT = 8, 4
OTHERS = {
    "busy": {"runtime.save_every": 1, "optim.epochs": 8},
    "workers": {"runtime.workers": 2},
}
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


def prepare(folder: Path) -> None:
    """Besides the usual runs one that saves and prunes after every update, and one with workers."""
    prepare_runs(folder)
    for name, changes in OTHERS.items():
        config = write_config(folder / f"{name}.yaml", **changes)
        train(folder / "images", folder / name, config)


def case(case: Case) -> None:
    kinds = (two_runs, readers, interrupted, interrupted, readers, interrupted_reader)
    kind = kinds[case.number % len(kinds)]
    case.about = kind.__name__
    kind(case)


def two_runs(case: Case) -> None:
    """Of two runs in one directory one trains, and the other is told so."""
    run = case.folder / "run"
    if case.dice.random() < 0.5:
        copy(case.shared / "half", run)
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    first = case.start(*line, before=slowly)
    first.wait(case.dice.uniform(0, 0.5))
    second = case.start(*line, before=slowly)
    ended = [first.finish(), second.finish()]
    for done in ended:
        case.judge(done, {0, IN_USE})
    need(any(done.code == 0 for done in ended), f"nobody trained: {ended[0]}; {ended[1]}")
    resumed(case, run)


def readers(case: Case) -> None:
    """Commands that read a run while it saves and prunes after every update."""
    run, images = case.folder / "run", case.shared / "images"
    training = case.start(*words(images, run, case.shared / "busy.yaml"))
    while not list(run.glob("checkpoints/step-*")) and not training.is_over():
        time.sleep(0.002)
    data: list[str | Path] = ["--data", images, "--hold-out", "0.2", "--random-inits", "1"]
    skip: list[str | Path] = ["--skip", case.shared / "busy" / "bad_files.jsonl"]
    lines: list[list[str | Path]] = [
        ["report", run],
        ["doctor", run],
        ["inspect", run],
        ["export", run, "--to", "safetensors", "--out", case.folder / "export"],
        ["features", images, "--encoder", run, "--out", case.folder / "f.npz", *skip],
        ["eval", "knn", run, *data, *skip],
    ]
    case.dice.shuffle(lines)
    for line in lines:
        if training.is_over():
            break
        case.about = f"readers: {line[0]}"
        done = case.start(*line).finish()
        case.judge(done, {0} | VERDICTS | ({2} if line[0] == "doctor" else set()))
        case.counts["read while training"] += 1
    case.about = "readers: training"
    done = training.finish()
    case.judge(done, {0})
    need_same(run, case.shared / "busy")


def _interrupt(case: Case, started: Started) -> int:
    """Ctrl-C or SIGTERM after a while, at times twice; returns the signal."""
    started.wait(case.dice.uniform(0, 0.7))
    number = case.dice.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM))
    started.signal(number)
    if case.dice.random() < 0.3:
        started.wait(case.dice.uniform(0.0, 0.8))
        started.signal(number)
    case.about += f" {number.name}"
    return number


def interrupted(case: Case) -> None:
    """Training that is told to end, at any moment, is over within ten seconds and resumes."""
    name = case.dice.choice(("config", "workers"))
    run = case.folder / "run"
    line = words(case.shared / "images", run, case.shared / f"{name}.yaml")
    started = case.start(*line, before=case.dice.choice((slowly, lambda: None)))
    number = _interrupt(case, started)
    begin = time.monotonic()
    done = started.finish()
    case.judge(done, {0, STOPPED[signal.Signals(number)], -number})
    need(time.monotonic() - begin < 10, f"no answer within 10 s: {done}")
    again = case.run(*line)
    need(again.code == 0, f"not resumed: {again}")
    need_same(run, case.shared / ("whole" if name == "config" else "workers"))


def interrupted_reader(case: Case) -> None:
    """Ctrl-C during a report or an evaluation leaves nothing, and the run as it was."""
    run = copy(case.shared / "half", case.folder / "run")
    data: list[str | Path] = ["--data", case.shared / "images", "--hold-out", "0.2"]
    skip: list[str | Path] = ["--skip", run / "bad_files.jsonl"]
    line = case.dice.choice((["report", run], ["eval", "suite", run, *data, *skip]))
    started = case.start(*line)
    number = _interrupt(case, started)
    done = started.finish()
    case.judge(done, (DOCUMENTED | {-number}) - {CHECKPOINT})
    hidden = [path.name for path in run.glob(".*")]
    need(not hidden, f"temporary files are left in the run: {hidden}")
    resumed(case, run)


FAMILY = Family(
    "races",
    "commands at once, and Ctrl-C at any moment, never harm a run",
    quick=18,
    long=60,
    case=case,
    prepare=prepare,
)
