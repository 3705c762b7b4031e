"""Pretraining: the loop. A run is set up in training.py, one update is step.py.

Every random number of step `i` is keyed by (seed, i), and every schedule is a function of `i`, so a
run that was killed and resumed equals one that was not.
"""

import contextlib
import traceback
from itertools import chain
from pathlib import Path
from typing import Any

from stopmim.base.console import Ticker, say
from stopmim.base.errors import InterruptedRunError, StorageError, UserError
from stopmim.base.faults import faultpoint
from stopmim.base.files import write_whole
from stopmim.base.memory import is_out_of_memory
from stopmim.base.secrets import hide, shown
from stopmim.base.signals import interrupting, signals
from stopmim.config.schema import Config
from stopmim.data.images import Images
from stopmim.data.loading import Reader
from stopmim.data.sources.open import keep_outside
from stopmim.gpu.devices import choose_device
from stopmim.runs.lock import claimed
from stopmim.runs.logs import BadFiles
from stopmim.runs.run import Run
from stopmim.train import advice
from stopmim.train.channels import settle_channels
from stopmim.train.distributed import World, is_broken, joined
from stopmim.train.images import open_for_run
from stopmim.train.mirror import mirror
from stopmim.train.plan import first_config
from stopmim.train.progress import Clock, Progress, announce, peak_memory
from stopmim.train.rates import rates
from stopmim.train.training import Training
from stopmim.train.trouble import (
    can_halve,
    halve,
    not_finite,
    out_of_memory,
    saved_if_lost,
    with_parts_of,
)

SLOW = 0.5  # seconds per update; above this, ranks poll for signals at every step


def pretrain(
    data: str | Path | Images,
    out: str | Path,
    preset: str | Path | Config | None = None,
    *,
    stop_at: int | None = None,
    **overrides: Any,
) -> Run:
    """Trains an encoder on unlabelled images, or resumes the run in `out`.

    Args:
        data: a folder or another source of images (docs/data.md), or any `stopmim.data.Images`.
        out: the run directory; runs/run.py lists its contents.
        preset: a name from `stopmim.presets`, a YAML file, or a Config; by default the preset that
            suits the images and the machine, or the config of the run that is resumed.
        stop_at: ends after this many updates, as an interruption would; for tests and trials.
        overrides: config keys, as ``optim={"epochs": 10}`` or ``**{"optim.epochs": 10}``.
    """
    path, data = Path(out), hide(data) if isinstance(data, str) else data
    with joined() as world:  # torchrun's ranks, or this process alone
        config = first_config(preset, overrides, path)
        device = choose_device(config.runtime.device, world.local_rank)
        advice.refuse_hopeless(config, preset, device, data, path, overrides)
        if not (path / "run.json").exists():
            keep_outside(path, data)
        with claimed(path) if world.first else contextlib.nullcontext():  # one writer per run
            try:
                images, source = open_for_run(data, config, path)
                changes = settle_channels(config, overrides, images, path, world)
                config = advice.settle(preset, changes, images, device, path, world.size)
                config = with_parts_of(path, config)  # if they did not fit into memory before
                if world.first:
                    announce(path, images, config, preset, device, world.size)
                with Reader(images, config).running() as reader:  # before memory fills up
                    train(reader, source, path, config, stop_at, world)
            except UserError:  # one line for the user, nothing to debug
                raise
            except KeyboardInterrupt:  # before the first update: later ones are collected
                what = f"{path}: stopped before an update was made"
                raise InterruptedRunError(interrupting(), what) from None
            except Exception as error:
                if is_out_of_memory(error):
                    built = (path / "run.json").exists()
                    raise out_of_memory(config, world, error, path if built else None) from None
                if not is_broken(error):
                    with contextlib.suppress(StorageError):
                        crash = path / f"crash-rank{world.rank}.txt"
                        write_whole(crash, shown(traceback.format_exc()))
                raise
    return Run(path)


