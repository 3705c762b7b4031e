"""Pretraining: build, resume, and the loop. One update is step.py, its inputs are draws.py.

Every random number of step `i` is keyed by (seed, i), and every schedule is a function of `i`, so a
run that was killed and resumed equals one that was not.
"""

import contextlib
import math
import traceback
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from stopmim.base.console import Ticker, busy, say, warn
from stopmim.base.errors import (
    CheckpointError,
    InterruptedRunError,
    StorageError,
    UserError,
)
from stopmim.base.faults import faultpoint
from stopmim.base.files import write_whole
from stopmim.base.memory import is_out_of_memory
from stopmim.base.secrets import hide, shown
from stopmim.base.signals import interrupting, signals
from stopmim.config.schema import Config, override
from stopmim.data.images import Images
from stopmim.data.loading import Reader, loader, steps_per_epoch
from stopmim.data.order import shares
from stopmim.data.sources.open import keep_outside
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.health.doctor import Watch
from stopmim.health.measure import Health, due_every, norms
from stopmim.method.build import build
from stopmim.runs import checkpoint, shards
from stopmim.runs.lock import claimed
from stopmim.runs.logs import BadFiles, Metrics
from stopmim.runs.run import Run, begin, set_threads
from stopmim.runs.saver import Saver
from stopmim.train import advice
from stopmim.train.channels import settle_channels
from stopmim.train.distributed import World, agree, is_broken, joined, parallelise
from stopmim.train.draws import Draws
from stopmim.train.guard import check_scaler
from stopmim.train.images import open_for_run
from stopmim.train.mirror import mirror
from stopmim.train.optimizer import adamw
from stopmim.train.plan import first_config
from stopmim.train.progress import Clock, Progress, announce, logged, peak_memory
from stopmim.train.rates import rates
from stopmim.train.step import Step, build_step, is_recorded, recorded
from stopmim.train.trouble import (
    can_halve,
    more_parts,
    not_finite,
    out_of_memory,
    record_parts,
    saved_if_lost,
    with_parts_of,
)
from stopmim.weights.load import apply_init

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
                    announce(path, images, config, preset, world)
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
    run, images = _Training(reader, source, path, config, world), reader.images
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
            run.step, run.function.settled = step, True  # a failure from here on can be saved
            now = rates(config.optim, step, run.per_epoch)  # functions of the step alone
            run.model.predictor.positions.at_step(step, run.per_epoch)
            values = None
            try:
                # On the device: nothing waits yet.
                values = run.function(draws.at(step), now, run.graphs)
            except Exception as error:
                if not can_halve(run, error):
                    raise
            if values is None:  # outside `except`, since the error holds on to memory
                run.halve()
                draws = run.draws(bad_files)
                continue
            run.function.settled = False  # until this update is logged
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
            if (log or save or device.type == "cpu") and bool(run.function.broken):
                raise not_finite(path, step + 1 - int(run.function.broken), run.function.guard)
            if log:
                line: dict[str, Any] = {"step": step, "epoch": step / run.per_epoch}
                line |= logged(run.model, now)
                # JSON has neither NaN nor infinity; gradients scaled for fp16 overflow at times.
                seen = {name: float(value) for name, value in values.items()}
                line |= {name: value for name, value in seen.items() if math.isfinite(value)}
                if (skipped := int(seen.get("skipped", 0))) > run.skipped:
                    run.skipped = skipped
                    warn(f"{path}: {skipped} updates skipped up to step {step}")
                if run.config is not config:  # parts were halved
                    line |= {"accumulate": run.config.runtime.accumulate}
                line |= norms(run.model) | clock.read(step, config.optim.batch_size)
                line |= peak_memory(device)
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


# ------------------------------------------------------------------------------ setting up


