"""A run of a quarter of a second by the command line, to be damaged and compared with its twin."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from campaign.cases import Failed, need
from campaign.processes import command
from stopmim import Run
from stopmim.runs.checkpoint import newest_intact
from tiny import assert_same_run, tiny, write_folder

HALF = 6  # updates of the ten, with checkpoints of steps 3 and 6
USUAL = {"runtime.health_every": 5, "data.max_bad": 0.5}  # one image is broken


def write_config(path: Path, **changes: Any) -> Path:
    """Writes the config of a tiny run, with `changes`, as a file for --preset."""
    path.write_text(yaml.safe_dump(tiny(**USUAL | changes).model_dump(mode="json")))
    return path


def write_images(root: Path) -> Path:
    """40 pictures, of which one is broken, so that a run has a bad_files.jsonl."""
    write_folder(root)
    (root / "part0" / "broken.png").write_bytes(b"junk")
    return root


def write_other_images(root: Path) -> Path:
    """As many pictures under the same names, of the same sizes, with other content."""
    write_images(root)
    for path in root.rglob("[0-9]*.png"):
        pixels = 255 - np.asarray(Image.open(path))
        Image.fromarray(pixels).save(path)
    return root


def words(images: Path, out: Path, config: Path) -> list[str]:
    return ["pretrain", str(images), "--out", str(out), "--preset", str(config)]


def stop_at(step: int) -> None:
    """Makes `stopmim pretrain` of this process end after `step` updates."""
    from stopmim.train import loop

    real = loop.pretrain

    def pretrain(*args: Any, **options: Any) -> Run:
        return real(*args, **options, stop_at=step)

    loop.pretrain = pretrain


def train(images: Path, out: Path, config: Path, until: int | None = None) -> Path:
    """Trains in a fork; fails if that does."""
    log = out.with_name(f"{out.name}.log")
    before = (lambda: stop_at(until)) if until else (lambda: None)
    done = command(words(images, out, config), log, before=before).finish()
    need(done.code == 0, f"cannot train: {done}")
    return out


def prepare(folder: Path, **changes: Any) -> None:
    """images/, config.yaml, and two runs: whole/ of ten updates, half/ of its first six."""
    images = write_images(folder / "images")
    config = write_config(folder / "config.yaml", **changes)
    for name, until in (("whole", None), ("half", HALF)):
        train(images, folder / name, config, until)


def copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def same_model(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints of two runs are the same, bit for bit."""
    names = ("model.safetensors", "optimizer.safetensors")
    ours, theirs = newest_intact(a), newest_intact(b)
    return all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)


def need_same(a: Path, b: Path) -> None:
    """Fails unless two runs are the same: the logged curve, the weights, the moments."""
    try:
        assert_same_run(Run(a), Run(b))
    except AssertionError as error:
        raise Failed(f"the resumed run is not the uninterrupted one: {str(error)[:200]}") from None
    need(not list((a / "checkpoints").glob(".tmp*")), "a half written checkpoint is left")
    hidden = [path.name for path in a.glob(".*")]
    need(not hidden, f"temporary files are left in the run: {hidden}")
