"""Pretraining: build, resume, and the loop. One update is step.py, its inputs are draws.py.

Every random number of step `i` is keyed by (seed, i), and every schedule is a function of `i`, so a
run that was killed and resumed equals one that was not.
"""

import contextlib
import math
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from stopmim._version import __version__
from stopmim.base.console import Ticker, busy, say, warn
from stopmim.base.errors import (
    CheckpointError,
    InterruptedRunError,
    NonFiniteError,
    ResourceError,
    StorageError,
    UserError,
)
from stopmim.base.faults import faultpoint
from stopmim.base.files import write_whole
from stopmim.base.memory import is_out_of_memory, shortage
from stopmim.base.secrets import hide, shown
from stopmim.base.signals import signals
from stopmim.config.schema import Config, flatten
from stopmim.data.images import Images
from stopmim.data.loading import loader, steps_per_epoch
from stopmim.data.order import shares
from stopmim.data.protocols import RemoteError
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import keep_outside, open_images, source_of
from stopmim.gpu.cuda_graphs import CudaGraphs
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.health.doctor import Watch
from stopmim.health.measure import Health, due_every, norms
from stopmim.method.build import build
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint
from stopmim.runs.lock import claimed
from stopmim.runs.logs import BadFiles, Metrics
from stopmim.runs.run import Run, begin, git_state, set_threads
from stopmim.runs.saver import Saver
from stopmim.train import advice
from stopmim.train.channels import settle_channels
from stopmim.train.distributed import World, agree, is_broken, joined, parallelise
from stopmim.train.draws import Draws
from stopmim.train.mirror import mirror
from stopmim.train.optimizer import adamw
from stopmim.train.plan import first_config
from stopmim.train.progress import Progress, announce
from stopmim.train.rates import Rates, rates
from stopmim.train.step import Step, build_step
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
        advice.refuse_hopeless(config, preset, device, data, path)
        if not (path / "run.json").exists():
            keep_outside(path, data)
        with claimed(path) if world.first else contextlib.nullcontext():  # one writer per run
            try:
                images = _read(data)
                source = source_of(data, images)
                images = without_skipped(images, config.data.skip)
                changes = settle_channels(config, overrides, images, path, world)
                config = advice.settle(preset, changes, images, device, path, world.size)
                if world.first:
                    announce(path, images, config, preset, world)
                train(images, source, path, config, stop_at, world)
            except UserError:  # one line for the user, nothing to debug
                raise
            except KeyboardInterrupt:  # before the first update: later ones are collected
                what = f"{path}: stopped before an update was made"
                raise InterruptedRunError(signal.SIGINT, what) from None
            except Exception as error:
                if is_out_of_memory(error):
                    built = (path / "run.json").exists()
                    raise _out_of_memory(config, world.size, error, built) from None
                if not is_broken(error):
                    with contextlib.suppress(StorageError):
                        crash = path / f"crash-rank{world.rank}.txt"
                        write_whole(crash, shown(traceback.format_exc()))
                raise
    return Run(path)


