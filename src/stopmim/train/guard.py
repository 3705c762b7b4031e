"""Skips updates that would do harm: not finite, or far above what is usual.

The decision is made on the device, where reading a number would wait, from values that are the same
on every rank. What it rests on is part of the checkpoint, so that a resumed run skips the same
updates.
"""

import torch
from torch import Tensor

from stopmim.config.schema import OptimConfig

MOST = 10  # skipped updates in a row, after which the run ends
USUAL = 50  # updates that the running means look back on, and that are made before one can spike


class Guard:
    """Running means of loss and gradient norm, and how many updates were skipped.

    `state` is (mean of the loss, mean of the norm, updates made, skipped in a row, skipped).
    """

    def __init__(self, optim: OptimConfig, device: torch.device) -> None:
        self.skips_nonfinite, self.factor = optim.on_nonfinite == "skip", optim.spike
        self.state = torch.zeros(5, dtype=torch.float64, device=device)

    @property
    def skipped(self) -> Tensor:
        return self.state[4].float()

    def judge(self, loss: Tensor, norm: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Whether to skip the update, and whether to end the run; counts it.

        `finite` may hold for an infinite norm, where loss scaling skips the update by itself.
        """
        means, (made, in_a_row, skipped) = self.state[:2], self.state[2:]
        seen = torch.stack([loss, norm]).double()
        spike = torch.zeros_like(finite)
        if self.factor is not None:
            spike = (made >= USUAL) & (seen > self.factor * means).any() & seen.isfinite().all()
        skip = ~finite | spike
        weight = 1 / (made + 1).clamp(max=USUAL)  # the first ones count alike
        is_made = ~skip & seen.isfinite().all()
        moved = torch.where(is_made, means + weight * (seen - means), means)
        in_a_row = torch.where(skip, in_a_row + 1, 0)
        self.state.copy_(
            torch.stack([*moved, made + is_made.double(), in_a_row, skipped + skip.double()])
        )
        over = in_a_row > MOST
        return skip, over if self.skips_nonfinite else over | ~finite


def build_guard(optim: OptimConfig, device: torch.device) -> Guard | None:
    """The guard that `optim` asks for, if any."""
    is_asked_for = optim.on_nonfinite == "skip" or optim.spike is not None
    return Guard(optim, device) if is_asked_for else None
