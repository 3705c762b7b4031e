"""Pretraining: build, resume, loop. One update, and the loss, are in update.py.

Every random number of step `i` is keyed by (seed, i), and every schedule is a function of `i`, so a
run that was killed and started again is the run that was not.

Shapes: B images of a part, M target blocks of K patches, L cells of 2x2 patches.
"""

import contextlib
import math
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stopmim._version import __version__
from stopmim.base import schedules
from stopmim.base.console import Ticker, say, warn
from stopmim.base.errors import (
    CheckpointError,
    InterruptedRunError,
    NonFiniteError,
    ResourceError,
    UserError,
)
from stopmim.base.faults import faultpoint
from stopmim.base.random_keys import torch_generator
from stopmim.base.signals import signals
from stopmim.config.schema import Config, PositionsConfig, flatten
from stopmim.data.crops import AUGMENT, normalise
from stopmim.data.images import Images
from stopmim.data.loading import loader, steps_per_epoch
from stopmim.data.order import shares
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import keep_outside, open_images, source_of
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.gpu.sharding import whole
from stopmim.health.doctor import Watch
from stopmim.health.measure import Health, due_every, probe
from stopmim.method import masks as masking
from stopmim.method.build import build, configure, draw_masks, find_cells
from stopmim.method.model import Batch, MaskedImageModel
from stopmim.method.positions import Positions, StochasticPositions
from stopmim.method.predictor import Noise, Predictor
from stopmim.runs import checkpoint
from stopmim.runs.run import BadFiles, Metrics, Run, begin, claimed, git_state, set_threads
from stopmim.train.distributed import World, agree, is_broken, joined, spread
from stopmim.train.mirror import mirror
from stopmim.train.optimizer import adamw, rates
from stopmim.train.step import Undrawn, updater
from stopmim.weights.load import start

NOISE_CHUNK = 64  # consecutive images of a batch whose noise has one key
SLOW = 0.5  # seconds; of longer updates each is a chance to hear of a signal another rank received


def every(step: int, n: int) -> bool:
    """Whether something done every `n` updates is due after update number `step` (from 1)."""
    return step % n == 0


# ------------------------------------------------------------------------------ one batch


