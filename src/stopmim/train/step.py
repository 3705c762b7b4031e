"""One update: the loss, its gradients, AdamW, the target encoder.

Shapes: B images of a part, M target blocks of K patches, T numbers to predict per patch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stopmim.config.schema import Config, OptimConfig
from stopmim.gpu.blocks import warn_unless_fused
from stopmim.gpu.cuda_graphs import CudaGraphs
from stopmim.gpu.devices import choose_precision, compiled
from stopmim.gpu.sharding import whole
from stopmim.method.build import build_sampler
from stopmim.method.loss import Loss, masked_loss
from stopmim.method.model import Batch, MaskedImageModel, Target
from stopmim.method.predictor import Noise
from stopmim.train.distributed import ALONE, World, average_gradients
from stopmim.train.guard import Guard
from stopmim.train.optimizer import advance, one_pass, set_rates
from stopmim.train.rates import Rates

if TYPE_CHECKING:
    from stopmim.gpu.kernels.adamw import OnePass  # needs triton

ALIGNED = 32  # floats: a gradient begins where vectors of any kernel can

Part = tuple[Batch, Noise]
LossFunction = Callable[[nn.Module, Target, Batch, Noise], Loss]
Work = Callable[[Part | None, Rates | None], dict[str, Tensor]]


@dataclass
class Step:
    """Updates encoder and predictor from all parts of a batch, then the target encoder.

    Args:
        optim: clipping and penalties; the rates come with every call.
        loss: `masked_loss`, or the same compiled.
        wrapped: `model` inside DistributedDataParallel, or sharded; called in its place.
        n_parts: parts of a batch on this rank, whose gradients are added up.
        amp: dtype of autocast; float16 scales the loss.
        world: the ranks that train together, each with parts of its own.
        one_pass: AdamW and the target encoder in one pass; None is the usual way.
    """

    model: MaskedImageModel
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    loss: LossFunction = masked_loss
    wrapped: nn.Module | None = None
    n_parts: int = 1
    amp: torch.dtype | None = None
    world: World = ALONE
    one_pass: "OnePass | None" = None

    # Counts the steps from the first loss or gradient that is not finite on. It stays on the
    # device, because reading it waits; while it is not 0, AdamW changes nothing.
    broken: Tensor = field(init=False)
    # Added up over parts and averaged over ranks: loss and its two spreads, (3,). Before them come
    # the gradients if these stay in place.
    sums: Tensor = field(init=False)
    in_place: bool = field(init=False, default=False)
    scaler: torch.amp.GradScaler | None = field(init=False, default=None)
    guard: Guard | None = field(init=False, default=None)
    settled: bool = field(init=False, default=True)  # no weight has changed since the loop set it

    def __post_init__(self) -> None:
        device = self.model.encoder.pos_embed.device
        self.broken, self.sums = torch.zeros((), device=device), torch.zeros(3, device=device)
        if self.amp == torch.float16:
            self.scaler = torch.amp.GradScaler(device.type)
        if self.optim.on_nonfinite == "skip" or self.optim.spike is not None:
            self.guard = Guard(self.optim, device)

    @property
    def at_once(self) -> bool:
        """Whether an update follows its gradients at once: no other part or rank adds to them."""
        return self.n_parts == 1 and self.world.store is None

    def __call__(
        self, parts: Iterable[Part], rates: Rates, work: Work | None = None
    ) -> dict[str, Tensor]:
        """Makes one update; returns tensors by name, since reading them waits for the device.

        `work` replaces the method of that name by a recording of it, as from `recorded`.
        """
        work = work or self.work
        self.sums.zero_()
        if not self.in_place:
            self.optimizer.zero_grad(set_to_none=True)
        if self.at_once:
            (part,) = parts
            return work(part, rates)
        for i, part in enumerate(parts, start=1):
            # A wrapper averages over ranks, and needs to with the last part only.
            average_gradients(self.wrapped or self.model, i == self.n_parts)
            work(part, None)
        self.world.mean_(self.sums)  # never recorded: ranks may differ in what they can record
        return work(None, rates)

    def work(self, part: Part | None, rates: Rates | None) -> dict[str, Tensor]:
        """Adds up gradients and losses of `part`, if given, then updates, if there are `rates`."""
        if part is not None:
            batch, noise = part
            device, called = batch.images.device.type, self.wrapped or self.model
            with torch.autocast(device, self.amp, enabled=self.amp is not None):
                found = self.loss(called, self.model.target, batch, noise)
            loss = found.loss / self.n_parts  # parts are equally large, so means add up
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            self.sums[-3:] += torch.stack([x.detach() for x in found]) / self.n_parts
        return self._update(rates) if rates is not None else {}

    def _update(self, rates: Rates) -> dict[str, Tensor]:
        model, means = self.model, self.sums[-3:].clone()  # the next update overwrites them
        self.settled = False
        if self.scaler:  # gradients must have their true size before they are clipped
            self.scaler.unscale_(self.optimizer)
        values = dict(zip(Loss._fields, means, strict=True)) | self._gradients(means[0])
        skip: Tensor = self.optimizer.found_inf  # type: ignore[attr-defined]
        if self.scaler:
            set_rates(self.optimizer, rates)
            # The scaler replaces `found_inf` by its own; reading ours waits for the device.
            if self.guard is None or not skip:
                self.scaler.step(self.optimizer)
            self.scaler.update()
            model.update_target(rates.momentum)  # after the encoder, as I-JEPA
        else:
            advance(model, self.optimizer, rates, skip, self.one_pass)
        if isinstance(rates.lr, Tensor) and not self.in_place:
            # Recorded: gradients would occupy the shared memory.
            self.optimizer.zero_grad(set_to_none=True)
        return values

    def keep_gradients(self) -> None:
        """Makes gradients views of `sums`, so that they stay in place and are averaged at once."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in parameters]
        self.sums = self.sums.new_zeros(sum(sizes) + 3)
        for p, place in zip(parameters, self.sums[:-3].split(sizes), strict=True):
            p.grad = place[: p.numel()].view_as(p)
        self.in_place = True

    def cut(self, n_parts: int) -> None:
        """Continues with more parts, after one that has failed."""
        self.optimizer.zero_grad(set_to_none=True)
        self.n_parts, self.in_place, self.sums = n_parts, False, self.sums.new_zeros(3)

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Prepares gradients for AdamW: penalty, norm, whether to update at all, clipping."""
        optim, values = self.optim, dict[str, Tensor]()
        if optim.penalty_l1 or optim.penalty_l2:
            values["penalty"] = self._penalty(optim.penalty_l1, optim.penalty_l2)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))  # over all ranks, before clipping
        # A gradient that overflows under loss scaling is the scaler's to skip, not a failure.
        finite = loss.isfinite() & (True if self.scaler else norm.isfinite())
        failed, skip = ~finite, torch.zeros_like(finite)
        if self.guard:
            skip, failed = self.guard.judge(loss, norm, finite)
            values["skipped"] = self.guard.skipped
        self.broken += (self.broken > 0) | failed
        skip = (self.broken > 0) | skip
        self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # 1: no update
        if optim.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(parameters, optim.clip_grad, norm)
        return {"grad_norm": norm} | values

    @torch.no_grad()
    def _penalty(self, l1: float, l2: float) -> Tensor:
        """Adds the gradient of l1 * sum|A| + l2 * sum A^2, and returns that penalty.

        It depends on no image, so it is added once per update, after parts, ranks and shards have
        been summed. The logged loss is that of the predictions only.
        """
        a = self.model.predictor.predictor_embed.weight  # A, (P, D)
        assert a.grad is not None
        a.grad += l1 * a.sign() + 2 * l2 * a
        return whole(l1 * a.abs().sum() + l2 * a.square().sum())


def build_step(
    model: MaskedImageModel,
    optimizer: torch.optim.Optimizer,
    config: Config,
    device: torch.device,
    *,
    n_parts: int = 1,
    world: World = ALONE,
    wrapped: nn.Module | None = None,
) -> Step:
    """The step of a run, compiled where that is possible; `recorded` makes recordings of it."""
    amp = choose_precision(config.runtime.precision, device)
    # Forward and loss are compiled together; autograd compiles the backward pass with them.
    compiles = _automatic(config, device) or config.runtime.compile == "on"
    loss = compiled(masked_loss) if compiles else masked_loss
    fused_pass = None
    if config.runtime.kernels == "fused":
        runtime, width = config.runtime, model.encoder.width
        sharded = world.store is not None and runtime.parallel == "fsdp"
        warn_unless_fused(device, amp, width, runtime.recompute == "on", sharded)
        fused_pass = one_pass(model, optimizer, amp)
    return Step(model, optimizer, config.optim, loss, wrapped, n_parts, amp, world, fused_pass)


def is_recorded(config: Config, device: torch.device, world: World = ALONE) -> bool:
    """Whether updates run as CUDA graphs: `runtime.compile` is auto, no shards, no loss scaling."""
    sharded = world.store is not None and config.runtime.parallel == "fsdp"
    scaled = choose_precision(config.runtime.precision, device) == torch.float16
    return _automatic(config, device) and not sharded and not scaled


def _automatic(config: Config, device: torch.device) -> bool:
    """Whether `runtime.compile` is auto and resolves to on.

    It does so only on a GPU, since a CPU machine may have no compiler, and only for masks of static
    shapes: those of the released sampler change at every step.
    """
    is_auto = config.runtime.compile == "auto" and device.type == "cuda"
    return is_auto and build_sampler(config).static


def recorded(step: Step, device: torch.device) -> CudaGraphs:
    """`step.work` as CUDA graphs: of a whole update, or of a part and of what follows all parts."""
    if not step.at_once:
        step.keep_gradients()
    return CudaGraphs(step.work, device)