def train(
    images: Images, source: str, path: Path, config: Config, stop_at: int | None, world: World
) -> None:
    """Sets up or resumes a run, and makes its updates."""
    run = _Training(images, source, path, config, world)
    step, total, device, runtime = run.step, run.total, run.device, config.runtime
    if step >= total:
        say(f"{path}: finished, all {total:,} updates are done")
        return
    if stop_at is not None and step >= stop_at:
        return
    batches = loader(images, config, step, device=device, rank=world.rank, world=world.size)
    update = run.update
    beside = update.beside if isinstance(update, CudaGraphs) else contextlib.nullcontext
    bad_files = BadFiles(path, len(images), config.data.max_bad)
    draws = Draws(run.model, config, batches, run.parts, bad_files, amp=run.amp, beside=beside)
    run.model.train()
    with (
        mirror(runtime.mirror if world.first else "none", path, step) as show,
        signals() as received,
        Ticker("pretrain", total, step) as ticker,
        contextlib.closing(run.saver),
    ):
        progress = Progress(ticker, config, run.per_epoch)
        clock, slow = _Clock(step), False
        received.nothing_to_save = True
        while step < total:
            ### One update
            now = rates(config.optim, step, run.per_epoch)  # functions of the step alone
            run.model.predictor.positions.at_step(step, run.per_epoch)
            try:
                values = update(draws.at(step), now)  # tensors on the device: nothing waits yet
            except RemoteError:
                # Alone: all ranks take part in a save, and only this one knows.
                if world.size == 1 and step > max(run.step, run.saver.step):
                    run.saver.save(step, final=True)
                raise
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
                told = (received[:1], draws.bad, clock.seconds, run.saver.is_due)
                numbers, found, seconds, due = zip(*world.gather(told), strict=True)
                number = max((n for some in numbers for n in some), default=0)
                slow = max(seconds) > SLOW
                if world.first:
                    bad_files.add([entry for some in found for entry in some], usable=True)
                draws.bad.clear()
                save |= number > 0 or due[0]  # by the clock of rank 0
            run.saver.finish(wait=False)  # reports one that has failed
            # Reading the flag waits for the device, so a GPU is asked only where it waits anyway.
            if (log or save or device.type == "cpu") and bool(run.broken):
                raise _not_finite(path, step + 1 - int(run.broken))
            if log:
                line: dict[str, Any] = {"step": step, "epoch": step / run.per_epoch}
                line |= _logged(run.model, now)
                # JSON has no infinity, which a gradient scaled for fp16 is at times, and no NaN.
                seen = {name: float(value) for name, value in values.items()}
                line |= {name: value for name, value in seen.items() if math.isfinite(value)}
                line |= norms(run.model) | clock.read(step, config.optim.batch_size)
                line |= _peak_memory(device)
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
                world.gather(None)  # a rank that leaves before rank 0 has saved gets it killed
                raise InterruptedRunError(number, f"{path}: stopped and saved at step {step}")
            if step == stop_at:
                return
    say(f"{path}: finished, all {total:,} updates are done")
    if n_bad := len(bad_files.names):
        say(f"{bad_files.path}: {n_bad} of {len(images)} images were unreadable, and replaced")


# ------------------------------------------------------------------------------ setting up


def _read(data: str | Path | Images) -> Images:
    try:
        with busy(f"reading {data}"):
            return open_images(data)
    except MemoryError as error:
        what = f"{data}: out of memory while it is read: {shortage(error)}"
        raise ResourceError(f"{what}; use fewer images, or single files in a folder") from None


class _Training:
    """A run that is ready for its next update: model, update, and what is due when."""

    def __init__(
        self, images: Images, source: str, path: Path, config: Config, world: World
    ) -> None:
        """Builds the model and its update, writes run.json, and loads the newest checkpoint."""
        runtime, batch_size = config.runtime, config.optim.batch_size
        _agree(config, images, world)
        self.device = device = choose_device(runtime.device, world.local_rank)
        self.amp = choose_precision(runtime.precision, device)
        self.per_epoch = steps_per_epoch(images, config)  # updates
        self.total = config.optim.epochs * self.per_epoch
        set_threads(path, runtime.threads)  # a resumed run sums in the order of its first start
        # A bad --init leaves no run behind: it is read before run.json is written.
        self.model = model = apply_init(build(config), config, path).to(device)
        if world.first:
            begin(path, config, source, images, device, world.size)
        if lost := getattr(images, "unreadable", []):
            say(f"{source}: {len(lost)} folders or files cannot be read in full, as {lost[0]}")
        self.health_every = due_every(config)
        # Measured before sharding: the first call of a sharded model must be its forward pass.
        fresh = world.gather(not any((path / "checkpoints").glob("step-*")))[0]
        with busy("measuring the untrained network"):
            self.health = Health(images, config, device, self.amp) if self.health_every else None
            self.untrained = self.health.measure(model) if self.health and fresh else None
        wrapped = parallelise(model, world, runtime.parallel)  # DDP or FSDP2; `model` if alone
        optimizer = adamw(model, config.optim)
        # This rank's images as slices of the global batch, one slice per gradient accumulation.
        self.parts = shares(batch_size, runtime.accumulate, world.rank, world.size)
        self.update = build_step(
            model, optimizer, config, device, n_parts=len(self.parts), world=world, wrapped=wrapped
        )
        # The step itself, where the update replays recordings of it.
        step = self.update.function if isinstance(self.update, CudaGraphs) else self.update
        assert isinstance(step, Step)
        self.broken, scaler = step.broken, step.scaler
        self.step = _resume(path, model, optimizer, scaler, runtime.keep, world)  # updates done
        if 0 < self.step < self.total:
            say(f"{path}: resumes at step {self.step}")
        logged = checkpoint.lines_logged(path, self.step)
        self.metrics = Metrics(path, self.step, logged) if world.first else None
        self.saver = Saver(
            path, model, optimizer, scaler, config, writes=world.first, log=self.metrics
        )
        self.watch = Watch(Run(path).metrics)


