"""Copies metrics.jsonl to TensorBoard or W&B; metrics.jsonl stays the record."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from stopmim.base.errors import UserError
from stopmim.base.files import own_folder, remove
from stopmim.runs.run import Run

Kind = Literal["none", "tensorboard", "wandb"]
Line = Mapping[str, Any]


@contextlib.contextmanager
def mirror(kind: Kind, path: Path, step: int) -> Iterator[Callable[[Line], None]]:
    """Yields the function to call with every new line; `step` is where the run resumes.

    Writes to RUN/tensorboard, RUN/wandb or nowhere, and is closed however the run ends.
    """
    if kind == "none":
        yield lambda line: None
        return
    with contextlib.ExitStack() as stack:
        try:
            opened = _wandb(path) if kind == "wandb" else _tensorboard(path, step)
            write = stack.enter_context(opened)
        except ImportError:
            raise UserError(
                f'runtime.mirror: {kind} is not installed; pip install "stopmim[{kind}]"'
            ) from None
        yield write


def _scalars(line: Line) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the step and the numbers of a line; the untrained network has step 0."""
    if "random_init" in line:
        yield 0, dict(line["random_init"])
    yield line["step"], {k: v for k, v in line.items() if k not in ("step", "random_init")}


@contextlib.contextmanager
def _tensorboard(path: Path, step: int) -> Iterator[Callable[[Line], None]]:
    from torch.utils.tensorboard import SummaryWriter

    # Purges what an earlier start wrote after `step`.
    folder = own_folder(path / "tensorboard")
    with SummaryWriter(str(folder), purge_step=step + 1) as writer:

        def write(line: Line) -> None:
            for at, values in _scalars(line):
                for name, value in values.items():
                    writer.add_scalar(name, value, at)
            writer.flush()

        yield write


@contextlib.contextmanager
def _wandb(path: Path) -> Iterator[Callable[[Line], None]]:
    """Always offline: the user may call `wandb sync RUN/wandb/offline-run-*`."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # read at import: no telemetry
    import wandb

    run = Run(path)
    # The first start is recorded before the first update, so a run keeps its id for life.
    first = json.dumps(run.about["starts"][0], sort_keys=True)
    name = hashlib.sha256(first.encode()).hexdigest()[:8]
    # A .wandb file cannot be truncated to where the run resumes, so it is written anew.
    for old in own_folder(path / "wandb").glob(f"offline-run-*-{name}"):
        remove(old)
    settings = wandb.Settings(
        mode="offline",
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    about = {"id": name, "name": path.resolve().name, "config": run.about["config"]}
    try:
        shown = wandb.init(project="stopmim", dir=str(path), settings=settings, **about)
    except wandb.Error as error:
        raise UserError(f"runtime.mirror: wandb cannot start: {error}") from None

    def write(line: Line) -> None:
        for at, values in _scalars(line):
            shown.log(values, step=at)

    failed = 1
    try:
        for line in run.metrics:
            write(line)
        yield write
        failed = 0
    finally:
        shown.finish(exit_code=failed)
