"""A run that is ready for its next update: built from its config, and resumed if it was begun."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stopmim.base.console import busy, say, warn
from stopmim.base.errors import CheckpointError
from stopmim.config.schema import Config, override
from stopmim.data.loading import Reader, loader, steps_per_epoch
from stopmim.data.order import shares
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.health.doctor import Watch
from stopmim.health.measure import Health, due_every, norms
from stopmim.method.build import build
from stopmim.runs import checkpoint, shards
from stopmim.runs.logs import BadFiles, Metrics
from stopmim.runs.run import Run, begin, set_threads
from stopmim.runs.saver import Saver
from stopmim.train.distributed import World, agree, parallelise
from stopmim.train.draws import Draws
from stopmim.train.guard import check_scaler
from stopmim.train.optimizer import adamw
from stopmim.train.rates import Rates
from stopmim.train.step import Step, build_step, is_recorded, recorded
from stopmim.weights.load import apply_init


class Training:
    """A run that is ready for its next update: model, update, and what is due when."""

    def __init__(
        self, reader: Reader, source: str, path: Path, config: Config, world: World
    ) -> None:
        """Builds the model and its update, writes run.json, and loads the newest checkpoint."""
        runtime, images = config.runtime, reader.images
        self.path, self.config, self.reader, self.world = path, config, reader, world
        agree(world, config, images.fingerprint)
        self.device = device = choose_device(runtime.device, world.local_rank)
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
                amp = choose_precision(runtime.precision, device)
                self.health = Health(images, config, device, amp, reader)
            self.untrained = self.health.measure(model) if self.health and fresh else None
        # DDP, FSDP2, or the step itself where that is recorded; `model` if alone.
        self.is_recorded = is_recorded(config, device, world)
        wrapped = parallelise(model, world, "step" if self.is_recorded else runtime.parallel)
        optimizer = adamw(model, config.optim)
        # This rank's images as slices of the global batch, one slice per gradient accumulation.
        self.parts = self._parts()
        self.update = step = build_step(
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
        self.halved: dict[str, int] = {}  # parts of a batch since memory ran out, for the log
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
        return Draws(model, config, batches, self.parts, bad_files, beside)

    def line(self, step: int, values: Mapping[str, Tensor], now: Rates) -> dict[str, Any]:
        """Facts about update `step` for the log: its rates, the `values` it returned, and norms."""
        line: dict[str, Any] = {"step": step, "epoch": step / self.per_epoch} | now._asdict()
        if not self.model.target.follows:
            del line["momentum"]
        # JSON has neither NaN nor infinity; gradients scaled for fp16 overflow at times.
        seen = {name: float(value) for name, value in values.items()}
        line |= {name: value for name, value in seen.items() if math.isfinite(value)}
        if (skipped := int(seen.get("skipped", 0))) > self.skipped:
            self.skipped = skipped
            warn(f"{self.path}: {skipped} updates skipped up to step {step}")
        return line | self.halved | norms(self.model)

    def cut(self, parts: int) -> None:
        """Continues with more parts of a batch: the same samples, masks and noise."""
        self.config = override(self.config, {"runtime.accumulate": parts})
        self.halved = {"accumulate": parts}
        self.parts = self._parts()
        self.graphs = None  # of the larger parts
        self.update.cut(len(self.parts))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.graphs = recorded(self.update, self.device) if self.is_recorded else None

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
