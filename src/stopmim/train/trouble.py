"""Response to an update that cannot be made: save, halve the parts of the batch, explain."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from stopmim.base.console import say, warn
from stopmim.base.errors import (
    DataError,
    InterruptedRunError,
    NonFiniteError,
    ResourceError,
    UserError,
)
from stopmim.base.files import write_whole
from stopmim.base.memory import is_out_of_memory, shortage
from stopmim.base.signals import Received, WaitEndedError
from stopmim.config.schema import Config, override
from stopmim.data.order import shares
from stopmim.runs.run import Run
from stopmim.train.distributed import World, is_broken
from stopmim.train.guard import MOST, Guard
from stopmim.train.training import Training

# ------------------------------------------------------------------------- lost workers and ranks


@contextlib.contextmanager
def saved_if_lost(run: Training, received: Received) -> Iterator[None]:
    """Saves the updates so far when images, a worker or another rank end the run.

    They mostly fail before an update changes a weight; if not, its line is missing from the log and
    the run resumes from the checkpoint before. Rank 0 saves by itself if it holds whole tensors.
    """
    try:
        yield
    except (WaitEndedError, DataError, ResourceError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_broken(error):
            raise
        run.world.answer()  # saving may take longer than the others wait for a sign of life
        saved = _save(run)
        if not isinstance(error, WaitEndedError):
            raise
        what = f"stopped and saved at step {run.step}" if saved else "stopped while it waited"
        raise InterruptedRunError(received[0], f"{run.path}: {what}") from None


def _save(run: Training) -> bool:
    """Saves the last update if possible; returns whether its checkpoint exists."""
    alone = run.world.size == 1 or run.config.runtime.parallel == "ddp"
    if not (run.world.first and alone and run.update.settled) or run.update.broken:
        return False
    if run.saver.step < run.step:
        try:
            run.saver.save(run.step, final=True)
        except UserError as error:  # such as a full disk; the caller reports what ended the run
            warn(str(error))
            return False
        say(f"{run.path}: saved at step {run.step}")
    return True


# ------------------------------------------------------------------------- out of memory


def can_halve(run: Training, error: Exception) -> bool:
    """Whether the run continues after `error` with smaller parts of the batch.

    Ranks cannot: the others wait in a collective for one that ran out of memory. They start again.
    """
    is_asked_for = run.config.runtime.on_oom == "halve" and run.world.size == 1
    parts = more_parts(run.config, 1)
    return is_asked_for and is_out_of_memory(error) and run.update.settled and parts > 0


def halve(run: Training) -> None:
    """Continues with parts of half the size."""
    parts = more_parts(run.config, run.world.size)
    run.cut(parts)
    record_parts(run.path, parts)
    size = run.config.optim.batch_size // parts
    warn(f"out of memory at step {run.step + 1}; continuing with {size} images at a time")


def more_parts(config: Config, ranks: int) -> int:
    """At least twice as many parts of the batch over all ranks; 0 if there are none.

    Masks of the released code depend on the parts, so these stay as they are.
    """
    size, parts = config.optim.batch_size, _parts(config, ranks)
    if config.masking.compat == "released":
        return 0
    more = (n for n in range(2 * parts, size + 1) if size % n == 0 and n % ranks == 0)
    return next(more, 0)


def _parts(config: Config, ranks: int) -> int:
    return ranks * len(shares(config.optim.batch_size, config.runtime.accumulate, world=ranks))


def with_parts_of(path: Path, config: Config) -> Config:
    """`config` with the parts that the run at `path` needed when memory ran out."""
    if config.runtime.on_oom == "stop" or not (path / "run.json").exists():
        return config
    found = Run(path).about.get("accumulate")
    if not isinstance(found, int) or found <= config.runtime.accumulate:
        return config
    return override(config, {"runtime.accumulate": found}, f"{path / 'run.json'}")


def record_parts(path: Path, parts: int) -> None:
    """Records in run.json how many parts are needed, for `with_parts_of`."""
    about = Run(path).about | {"accumulate": parts}
    write_whole(path / "run.json", json.dumps(about, indent=1))


def out_of_memory(
    config: Config, world: World, error: Exception, path: Path | None
) -> ResourceError:
    """An error that names what to try next; with the `path` of a run, the model itself did fit."""
    config = with_parts_of(path, config) if path else config
    size, parts = config.optim.batch_size, _parts(config, world.size)
    more = more_parts(config, world.size)
    remedies = [f"--runtime.accumulate {more}"] if more else []
    remedies += ["--runtime.recompute on"] if config.runtime.recompute == "off" else []
    remedy = f"try {[*remedies, 'a smaller --arch'][0 if path else -1]}"
    if path and more and config.runtime.on_oom == "halve" and world.size > 1:
        record_parts(path, more)
        remedy = f"the same command continues with {more} parts of a batch"
    where = f"with {size // parts} images at a time" if path else f"building {config.arch}"
    return ResourceError(f"out of memory {where}: {shortage(error)}; {remedy}")


# ------------------------------------------------------------------------- numbers that explode


def not_finite(path: Path, step: int, guard: Guard | None) -> NonFiniteError:
    remedy = "lower --optim.lr, set --optim.clip_grad 1, or use --runtime.precision fp32"
    if guard and int(guard.state[3]) > MOST:
        what = f"{MOST} updates before step {step} were skipped, and this one is no better"
    else:
        what = f"the loss or its gradient is not finite at step {step}, no update was made from it"
    return NonFiniteError(f"{path}: {what}; {remedy}")
