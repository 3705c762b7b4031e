"""The commands that come after training, complete for the run at hand."""

import shlex
from pathlib import Path

from stopmim.base.errors import UserError
from stopmim.data.remote.attempt import is_url
from stopmim.data.sources.open import is_generated, open_images, open_test
from stopmim.runs.run import Run

HOLD_OUT = "0.2"  # share of the images to test on, where they have no test split


def next_commands(run: Run) -> str:
    """The commands to type next: diagnose the run, evaluate it, and write a report on both."""
    path = shlex.quote(str(run.path))
    measured, data = run.config.runtime.health_every != 0, run.about["data"]
    images = "" if measured else f" --data {shlex.quote(data['source'])}"
    if data["images"] == 1:  # health measures how images differ
        images = " --data FOLDER"
    evaluation = evaluation_command(run)
    lines = [f"stopmim doctor {path}{images}", f"stopmim report {path}"]
    if evaluation:
        lines.insert(1, evaluation)  # the report shows its results
    else:
        lines += [f"stopmim analyse neighbours {path}", _with_other_images(run)]
    return "\n".join(["next:", *(f"  {line}" for line in lines)])


def evaluation_command(run: Run) -> str | None:
    """The command that evaluates a run on its own images; None if these have no labels."""
    source = str(run.about["data"]["source"])
    words = ["stopmim", "eval", "suite", str(run.path), "--data"]
    if is_generated(source):  # not opened, since that renders them
        return shlex.join([*words, source])
    if is_url(source):  # looking for labels may fetch everything
        return None
    try:
        if not any(len(set(values.tolist())) > 1 for values in open_images(source).labels.values()):
            return None
        whole = next((data for data in (source, _around(source)) if _has_test(data)), None)
    except UserError:  # they are gone, or were objects in memory
        return None
    words += [source, "--hold-out", HOLD_OUT] if whole is None else [whole]
    bad = run.path / "bad_files.jsonl"  # would end an evaluation
    skip = run.config.data.skip or (bad if bad.exists() else None)
    return shlex.join(words + (["--skip", str(skip)] if skip else []))


def how_to_evaluate(run: Run) -> str:
    """The command that evaluates a run, with a placeholder if its own images cannot be used."""
    try:
        own = evaluation_command(run)
    except (UserError, KeyError, TypeError, ValueError):  # run.json may hold anything
        own = None
    return own or _with_other_images(run)


def _with_other_images(run: Run) -> str:
    path = shlex.quote(str(run.path))
    return f"stopmim eval suite {path} --data FOLDER --hold-out {HOLD_OUT}  # with labels"


def _around(source: str) -> str:
    """The parent of a training split, which may hold its test split too."""
    path = Path(source)
    return str(path.parent) if path.name == "train" and path.is_dir() else ""


def _has_test(data: str) -> bool:
    return bool(data) and open_test(data) is not None
