"""Skips updates that would do harm: not finite, or far above the usual.

The decision is made on the device, since reading a number would wait for it, and from values that
are the same on every rank. Its state is part of the checkpoint, so that a resumed run skips the
same updates.
"""

import reprlib
import sys
from typing import Any

import torch
from torch import Tensor

from stopmim.base.errors import CheckpointError
from stopmim.config.schema import OptimConfig
from stopmim.runs.shards import ADVICE

MOST = 10  # skipped updates in a row, after which the run ends
USUAL = 50  # updates that running means look back on; before that many, nothing counts as a spike


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
        """Counts the update; returns whether to skip it, and whether to end the run.

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

    def load(self, about: dict[str, Any], source: str) -> None:
        """Loads the state from state.json; one of an old version has none, and it starts afresh.

        Raises:
            CheckpointError: the state is not one that a guard can have.
        """
        found = about.get("guard", [0.0] * 5)
        most = sys.float_info.max  # NaN, Infinity and integers of any length are JSON for Python
        if not (
            isinstance(found, list)
            and len(found) == 5
            and all(type(x) in (int, float) and -most <= x <= most for x in found)
            and all(0 <= count <= about["step"] for count in found[2:])
        ):
            raise CheckpointError(
                f"{source}: guard is {reprlib.repr(found)[:80]}, expected the means of loss and "
                f"gradient norm and three counts; {ADVICE}"
            )
        self.state.copy_(torch.tensor(found, dtype=torch.float64))


def check_scaler(found: object, scaler: torch.amp.GradScaler, source: str) -> None:
    """Raises CheckpointError unless `found`, of state.json, is what `scaler` can take."""
    most, keys = sys.float_info.max, scaler.state_dict().keys()
    if not (
        isinstance(found, dict)
        and found.keys() == keys
        and all(type(x) in (int, float) and 0 <= x <= most for x in found.values())
    ):
        what = f"scaler is {reprlib.repr(found)[:80]}, expected numbers for {', '.join(keys)}"
        raise CheckpointError(f"{source}: {what}; {ADVICE}")