def _agree(config: Config, images: Images, world: World) -> None:
    """Refuses ranks with another config, other code or other images."""
    states = world.gather(git_state())
    known = next((state for state in states if state is not None), None)
    # A rank without git, or with one that took too long, cannot say that it has other code.
    code = {"version": __version__, "git state": states[world.rank] or known}
    flat = dict(flatten(config.model_dump(mode="json")))
    agree(world, flat | code | {"data": images.fingerprint})


def _resume(
    path: Path,
    model: MaskedImageModel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    keep: int,
    world: World,
) -> int:
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
    about = checkpoint.state(newest)  # step, config, loss scaler
    checkpoint.load(newest, model, optimizer)
    if world.first:  # a kill may have come between a save and its clearing up
        checkpoint.sweep(path)
        checkpoint.prune(newest, keep)
    if scaler and about["scaler"]:
        scaler.load_state_dict(about["scaler"])
    return about["step"]


# ------------------------------------------------------------------------------ logging and ending


def _not_finite(path: Path, step: int) -> NonFiniteError:
    return NonFiniteError(
        f"{path}: the loss or its gradient is not finite at step {step}, no update was made from "
        f"it; lower --optim.lr, set --optim.clip_grad 1, or use --runtime.precision fp32"
    )


def _out_of_memory(config: Config, ranks: int, error: Exception, built: bool) -> ResourceError:
    """Names what to try next; `built`: the model itself has found room."""
    size = config.optim.batch_size
    parts = ranks * len(shares(size, config.runtime.accumulate, world=ranks))
    more = [n for n in range(2 * parts, size + 1) if size % n == 0 and n % ranks == 0]
    remedies = [f"--runtime.accumulate {n}" for n in more[:1]]
    remedies += ["--runtime.recompute on"] if config.runtime.recompute == "off" else []
    remedy = [*remedies, "a smaller --arch"][0 if built else -1]
    where = f"with {size // parts} images at a time" if built else f"building {config.arch}"
    return ResourceError(f"out of memory {where}: {shortage(error)}; try {remedy}")


class _Clock:
    """Images per second since it was last read; `seconds` per update, of the last reading."""

    def __init__(self, step: int) -> None:
        self.step, self.time, self.seconds = step, time.monotonic(), 0.0

    def read(self, step: int, batch_size: int) -> dict[str, float]:
        now = time.monotonic()
        self.seconds = max(1e-9, now - self.time) / (step - self.step)
        self.step, self.time = step, now
        return {"images_per_s": batch_size / self.seconds}


def _logged(model: MaskedImageModel, now: Rates[float]) -> dict[str, float]:
    """Rates of an update; without a target encoder there is no momentum."""
    line = now._asdict()
    if not model.target.follows:
        del line["momentum"]
    return line


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of a GPU so far: allocated by tensors, and reserved by torch."""
    if device.type != "cuda":
        return {}
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return dict(zip(("memory_mib", "memory_held_mib"), (n / 2**20 for n in peaks), strict=True))
