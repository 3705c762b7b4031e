"""One update: the loss, its gradients, AdamW, the target encoder.

`train_step` is the update as everybody writes it. `recordable_step` is the same with rates that are
tensors, for recorded.py to record; `updater` takes it where it can.

Shapes: B images of a part, M target blocks of K patches, T numbers to predict per patch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.config.schema import Config
from stopmim.gpu.cuda_graphs import Recorded
from stopmim.gpu.devices import choose_precision, compiled, compiles_itself
from stopmim.gpu.sharding import whole
from stopmim.method.model import Batch, MaskedImageModel
from stopmim.method.predictor import Noise, Predictor
from stopmim.train.distributed import ALONE, World, average_gradients
from stopmim.train.optimizer import Rates, set_rates, step_at

Part = tuple[Batch, Noise]
Undrawn = tuple[Batch, Callable[[], Noise]]  # a part whose noise is drawn when its turn comes

# ------------------------------------------------------------------------------ the loss


class Compared(NamedTuple):
    loss: Tensor
    target_std: Tensor  # spread of the targets over images and places: 0 is collapse
    predicted_std: Tensor


def compare(
    model: nn.Module,
    batch: Batch,
    noise: Noise,
    distance: Callable[[Tensor, Tensor], Tensor] = F.smooth_l1_loss,
) -> Compared:
    """The loss of one part of a batch; this is what gets compiled."""
    predicted, target, *low = model(batch, noise)  # both (M, B, K, T)
    loss = distance(predicted.float(), target.float())
    if low:  # the map at half the resolution counts as much
        loss = (loss + distance(low[0].float(), low[1].float())) / 2
    with torch.no_grad():
        spread = [x.float().flatten(0, 2).std(dim=0).mean() for x in (target, predicted)]
    return Compared(loss, *spread)


def compare_pixels(model: nn.Module, batch: Batch, noise: Noise) -> Compared:
    """The same for MAE: the squared error, of masked patches alone."""
    return compare(model, batch, noise, F.mse_loss)


def comparison(config: Config) -> Callable[[nn.Module, Batch, Noise], Compared]:
    """Which of the two a run is trained with."""
    return compare if config.target == "features" else compare_pixels


# ------------------------------------------------------------------------------ the update


def train_step(
    model: MaskedImageModel,
    parts: Iterator[Part],
    optimizer: torch.optim.Optimizer,
    *,
    n_parts: int = 1,
    momentum: float,
    amp: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip: float | None = None,
    penalty: tuple[float, float] = (0.0, 0.0),
    broken: Tensor | None = None,
    compare: Callable[[nn.Module, Batch, Noise], Compared] = compare,
    world: World = ALONE,
    spread: nn.Module | None = None,
) -> dict[str, Tensor]:
    """One update of encoder and predictor from all parts of a batch, then of the target encoder.

    Returns tensors, not floats: reading them waits for the device, and only the caller knows when
    that is worth it. `broken` is the caller's counter on the device: it counts the steps from the
    first loss or gradient that is not finite on, and while it is not 0 AdamW changes nothing.
    `spread` is what distributed.spread made of `model`: every rank of `world` has its own parts.
    `penalty` has the weights of `penalise`.
    """
    optimizer.zero_grad(set_to_none=True)
    sums: list[Tensor] = []
    for i, (batch, noise) in enumerate(parts, start=1):
        average_gradients(spread or model, i == n_parts)
        sums.append(differentiate(spread or model, batch, noise, compare, amp, scaler, n_parts))
    values = world.mean_(torch.stack(sums).sum(dim=0))
    if scaler:
        scaler.unscale_(optimizer)  # an overflow here is the scaler's to skip, not a failure
    found = judge(model, optimizer, values, clip, penalty, broken, scaled=scaler is not None)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    model.update_target(momentum)
    return found


def recordable_step(
    model: MaskedImageModel,
    part: Part,
    optimizer: torch.optim.Optimizer,
    now: Rates[Tensor],
    *,
    amp: torch.dtype | None = None,
    clip: float | None = None,
    penalty: tuple[float, float] = (0.0, 0.0),
    broken: Tensor,
    compare: Callable[[nn.Module, Batch, Noise], Compared] = compare,
) -> dict[str, Tensor]:
    """`train_step` of a batch in one part, where all that differs from step to step is a tensor.

    It leaves no gradients behind: nobody may find those of a recording in the memory of another.
    """
    try:
        values = differentiate(model, *part, compare, amp)
        found = judge(model, optimizer, values, clip, penalty, broken)
        step_at(optimizer, now, broken)
        model.update_target(now.momentum)
    finally:
        optimizer.zero_grad(set_to_none=True)
    return found


def differentiate(
    model: nn.Module,
    batch: Batch,
    noise: Noise,
    compare: Callable[[nn.Module, Batch, Noise], Compared],
    amp: torch.dtype | None,
    scaler: torch.amp.GradScaler | None = None,
    n_parts: int = 1,
) -> Tensor:
    """Adds the gradients of one of `n_parts` parts to those there are; its share of `Compared`."""
    with torch.autocast(batch.images.device.type, dtype=amp, enabled=amp is not None):
        compared = compare(model, batch, noise)
    loss = compared.loss / n_parts
    (scaler.scale(loss) if scaler else loss).backward()
    # A copy: a detached mean alone would keep the whole elementwise loss alive.
    return torch.stack([x.detach() for x in compared]) / n_parts


def judge(
    model: MaskedImageModel,
    optimizer: torch.optim.Optimizer,
    compared: Tensor,
    clip: float | None,
    penalty: tuple[float, float],
    broken: Tensor | None,
    *,
    scaled: bool = False,
) -> dict[str, Tensor]:
    """What comes between gradients and AdamW: penalty, norm, whether to go on at all, clipping.

    Returns what is known of the update, by name. `scaled`: that a gradient overflows is expected.
    """
    penalised = {"penalty": penalise(model.predictor, *penalty)} if any(penalty) else {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    grad_norm = whole(torch.nn.utils.get_total_norm(gradients))
    finite = compared[0].isfinite() & (True if scaled else grad_norm.isfinite())
    if broken is not None:
        broken += (broken > 0) | ~finite
        optimizer.found_inf = broken.clamp(max=1)  # type: ignore[attr-defined]  # 1: AdamW skips
    if clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, grad_norm)
    return dict(zip(Compared._fields, compared, strict=True)) | {"grad_norm": grad_norm} | penalised


@torch.no_grad()
def penalise(predictor: Predictor, l1: float, l2: float) -> Tensor:
    """Adds l1 * sum|A| + l2 * sum A^2 to what is minimised, by its gradient, and returns it.

    It depends on no image, so it comes once per update, after the parts, ranks and pieces (FSDP) of
    the batch are together. The logged loss is that of the predictions alone.
    """
    a = predictor.predictor_embed.weight
    assert a.grad is not None
    a.grad += l1 * a.sign() + 2 * l2 * a
    return whole(l1 * a.abs().sum() + l2 * a.square().sum())


# ------------------------------------------------------------------------------ which one


def updater(
    model: MaskedImageModel,
    optimizer: torch.optim.Optimizer,
    config: Config,
    device: torch.device,
    *,
    n_parts: int,
    broken: Tensor,
    scaler: torch.amp.GradScaler | None = None,
    world: World = ALONE,
    spread: nn.Module | None = None,
) -> Callable[[Iterator[Undrawn], Rates[float]], dict[str, Tensor]]:
    """What makes the updates of a run, from the parts of a batch and the rates of the step.

    Recorded if `runtime.compile` is left to us: one process on a GPU, one part, no scaler.
    """
    amp = choose_precision(config.runtime.precision, device)
    clip, penalty = config.optim.clip_grad, (config.optim.penalty_l1, config.optim.penalty_l2)
    compare = compiled(comparison(config), config, device)

    def plain(parts: Iterator[Undrawn], now: Rates[float]) -> dict[str, Tensor]:
        set_rates(optimizer, now)
        return train_step(
            model,
            ((batch, draw()) for batch, draw in parts),
            optimizer,
            n_parts=n_parts,
            momentum=now.momentum,
            amp=amp,
            scaler=scaler,
            clip=clip,
            penalty=penalty,
            broken=broken,
            compare=compare,
            world=world,
            spread=spread,
        )

    def recordable(*tensors: Tensor) -> dict[str, Tensor]:
        n = len(Batch._fields), len(Batch._fields) + len(Noise._fields)
        return recordable_step(
            model,
            (Batch(*tensors[: n[0]]), Noise(*tensors[n[0] : n[1]])),
            optimizer,
            Rates(*tensors[n[1] :]),
            amp=amp,
            clip=clip,
            penalty=penalty,
            broken=broken,
            compare=compare,
        )

    alone = world.store is None and n_parts == 1 and scaler is None
    if not (alone and compiles_itself(config, device)):
        return plain
    return Played(Recorded(recordable, device))


@dataclass(frozen=True)
class Played:
    """Updates of batches in one part, each a recording."""

    recorded: Recorded

    def __call__(self, parts: Iterator[Undrawn], now: Rates[float]) -> dict[str, Tensor]:
        with self.recorded.aside():
            ((batch, draw),) = parts
        # Not aside: it is few kernels that take a whole GPU, and would be in the way of the others.
        return self.recorded(*batch, *draw(), *now)
