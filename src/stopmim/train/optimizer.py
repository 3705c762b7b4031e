"""AdamW over the published four groups, stepped at the rates of an update; the target follows."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stopmim.config.schema import OptimConfig
from stopmim.gpu.attention import HAVE_TRITON
from stopmim.gpu.sharding import is_sharded
from stopmim.method.model import MaskedImageModel
from stopmim.train.rates import Rates

if TYPE_CHECKING:
    from stopmim.gpu.kernels.adamw import OnePass  # needs triton


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
    # Fused: one kernel per group, and it can skip an update on the device (`found_inf`).
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim > 1 and "bias" not in name


def one_pass(
    model: MaskedImageModel, optimizer: torch.optim.Optimizer, amp: torch.dtype | None
) -> "OnePass | None":
    """The work of `advance` in one pass over memory; None where only separate kernels work."""
    weights = list(model.parameters())
    fits = amp == torch.bfloat16 and all(p.is_cuda and not is_sharded(p) for p in weights)
    if not (HAVE_TRITON and fits):
        return None
    from stopmim.gpu.kernels.adamw import OnePass

    target = model.target_encoder
    pairs = zip(model.encoder.parameters(), target.parameters(), strict=True) if target else ()
    return OnePass(optimizer, dict(pairs))


def advance(
    model: MaskedImageModel,
    optimizer: torch.optim.Optimizer,
    rates: Rates,
    skip: Tensor,
    one_pass: "OnePass | None" = None,
) -> None:
    """Updates weights with AdamW unless told to `skip`, then the target encoder, as I-JEPA does.

    `one_pass` changes the same tensors by the same numbers, up to rounding.
    """
    if one_pass is None or not one_pass(*rates, skip):
        step_at(optimizer, rates, skip)
        model.update_target(rates.momentum)


@torch.no_grad()
def step_at(optimizer: torch.optim.Optimizer, rates: Rates, skip: Tensor) -> None:
    """One step of `optimizer` at `rates`.

    AdamW takes its weight decay as a number only, which a graph would freeze. So with tensors the
    decay is applied here, exactly as AdamW does it: before the step, to parameters that have a
    gradient, and not if AdamW is to `skip` it.
    """
    if isinstance(rates.lr, Tensor):
        decaying: list[Tensor] = []
        lr = rates.lr.float()  # what the fused kernel reads
        for group in optimizer.param_groups:
            group |= {"lr": lr, "weight_decay": 0.0, "capturable": True}
            decaying += [p for p in group["params"] if group["decays"] and p.grad is not None]
        kept = 1.0 - rates.lr * rates.weight_decay * (skip == 0)
        torch._foreach_mul_(decaying, kept.float())
    else:
        set_rates(optimizer, rates)
    optimizer.step()


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rates.lr
        group["weight_decay"] = rates.weight_decay if group["decays"] else 0.0
