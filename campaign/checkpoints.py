"""Checkpoints damaged, or swapped between runs of one shape: refused, or the exact model."""

import shutil
from pathlib import Path
from typing import Any

from campaign.cases import Case, Family, need
from campaign.damage import BYTES
from campaign.sample import (
    HALF,
    copy,
    need_same,
    same_model,
    train,
    words,
    write_config,
    write_other_images,
)
from campaign.sample import (
    prepare as prepare_runs,
)

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
OTHERS: dict[str, dict[str, Any]] = {  # runs of the same shape
    "seed": {"seed": 1},
    "lr": {"optim.lr": 7e-4},
    "sigma": {"positions.sigma": 0.3},
    "ema": {"optim.ema": [0.99, 1.0]},
    "data": {},
}
REFUSED = {2, 3, 4}


def prepare(folder: Path) -> None:
    prepare_runs(folder)
    images = write_other_images(folder / "others")
    for name, changes in OTHERS.items():
        config = write_config(folder / f"{name}.yaml", **changes)
        train(images if name == "data" else folder / "images", folder / name, config, HALF)
        need(not same_model(folder / name, folder / "half"), f"{name}: the same run")


def damage(case: Case, run: Path) -> str:
    """Does something to the checkpoints of `run`, and says what."""
    dice, steps = case.dice, sorted((run / "checkpoints").iterdir())
    step = dice.choice(steps)
    name = dice.choice(FILES)
    other = case.shared / dice.choice(list(OTHERS))
    theirs = other / "checkpoints" / step.name
    match case.number % 6:
        case 0 | 1:  # bytes of a file
            change = dice.choice(BYTES)
            (step / name).write_bytes(change((step / name).read_bytes(), dice))
            return f"{change.__name__} {step.name}/{name}"
        case 2:  # a file less, or everything
            what = dice.choice((name, "all", "checkpoint"))
            if what == name:
                (step / name).unlink()
            else:
                shutil.rmtree(step if what == "checkpoint" else step.parent)
            return f"removed {what} of {step.name}"
        case 3:  # files of another run
            some = dice.choice(((name,), FILES[:1], FILES[1:2], FILES[:2], FILES[2:], FILES[:3]))
            for one in some:
                shutil.copyfile(theirs / one, step / one)
            return f"{', '.join(some)} of {other.name} in {step.name}"
        case 4:  # whole checkpoints of another run
            chosen = dice.choice((steps, [step]))
            for old in chosen:
                shutil.rmtree(old)
                shutil.copytree(other / "checkpoints" / old.name, old)
            return f"{len(chosen)} checkpoints of {other.name}"
        case _:  # the same run, at the wrong place
            return _moved(case, steps)


def _moved(case: Case, steps: list[Path]) -> str:
    first, last = steps
    name = case.dice.choice(FILES)
    match case.dice.randrange(4):
        case 0:
            shutil.copyfile(first / name, last / name)
            return f"{name} of {first.name} in {last.name}"
        case 1:
            shutil.rmtree(last)
            shutil.copytree(first, last)
            return f"{first.name} as {last.name}"
        case 2:
            shutil.copytree(last, last.with_name("step-00000009"))
            return f"{last.name} as step-00000009"
        case _:
            shutil.move(last, last.with_name("away"))
            shutil.move(first, last)
            shutil.move(last.with_name("away"), first)
            return "the two exchanged"


def case(case: Case) -> None:
    run = copy(case.shared / "half", case.folder / "run")
    case.about = damage(case, run)
    if case.dice.random() < 0.7:
        resume(case, run)
    else:
        export(case, run)


def resume(case: Case, run: Path) -> None:
    done = case.run(*words(case.shared / "images", run, case.shared / "config.yaml"))
    if done.code == 0:
        need_same(run, case.shared / "whole")
        case.counts["exact"] += 1
    else:
        need(done.code in REFUSED, str(done))
        case.counts["refused"] += 1


def export(case: Case, run: Path) -> None:
    """What is exported is the encoder of one of the run's own checkpoints."""
    out = case.folder / "export"
    done = case.run("export", run, "--to", "safetensors", "--out", out)
    if done.code:
        need(done.code in REFUSED, str(done))
        need(not out.exists(), "refused, but something was exported")
        case.counts["refused"] += 1
        return
    (found,) = out.glob("*.safetensors")
    known = []
    for step in (case.shared / "half" / "checkpoints").iterdir():
        own = case.folder / f"own {step.name}"
        case.run("export", step, "--to", "safetensors", "--out", own)
        known += [path.read_bytes() for path in own.glob("*.safetensors")]
    need(found.read_bytes() in known, "exported another model with code 0")
    case.counts["exact"] += 1


FAMILY = Family(
    "checkpoints",
    "a damaged or foreign checkpoint is refused, or the model is the exact one",
    quick=120,
    long=1200,
    case=case,
    prepare=prepare,
)
