"""AdamW over the published four groups, and the values its schedules give at a step."""

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from stopmim.base import schedules
from stopmim.config.schema import OptimConfig
from stopmim.method.model import MaskedImageModel

T = TypeVar("T", float, Tensor)


def adamw(model: MaskedImageModel, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW in four groups: matrices of encoder and predictor, then their biases and 1-D weights.

    Only the first two decay. `mask_token` has three dimensions and so decays, as published.
    """
    groups = [
        {"params": [p for name, p in part.named_parameters() if p.requires_grad and rule(name, p)]}
        | ({} if decays else {"weight_decay": 0.0})
        | {"decays": decays}
        for decays, rule in ((True, _decays), (False, lambda n, p: not _decays(n, p)))
        for part in (model.encoder, model.predictor)
    ]
    # Fused: one kernel per group, and it can skip an update on the device (see train_step).
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim > 1 and "bias" not in name


class Rates(NamedTuple, Generic[T]):
    lr: T
    weight_decay: T
    momentum: T


def rates(config: OptimConfig, step: int, steps_per_epoch: int) -> Rates[float]:
    """What update number `step` (from 0) uses; see schedules.py for the off-by-one."""
    total = config.epochs * steps_per_epoch
    at = step + 1
    if config.freeze_epoch is not None:
        at = min(at, config.freeze_epoch * steps_per_epoch)
    return Rates(
        lr=schedules.warmup_cosine(
            at,
            total=total,
            warmup=int(config.warmup_epochs * steps_per_epoch),
            start=config.start_lr,
            peak=config.lr,
            final=config.final_lr,
        ),
        weight_decay=schedules.cosine(
            at, total=total, start=config.weight_decay[0], final=config.weight_decay[1]
        ),
        momentum=schedules.linear(step, total=total, start=config.ema[0], final=config.ema[1]),
    )


def set_rates(optimizer: torch.optim.Optimizer, now: Rates[float]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = now.lr
        group["weight_decay"] = now.weight_decay if group["decays"] else 0.0


@torch.no_grad()
def step_at(optimizer: torch.optim.Optimizer, now: Rates[Tensor], broken: Tensor) -> None:
    """`set_rates` and AdamW's step, at rates that are on the device, where a CUDA graph reads them.

    AdamW takes its decay as a number alone, which a graph would keep for ever, so it is done here,
    as AdamW does it: before the step, of parameters that have a gradient, not while `broken`.
    """
    decaying: list[Tensor] = []
    lr = now.lr.float()  # what the fused kernel reads
    for group in optimizer.param_groups:
        group |= {"lr": lr, "weight_decay": 0.0, "capturable": True}
        decaying += [p for p in group["params"] if group["decays"] and p.grad is not None]
    kept = 1.0 - now.lr * now.weight_decay * (broken == 0)
    torch._foreach_mul_(decaying, kept.float())
    optimizer.step()
