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
from stopmim.gpu.devices import choose_precision, compiled, compiles_itself
from stopmim.gpu.sharding import whole
from stopmim.method.build import build_sampler
from stopmim.method.loss import Loss, masked_loss
from stopmim.method.model import Batch, MaskedImageModel, Target
from stopmim.method.predictor import Noise
from stopmim.train.distributed import ALONE, World, average_gradients
from stopmim.train.guard import Guard, build_guard
from stopmim.train.optimizer import advance, one_pass, set_rates
from stopmim.train.rates import Rates

if TYPE_CHECKING:
    from stopmim.gpu.kernels.adamw import OnePass  # needs triton

Part = tuple[Batch, Noise]
LossFunction = Callable[[nn.Module, Target, Batch, Noise], Loss]


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
        at_once: AdamW and the target encoder in one pass; None is the usual way.
    """

    model: MaskedImageModel
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    loss: LossFunction = masked_loss
    wrapped: nn.Module | None = None
    n_parts: int = 1
    amp: torch.dtype | None = None
    world: World = ALONE
    at_once: "OnePass | None" = None

    # Counts the steps from the first loss or gradient that is not finite on. It stays on the
    # device, because reading it waits; while it is not 0, AdamW changes nothing.
    broken: Tensor = field(init=False)
    scaler: torch.amp.GradScaler | None = field(init=False, default=None)
    guard: Guard | None = field(init=False, default=None)
    settled: bool = field(init=False, default=True)  # no weight has changed since the loop set it

    def __post_init__(self) -> None:
        device = self.model.encoder.pos_embed.device
        self.broken = torch.zeros((), device=device)
        if self.amp == torch.float16:
            self.scaler = torch.amp.GradScaler(device.type)
        self.guard = build_guard(self.optim, device)

    def __call__(
        self, parts: Iterable[Part], rates: Rates[float] | Rates[Tensor]
    ) -> dict[str, Tensor]:
        """Makes one update; returns tensors by name, since reading them waits for the device."""
        model, called = self.model, self.wrapped or self.model
        self.optimizer.zero_grad(set_to_none=True)
        sums: list[Tensor] = []  # of every part: loss and its two spreads, (3,)
        for i, (batch, noise) in enumerate(parts, start=1):
            average_gradients(called, i == self.n_parts)  # over ranks: with the last part only
            with torch.autocast(batch.images.device.type, self.amp, enabled=self.amp is not None):
                found = self.loss(called, model.target, batch, noise)
            loss = found.loss / self.n_parts  # parts are equally large, so means add up
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            # A copy: a detached mean alone would keep the whole elementwise loss alive.
            sums.append(torch.stack([x.detach() for x in found]) / self.n_parts)
        means = self.world.mean_(torch.stack(sums).sum(dim=0) if len(sums) > 1 else sums[0])
        self.settled = False
        if self.scaler:  # gradients must have their true size before they are clipped
            self.scaler.unscale_(self.optimizer)
        values = dict(zip(Loss._fields, means, strict=True)) | self._gradients(means[0])
        skip: Tensor = self.optimizer.found_inf  # type: ignore[attr-defined]
        if self.scaler:
            assert not isinstance(rates.lr, Tensor)  # updates with a scaler are never recorded
            set_rates(self.optimizer, rates)
            # The scaler replaces `found_inf` by its own; reading ours waits for the device.
            if self.guard is None or not skip:
                self.scaler.step(self.optimizer)
            self.scaler.update()
            model.update_target(rates.momentum)  # after the encoder, as I-JEPA
        else:
            advance(model, self.optimizer, rates, skip, self.at_once)
        if isinstance(rates.lr, Tensor):  # recorded: gradients would occupy the shared memory
            self.optimizer.zero_grad(set_to_none=True)
        return values

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Prepares gradients for AdamW: penalty, norm, whether to update at all, clipping."""
        optim, said = self.optim, dict[str, Tensor]()
        if optim.penalty_l1 or optim.penalty_l2:
            said["penalty"] = self._penalty(optim.penalty_l1, optim.penalty_l2)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))  # over all ranks, before clipping
        # A gradient that overflows under loss scaling is the scaler's to skip, not a failure.
        finite = loss.isfinite() & (True if self.scaler else norm.isfinite())
        failed, skip = ~finite, torch.zeros_like(finite)
        if self.guard:
            skip, failed = self.guard.judge(loss, norm, finite)
            said["skipped"] = self.guard.skipped
        self.broken += (self.broken > 0) | failed
        skip = (self.broken > 0) | skip
        self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]  # 1: no update
        if optim.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(parameters, optim.clip_grad, norm)
        return {"grad_norm": norm} | said

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
) -> Step | CudaGraphs:
    """The step of a run: recorded as CUDA graphs where possible, compiled or plain elsewhere.

    Recorded if `runtime.compile` is auto: one process on one GPU, one part, no loss scaling.
    """
    amp = choose_precision(config.runtime.precision, device)
    automatic = compiles_itself(config.runtime.compile, device, build_sampler(config).static)
    # Forward and loss are compiled together; autograd compiles the backward pass with them.
    loss = compiled(masked_loss) if automatic or config.runtime.compile == "on" else masked_loss
    at_once = None
    if config.runtime.kernels == "fused":
        runtime, width = config.runtime, model.encoder.width
        sharded = world.store is not None and runtime.parallel == "fsdp"
        warn_unless_fused(device, amp, width, runtime.recompute == "on", sharded)
        at_once = one_pass(model, optimizer, amp)
    step = Step(model, optimizer, config.optim, loss, wrapped, n_parts, amp, world, at_once)
    alone = world.store is None and n_parts == 1 and step.scaler is None
    if alone and automatic:
        return CudaGraphs(step, device)
    return step
