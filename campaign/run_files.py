"""Files of a received run directory, damaged or planted: no internal error, no victim touched."""

import hashlib
import os
import shutil
from pathlib import Path

from campaign.cases import Case, Family, need
from campaign.damage import BYTES, absurd_json, absurd_lines
from campaign.processes import GIB, Ended, Limits, command
from campaign.sample import HALF, copy, same_model, train, words, write_config
from campaign.sample import prepare as prepare_runs

FILES = ("run.json", "metrics.jsonl", "results.jsonl", "bad_files.jsonl", "run.lock")
# Whatever a command writes into a run; a link there must not lead it elsewhere.
WRITTEN = (
    *FILES,
    *(f".{name}.tmp" for name in FILES),
    *(".report.html.tmp", "report.html", "evaluation.html", ".evaluation.html.tmp"),
    *("evaluation.json", "evaluation.md", "figures/masks.png", "crash-rank0.txt"),
)
FOLDERS = (
    "tensorboard",
    "figures",
    "checkpoints",
    "checkpoints/step-00000009",
    "checkpoints/step-00000010",
)
COMMANDS = {  # name: weight
    "resume": 4,
    "mirror": 1,  # resumes, and writes its metrics for TensorBoard as well
    "doctor": 2,
    "doctor --json": 1,
    "report": 3,
    "inspect": 1,
    "export": 1,
    "eval knn": 2,
    "eval suite": 1,
    "analyse masks": 1,
    "features": 1,
}
LIMITS = Limits(seconds=20, memory=GIB)

State = dict[str, tuple[str, int, int]]


def prepare(folder: Path) -> None:
    prepare_runs(folder)
    for name in ("half", "whole"):
        run, log = str(folder / name), folder / f"{name} eval.log"
        options = ["--data", str(folder / "images"), "--hold-out", "0.2", "--random-inits", "1"]
        skip = ["--skip", f"{run}/bad_files.jsonl"]
        done = command(["eval", "knn", run, *options, *skip], log).finish()
        need(done.code == 0, f"cannot evaluate: {done}")
    train(folder / "images", folder / "other", write_config(folder / "other.yaml", seed=1), HALF)


def case(case: Case) -> None:
    run = copy(case.shared / "half", case.folder / "run")
    victim = copy(case.shared / "other", case.folder / "victim")
    (victim / "letter").write_text("do not touch\n")
    before = state(victim)
    case.about = harm(case, run, victim)
    (name,) = case.dice.choices(list(COMMANDS), list(COMMANDS.values()))
    name = "mirror" if "tensorboard" in case.about else name
    done = perform(case, name, run)
    need(untouched(case, victim, before), f"{name} has touched another file: {done}")
    shared = case.shared / "whole"
    if name in ("resume", "mirror") and done.code == 0:
        need(same_model(run, shared), "resumed with code 0 to another model")
    # What a damaged run has become is readable again, or refused.
    again = perform(case, "doctor" if name != "doctor" else "inspect", run)
    need(untouched(case, victim, before), f"a second command has touched another file: {again}")


def harm(case: Case, run: Path, victim: Path) -> str:
    """Does something to the files of `run`, and says what."""
    dice = case.dice
    match case.number % 10:
        case 0 | 1 | 2:  # bytes of a file
            name, change = dice.choice(FILES), dice.choice(BYTES)
            (run / name).write_bytes(change((run / name).read_bytes(), dice))
            return f"{change.__name__} {name}"
        case 3 | 4:  # values of run.json
            text = absurd_json((run / "run.json").read_text(), dice)
            (run / "run.json").write_text(text)
            return "absurd run.json"
        case 5 | 6:  # values of a log
            name = dice.choice(FILES[1:4])
            text = absurd_lines((run / name).read_text(), dice)
            (run / name).write_bytes(text.encode("utf-8", "surrogatepass"))
            return f"absurd {name}"
        case 7:  # no file at all
            return replace(case, run)
        case _:  # links that lead to another's files
            return plant(case, run, victim)


def replace(case: Case, run: Path) -> str:
    path = run / case.dice.choice(FILES)
    path.unlink(missing_ok=True)
    kind = case.dice.choice(("nothing", "folder", "pipe", "zeros", "loop", "dangling", "full"))
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "full":
            path.symlink_to("/dev/full")
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to(run / "nowhere" / "x")
    return f"{path.name} is {kind}"


def plant(case: Case, run: Path, victim: Path) -> str:
    """Links to a victim's file of the same name, to its letter, or to one of its folders."""
    if case.dice.random() < 0.2:
        name = case.dice.choice(FOLDERS)
        path, target = run / name, victim / case.dice.choice((name, "checkpoints", ""))
        if path.is_dir():
            shutil.rmtree(path)
    else:
        name = case.dice.choice(WRITTEN)
        same = victim / name
        path, target = run / name, same if same.exists() else victim / "letter"
        path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)
    return f"{name} is a link"


def perform(case: Case, name: str, run: Path, limits: Limits = LIMITS) -> Ended:
    images = case.shared / "images"
    data: list[str | Path] = ["--data", images, "--hold-out", "0.2", "--random-inits", "1"]
    skip: list[str | Path] = ["--skip", run / "bad_files.jsonl"]
    out = case.folder / f"out{case.commands}"
    match name:
        case "resume" | "mirror":
            line: list[str | Path] = [*words(images, run, case.shared / "config.yaml")]
            line += ["--runtime.mirror", "tensorboard"] if name == "mirror" else []
        case "export":
            line = ["export", run, "--to", "safetensors", "--out", out]
        case "features":
            line = ["features", images, "--encoder", run, "--out", out.with_suffix(".npz"), *skip]
        case "eval knn" | "eval suite":
            line = [*name.split(), run, *data, *skip]
        case _:
            line = [*name.split(), run]
    return case.run(*line, limits=limits)


def untouched(case: Case, victim: Path, before: State) -> bool:
    """Whether a victim's files are what they were; a link for checkpoints is one to write to."""
    now = state(victim)
    if case.about == "checkpoints is a link":
        return before.items() <= now.items()
    return now == before


def state(folder: Path) -> State:
    """Content, time and mode of every file below `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        time = about.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(folder))] = content, time, about.st_mode
    return found


FAMILY = Family(
    "run_files",
    "a damaged or hostile run directory never means an internal error or a write elsewhere",
    quick=120,
    long=1200,
    case=case,
    prepare=prepare,
)