def draw_noise(
    predictor: Predictor,
    masks: masking.Masks,
    part: slice,
    config: Config,
    step: int,
    dtype: torch.dtype,
) -> Noise:
    """The noise of one part of the batch of `step`, in the dtype it will be multiplied in.

    Drawn chunk by chunk of the whole batch, so that it does not depend on how the batch is cut.
    """
    size, device = config.optim.batch_size, masks.targets.device
    of_masked: list[Tensor] = []
    of_context: list[Tensor] = []
    for chunk in range(part.start // NOISE_CHUNK, math.ceil(part.stop / NOISE_CHUNK)):
        first, last = chunk * NOISE_CHUNK, min((chunk + 1) * NOISE_CHUNK, size)
        generator = torch_generator("noise", config.seed, step, chunk, device=device)
        # Only the shapes matter: the whole chunk is drawn, also where another part has its images.
        context = masks.context[:1].expand(last - first, -1)
        targets = masks.targets[:, :1].expand(-1, last - first, -1)
        noise = predictor.draw(context, targets, generator, dtype)
        own = slice(max(first, part.start) - first, min(last, part.stop) - first)
        if noise.masked is not None:
            of_masked.append(noise.masked[:, own])
        if noise.context is not None:
            of_context.append(noise.context[own])
    # Put together first and rounded then, if at all: a kernel less for every chunk.
    return Noise(
        torch.cat(of_masked, dim=1).to(dtype) if of_masked else None,
        torch.cat(of_context).to(dtype) if of_context else None,
    )


def set_sigma(
    positions: Positions, config: PositionsConfig, step: int, steps_per_epoch: int
) -> None:
    """Gives `positions` the sigma of update number `step`, which ``positions.ramp`` lets grow."""
    ramp = int(config.ramp * steps_per_epoch)
    if ramp and config.sigma is not None and isinstance(positions, StochasticPositions):
        positions.sigma = schedules.linear(step, total=ramp, start=0.0, final=config.sigma)


# ------------------------------------------------------------------------------ a whole run


def pretrain(
    data: str | Path | Images,
    out: str | Path,
    preset: str | Path | Config = "vit_b16_stop",
    *,
    stop_at: int | None = None,
    **overrides: Any,
) -> Run:
    """Trains an encoder on unlabelled images, or goes on with the run that is in `out`.

    Args:
        data: a folder or another source of images (docs/data.md), or any `stopmim.data.Images`.
        out: the run directory; see run.py for what it will hold.
        preset: a name from `stopmim.config.presets`, a YAML file, or a Config.
        stop_at: ends after this many updates, as an interruption would; for tests and trials.
        overrides: config keys, as ``optim={"epochs": 10}`` or ``**{"optim.epochs": 10}``.
    """
    path = Path(out)
    with joined() as world:
        config = configure(preset, overrides)
        if not (path / "run.json").exists():
            keep_outside(path, data)
        with claimed(path) if world.first else contextlib.nullcontext():
            try:
                images = open_images(data)
                source = source_of(data, images)
                images = without_skipped(images, config.data.skip)
                _train(images, source, path, config, stop_at, world)
            except UserError:
                raise
            except torch.OutOfMemoryError as error:
                raise _out_of_memory(config, world.size, error) from None
            except Exception as error:
                if not is_broken(error):
                    with contextlib.suppress(OSError):
                        crash = path / f"crash-rank{world.rank}.txt"
                        crash.write_text(traceback.format_exc(), encoding="utf-8")
                raise
    return Run(path)


def _train(
    images: Images, source: str, path: Path, config: Config, stop_at: int | None, world: World
) -> None:
    ### What the run needs
    runtime, optim = config.runtime, config.optim
    flat = dict(flatten(config.model_dump(mode="json")))
    states = world.gather(git_state())
    known = next((state for state in states if state is not None), None)
    # A rank without git, or with one that took too long, cannot say that it has other code.
    code = {"version": __version__, "git state": states[world.rank] or known}
    agree(world, flat | code | {"data": images.fingerprint})
    device = choose_device(runtime.device, world.local_rank)
    amp = choose_precision(runtime.precision, device)
    per_epoch = steps_per_epoch(images, config)
    total = optim.epochs * per_epoch
    parts = shares(optim.batch_size, runtime.accumulate, world.rank, world.size)
    set_threads(path, runtime.threads)
    model = start(build(config), config, path).to(device)  # a bad --init leaves no run behind
    if world.first:
        begin(path, config, source, images, device, world.size)
    if lost := getattr(images, "unreadable", []):
        say(f"{source}: {len(lost)} folders or files cannot be read in full, as {lost[0]}")
    health_every = due_every(config)
    health = Health(probe(images, config), device, amp) if health_every else None
    # While the model is in one piece: the first who calls a sharded one has to call all of it.
    begins = world.gather(not any((path / "checkpoints").glob("step-*")))[0]
    untrained = health.measure(model) if health and begins else None
    everywhere = spread(model, world, runtime.parallel)
    optimizer = adamw(model, optim)
    scaler = torch.amp.GradScaler(device.type) if amp == torch.float16 else None

    ### Where it stands
    step = _resume(path, model, optimizer, scaler, runtime.keep, world)
    if world.first:
        metrics = Metrics(path, step)
    bad_files = BadFiles(path, len(images), config.data.max_bad)
    if step >= total:
        say(f"{path}: finished, all {total} updates are done")
        return
    if stop_at is not None and step >= stop_at:
        return
    batches = loader(images, config, step, device=device, rank=world.rank, world=world.size)
    broken = torch.zeros((), device=device)
    update = updater(
        model,
        optimizer,
        config,
        device,
        n_parts=len(parts),
        broken=broken,
        scaler=scaler,
        world=world,
        spread=everywhere,
    )
    saver = checkpoint.Saver(path, model, optimizer, scaler, config, writes=world.first)
    save_every = runtime.save_every or per_epoch
    bad: list[tuple[str, str]] = []  # unreadable images since rank 0 was last told
    model.train()
    watch = Watch(Run(path).metrics)

    def prepared() -> Iterator[Undrawn]:
        """What the update of this step is made from, part by part, when its turn comes."""
        for part, masks in zip(parts, draw_masks(config, step, parts, device), strict=True):
            loaded = next(batches)
            bad.extend(loaded.bad)
            if not loaded.images.numel():
                bad_files.add(bad, usable=False)
            pixels = loaded.images.to(device, non_blocking=True)
            if change := AUGMENT.get(config.data.augmentation or "crop"):
                pixels = change(pixels, loaded.augmentation.to(device, non_blocking=True))
            cells = find_cells(config, step, masks.targets)
            of_part = (model.predictor, masks, part, config, step, amp or torch.float32)
            yield Batch(normalise(pixels), *masks, cells), partial(draw_noise, *of_part)

    ### The loop
    with (
        mirror(runtime.mirror if world.first else "none", path, step) as show,
        signals() as received,
        Ticker("pretrain", total, step) as ticker,
    ):
        clock, slow = _Clock(step), False
        while step < total:
            now = rates(optim, step, per_epoch)
            set_sigma(model.predictor.positions, config.positions, step, per_epoch)
            values = update(prepared(), now)
            step += 1
            faultpoint("step.end")
            examine = health is not None and (every(step, health_every) or step == total)
            log = step == 1 or every(step, runtime.log_every) or step == total or examine
            save = every(step, save_every) or step in (total, stop_at)
            number = 0  # of a signal that any rank received
            # To ask the others makes all wait. But launchers that told a run to end wait for it
            # half a minute: no time for many updates that are long.
            if log or save or slow or world.size == 1:
                told = world.gather((received[:1], bad, clock.seconds))
                number = max((n for numbers, _, _ in told for n in numbers), default=0)
                slow = max(seconds for _, _, seconds in told) > SLOW
                if world.first:
                    bad_files.add([entry for _, found, _ in told for entry in found], usable=True)
                bad.clear()
            save |= number > 0
            # Reading the flag waits for the device, so a GPU is asked only where it waits anyway.
            if (log or save or device.type == "cpu") and bool(broken):
                raise NonFiniteError(
                    f"{path}: the loss or its gradient is not finite at step "
                    f"{step + 1 - int(broken)}, no update was made from it; lower --optim.lr, set "
                    f"--optim.clip_grad 1, or use --runtime.precision fp32"
                )
            if log:
                line = {"step": step, "epoch": step / per_epoch, **now._asdict()}
                # JSON has no infinity, which a gradient scaled for fp16 is at times, and no NaN.
                seen = {name: float(value) for name, value in values.items()}
                line |= {name: value for name, value in seen.items() if math.isfinite(value)}
                if config.target == "pixels":
                    del line["momentum"]  # of nothing
                line |= _norms(model) | clock.read(step, optim.batch_size) | _peak_memory(device)
                line |= health.measure(model) if health and examine else {}
                line |= {"random_init": untrained} if step == 1 and untrained else {}
                if world.first:
                    metrics.write(line)
                    show(line)
                if news := watch.see(line):
                    say(news)
                ticker.update(
                    step,
                    f"loss {line['loss']:.4f}  lr {now.lr:.1e}  target std {seen['target_std']:.3f}"
                    f"  {line['images_per_s']:.0f} img/s",
                )
            if save:
                saver.save(step, final=step in (total, stop_at) or number > 0)
            if number and step < total:
                world.gather(
                    None
                )  # who leaves before rank 0 has saved has it killed by the launcher
                raise InterruptedRunError(number, f"{path}: stopped and saved at step {step}")
            if step == stop_at:
                return
    if n_bad := len(bad_files.names):
        say(f"{bad_files.path}: {n_bad} of {len(images)} images were unreadable, and replaced")


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
        warn(f"{problem}; passed over")
    if newest is None:
        if damaged:
            raise CheckpointError(
                f"{path}: none of its {len(damaged)} checkpoints is intact; "
                f"remove them to start again from nothing, or choose another --out"
            )
        return 0
    about = checkpoint.state(newest)
    checkpoint.load(newest, model, optimizer)
    if world.first:  # a kill may have come between a save and its clearing up
        checkpoint.sweep(path)
        checkpoint.prune(newest, keep)
    if scaler and about["scaler"]:
        scaler.load_state_dict(about["scaler"])
    say(f"{path}: resumes at step {about['step']}")
    return about["step"]


def _out_of_memory(config: Config, ranks: int, error: Exception) -> ResourceError:
    size = config.optim.batch_size
    parts = ranks * len(shares(size, config.runtime.accumulate, world=ranks))
    more = [n for n in range(2 * parts, size + 1) if size % n == 0 and n % ranks == 0]
    return ResourceError(
        f"out of memory with {size // parts} images at a time: {str(error).splitlines()[0]}; try "
        f"{f'--runtime.accumulate {more[0]}' if more else '--runtime.recompute on'}"
    )


class _Clock:
    """Images per second since it was last read."""

    def __init__(self, step: int) -> None:
        self.step, self.time = step, time.monotonic()
        self.seconds = 0.0  # of an update, when it was last read

    def read(self, step: int, batch_size: int) -> dict[str, float]:
        now = time.monotonic()
        self.seconds = max(1e-9, now - self.time) / (step - self.step)
        self.step, self.time = step, now
        return {"images_per_s": batch_size / self.seconds}


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Of a GPU, so far: what tensors took at once, and what torch holds of it."""
    if device.type != "cuda":
        return {}
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return dict(zip(("memory_mib", "memory_held_mib"), (n / 2**20 for n in peaks), strict=True))


def _norms(model: MaskedImageModel) -> dict[str, float]:
    """Norms of A and m~, which the paper follows."""
    predictor = model.predictor
    return {
        "norm_A": float(whole(predictor.noise_layer.weight.detach()).norm()),
        "norm_mask_token": float(whole(predictor.positions.mask_token.detach()).norm()),
    }