def train(
    reader: Reader, source: str, path: Path, config: Config, stop_at: int | None, world: World
) -> None:
    """Sets up or resumes a run, and makes its updates."""
    run, images = Training(reader, source, path, config, world), reader.images
    step, total, device, runtime = run.step, run.total, run.device, config.runtime
    if step >= total:
        say(f"{path}: finished, all {total:,} updates are done")
        return
    if stop_at is not None and step >= stop_at:
        return
    bad_files = BadFiles(path, len(images), config.data.max_bad)
    draws = run.draws(bad_files)
    run.model.train()
    with (
        mirror(runtime.mirror if world.first else "none", path, step) as show,
        signals() as received,
        Ticker("pretrain", total, step) as ticker,
        saved_if_lost(run, received),
        contextlib.closing(run),
    ):
        progress = Progress(ticker, config, run.per_epoch)
        clock, slow = Clock(step), False
        received.nothing_to_save = True
        while step < total:
            ### One update
            run.step, run.update.settled = step, True  # a failure from here on can be saved
            now = rates(config.optim, step, run.per_epoch)  # functions of the step alone
            run.model.predictor.positions.at_step(step, run.per_epoch)
            values = None
            try:
                # On the device: nothing waits yet.
                values = run.update(draws.at(step), now, run.graphs)
            except Exception as error:
                if not can_halve(run, error):
                    raise
            if values is None:  # outside `except`, since the error holds on to memory
                halve(run)
                draws = run.draws(bad_files)
                continue
            run.update.settled = False  # until this update is logged
            step += 1
            received.nothing_to_save = False
            faultpoint("step.end")

            ### What is due after it
            examine = run.health is not None and (step % run.health_every == 0 or step == total)
            # The first update is logged for its loss before training, the last for the end.
            log = step == 1 or step % runtime.log_every == 0 or step == total or examine
            save = step % (runtime.save_every or total) == 0 or step in (total, stop_at)
            number = 0  # of a signal that any rank received
            # Gathering synchronises all ranks. But launchers wait only half a minute for a run
            # that was told to end: too short for many slow updates.
            if log or save or slow or world.size == 1:
                own = (received[:1], draws.bad, clock.seconds, run.saver.is_due)
                numbers, bad, seconds, due = zip(*world.gather(own), strict=True)
                number = max(chain(*numbers), default=0)
                slow = max(seconds) > SLOW
                if world.first:
                    bad_files.add(list(chain(*bad)), usable=True)
                draws.bad.clear()
                save |= number > 0 or due[0]  # by the clock of rank 0
            run.saver.finish(wait=False)  # reports one that has failed
            # Reading the flag waits for the device, so a GPU is asked only where it waits anyway.
            if (log or save or device.type == "cpu") and bool(run.update.broken):
                raise not_finite(path, step + 1 - int(run.update.broken), run.update.guard)
            if log:
                line = run.line(step, values, now)  # waits for the device
                line |= clock.read(step, config.optim.batch_size) | peak_memory(device)
                line |= run.health.measure(run.model) if run.health and examine else {}
                line |= {"random_init": run.untrained} if step == 1 and run.untrained else {}
                if run.metrics:  # on rank 0; `show` mirrors the lines elsewhere
                    run.metrics.write(line)
                    show(line)
                if verdict := run.watch.see(line):
                    say(verdict)
            progress.show(step, values, now.lr, read=log or device.type == "cpu")
            if save:  # every rank takes part: shards are gathered
                run.saver.save(step, final=step in (total, stop_at) or number > 0)
                if world.size == 1 and received:  # it came during the save: no need to go on
                    number = received[0]
            if number and step < total:
                run.saver.finish(final=True)
                world.gather(None)  # were a rank to exit earlier, rank 0 would be killed mid-save
                raise InterruptedRunError(number, f"{path}: stopped and saved at step {step}")
            if step == stop_at:
                return
    say(f"{path}: finished, all {total:,} updates are done")
    if n_bad := len(bad_files.names):
        say(f"{bad_files.path}: {n_bad} of {len(images)} images were unreadable, and replaced")
