"""Learning rate, weight decay and EMA momentum of an update, as functions of its number."""

from typing import NamedTuple

from torch import Tensor

from stopmim.base import schedules
from stopmim.config.schema import OptimConfig


class Rates(NamedTuple):
    """Numbers, or tensors on the device for a CUDA graph."""

    lr: float | Tensor
    weight_decay: float | Tensor
    momentum: float | Tensor  # of the target encoder


def rates(config: OptimConfig, step: int, steps_per_epoch: int) -> Rates:
    """Rates of update number `step` (from 0); base/schedules.py explains the off-by-one."""
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