class _Training:
    """A run that is ready for its next update: model, update, and what is due when."""

    def __init__(
        self, reader: Reader, source: str, path: Path, config: Config, world: World
    ) -> None:
        """Builds the model and its update, writes run.json, and loads the newest checkpoint."""
        runtime, images = config.runtime, reader.images
        self.path, self.config, self.reader, self.world = path, config, reader, world
        agree(world, config, images.fingerprint)
        self.device = device = choose_device(runtime.device, world.local_rank)
        self.amp = choose_precision(runtime.precision, device)
        self.per_epoch = steps_per_epoch(images, config)  # updates
        self.total = config.optim.epochs * self.per_epoch
        set_threads(path, runtime.threads)  # a resumed run sums in the order of its first start
        # A bad --init leaves no run behind: it is read before run.json is written.
        self.model = model = apply_init(build(config), config, path).to(device)
        if world.first:
            begin(path, config, source, reader, device, world.size)
        if lost := getattr(images, "unreadable", []):
            say(f"{source}: {len(lost)} folders or files cannot be read in full, such as {lost[0]}")
        self.health_every = due_every(config)
        # Measured before sharding: the first call of a sharded model must be its forward pass.
        fresh = world.gather(not any((path / "checkpoints").glob("step-*")))[0]
        what = "measuring the untrained network" if fresh else "reading images to measure health on"
        with busy(what):
            self.health = None
            if self.health_every:
                self.health = Health(images, config, device, self.amp, reader)
            self.untrained = self.health.measure(model) if self.health and fresh else None
        # DDP, FSDP2, or the step itself where that is recorded; `model` if alone.
        self.is_recorded = is_recorded(config, device, world)
        wrapped = parallelise(model, world, "step" if self.is_recorded else runtime.parallel)
        optimizer = adamw(model, config.optim)
        # This rank's images as slices of the global batch, one slice per gradient accumulation.
        self.parts = self._parts()
        self.function = step = build_step(
            model, optimizer, config, device, n_parts=len(self.parts), world=world, wrapped=wrapped
        )
        self.graphs = recorded(step, device) if self.is_recorded else None
        self.step = _resume(path, step, runtime.keep, world)  # updates done
        if 0 < self.step < self.total:
            say(f"{path}: resumes at step {self.step}")
        logged = checkpoint.lines_logged(path / "checkpoints" / f"step-{self.step:08d}")
        self.metrics = Metrics(path, self.step, logged) if world.first else None
        guard = step.guard.state if step.guard else None
        self.saver = Saver(
            path, model, optimizer, step.scaler, config, world.first, guard, log=self.metrics
        )
        self.saver.step = self.step
        self.watch = Watch(Run(path).metrics)
        self.skipped = 0  # skipped updates that were reported
        self.reading = contextlib.ExitStack()  # closes what reads images

    def close(self) -> None:
        self.saver.close()
        self.reading.close()

    def draws(self, bad_files: BadFiles) -> Draws:
        """Images, masks and noise from the next update on."""
        model, config, device, reader = self.model, self.config, self.device, self.reader
        where = {"rank": self.world.rank, "world": self.world.size}
        self.reading.close()  # the loader of larger parts
        batches = loader(reader.images, config, self.step, device=device, **where, reader=reader)
        self.reading.enter_context(contextlib.closing(batches))
        beside = self.graphs.beside if self.graphs else contextlib.nullcontext
        return Draws(model, config, batches, self.parts, bad_files, amp=self.amp, beside=beside)

    def halve(self) -> None:
        """Continues with parts of half the size: the same samples, masks and noise."""
        parts = more_parts(self.config, self.world.size)
        self.config = override(self.config, {"runtime.accumulate": parts})
        self.parts = self._parts()
        self.graphs = None  # of the larger parts
        self.function.cut(len(self.parts))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.graphs = recorded(self.function, self.device) if self.is_recorded else None
        record_parts(self.path, parts)
        size = self.config.optim.batch_size // parts
        warn(f"out of memory at step {self.step + 1}; continuing with {size} images at a time")

    def _parts(self) -> list[slice]:
        runtime, world = self.config.runtime, self.world
        return shares(self.config.optim.batch_size, runtime.accumulate, world.rank, world.size)


def _resume(path: Path, update: Step, keep: int, world: World) -> int:
    """Loads the newest checkpoint that verifies and returns its step; 0 if there is none."""
    newest, damaged = world.gather(checkpoint.latest(path) if world.first else None)[0]
    for problem in damaged:
        warn(f"{problem}; skipped")
    if newest is None:
        if damaged:
            raise CheckpointError(
                f"{path}: none of its {len(damaged)} checkpoints is intact; "
                f"remove them to start from scratch, or choose another --out"
            )
        return 0
    about = checkpoint.state(newest)  # step, config, loss scaler, guard
    checkpoint.load(newest, update.model, update.optimizer)
    if update.scaler and about["scaler"]:
        check_scaler(about["scaler"], update.scaler, str(newest / "state.json"))
        update.scaler.load_state_dict(about["scaler"])
    if update.guard:
        update.guard.load(about, str(newest / "state.json"))
    skipped = int(update.guard.state[4]) if update.guard else 0
    if not update.optimizer.state and about["step"] > skipped:  # fp16 skips without making one
        raise CheckpointError(
            f"{newest}: optimizer.safetensors is empty, expected that of {about['step'] - skipped} "
            f"updates; {shards.ADVICE}"
        )
    if world.first:  # the run may have been killed between a save and its clean-up
        checkpoint.sweep(path)
        shards.sweep(path)
        checkpoint.prune(newest, keep)  # only now: one that is refused must not cost the others
    return about["step"]
