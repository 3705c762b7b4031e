"""AdamW over the published four groups, stepped at the rates of an update."""

import torch
from torch import Tensor, nn

from stopmim.config.schema import OptimConfig
from stopmim.method.model import MaskedImageModel
from stopmim.train.rates import Rates


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


@torch.no_grad()
def step_at(
    optimizer: torch.optim.Optimizer, rates: Rates[float] | Rates[Tensor], skip: Tensor
) -> None:
    """One step of `optimizer` at `rates`: numbers, or tensors on the device for a CUDA graph.

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


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates[float]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rates.lr
        group["weight_decay"] = rates.weight_decay if group["decays"] else 0.0
