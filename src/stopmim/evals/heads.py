"""Many linear classifiers trained at once on frozen features, as if each were trained alone.

Heads do not interact: their losses are summed, and each has its own learning rate and weight decay.
Heads with the same input (last block or last four, with or without batch norm) share one matrix.

Shapes: H heads of one input, K classes, D features, B samples.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.console import Ticker
from stopmim.base.random_keys import torch_generator
from stopmim.evals.features import Device
from stopmim.evals.recipes import Norm, Recipe
from stopmim.gpu.cuda_graphs import CudaGraphs

TRUST = 0.001  # eta of LARS
EPS = {"bn": 1e-5, "fixed bn": 1e-6}  # VISSL's default; MAE's
CHUNK = 2**25  # logits in memory at a time when testing


class Split(NamedTuple):
    """Features and labels to fit on and to test on; the last n * `width` columns are n blocks."""

    train: Sequence[Tensor]  # (N, L * D) each; epoch e uses view e modulo their number
    y: Tensor  # (N,)
    test: Tensor  # (n, L * D)
    test_y: Tensor  # (n,)
    width: int  # D


@dataclass(frozen=True)
class Head:
    layers: int  # number of last blocks it sees
    norm: Norm
    lr: float  # factor of the recipe's rate
    weight_decay: float

    def __str__(self) -> str:
        """The setting; layers are part of the protocol's name."""
        norm = "no bn" if self.norm == "none" else self.norm
        return f"{norm}, lr x{self.lr:g}, wd {self.weight_decay:g}"


def grid(recipe: Recipe, layers: Sequence[int]) -> list[Head]:
    """All heads of `recipe` for features of the last `layers` blocks."""
    settings = product(recipe.lr_factors, recipe.weight_decays, layers, recipe.norms)
    return [Head(n, norm, lr, decay) for lr, decay, n, norm in settings]


class Tested(NamedTuple):
    """Test results of trained heads."""

    correct: Tensor  # (epochs, heads) int64, correct test samples after an epoch; 0: not tested
    predicted: Tensor  # (heads, n) int64, after the last epoch


def train_heads(
    heads: Sequence[Head],
    recipe: Recipe,
    split: Split,
    *,
    seed: int = 0,
    device: Device = "cpu",
    every_epoch: bool = True,
    tf32: bool = True,
) -> Tested:
    """Trains `heads` by `recipe` and tests them, after every epoch or after the last only.

    The order of samples depends on (seed, epoch) and the initial weights on seed and input, so that
    a head does not depend on the others, up to rounding. Products on a GPU are in TF32, which is as
    precise as half-precision features; `stopmim bench probe` compares it with float32.
    """
    device = torch.device(device)
    y, test_y, test = split.y.to(device), split.test_y.to(device), _near(split.test, device)
    if len(y.unique()) < 2:
        raise ValueError(f"all {len(y)} labels are {int(y[0])}: there is nothing to separate")
    views = [_near(x, device) for x in split.train]
    classes = int(torch.cat([y, test_y]).max()) + 1
    key = lambda head: (head.layers, head.norm)  # noqa: E731
    alike = groupby(sorted(heads, key=key), key)
    groups = [_Group([*own], recipe, split.width, classes, seed, device) for _, own in alike]
    place = {head: i for i, head in enumerate(heads)}

    def update(x: Tensor, y: Tensor, rate: Tensor | float) -> dict[str, Tensor]:
        # All gradients come before any update, in case memory runs out.
        found = [group.gradients(x, y) for group in groups]
        for group, (_, gradients) in zip(groups, found, strict=True):
            group.update(gradients, rate)
        return {"loss": torch.stack([loss for loss, _ in found]).sum()}

    # A step is hundreds of tiny kernels on a GPU: a CUDA graph saves their launches.
    step = CudaGraphs(update, device) if device.type == "cuda" else update
    correct = torch.zeros(recipe.epochs, len(heads), dtype=torch.long)
    predicted = torch.zeros(len(heads), len(test_y), dtype=torch.long)
    with Ticker(f"{len(heads)} heads", recipe.epochs) as ticker, ExitStack() as restored:
        restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if tf32 and device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        for epoch in range(recipe.epochs):
            x = views[epoch % len(views)]
            order = torch.randperm(len(y), generator=torch_generator("heads", seed, epoch))
            labels = y[order.to(device)].split(recipe.batch_size)
            # Batch norm needs two samples; a last one alone is dropped from this epoch.
            parts = [p for p in order.to(x.device).split(recipe.batch_size) if len(p) > 1]
            for i, part in enumerate(parts):
                step(x[part].to(device).float(), labels[i], recipe.rate(epoch + i / len(parts)))
            ticker.update(epoch + 1, f"{recipe.batch_size} samples at a time")
            if not every_epoch and epoch + 1 < recipe.epochs:
                continue
            for group in groups:
                found = group.predict(test)  # (H, n)
                rows = [place[head] for head in group.heads]
                predicted[rows] = found.cpu()
                correct[epoch, rows] = (found == test_y).sum(dim=1).cpu()
    return Tested(correct, predicted)


class _Group:
    """Heads with the same input, and their optimizer state."""

    def __init__(
        self, heads: list[Head], recipe: Recipe, width: int, classes: int, seed: int, device: Device
    ) -> None:
        self.heads, self.recipe = heads, recipe
        layers, self.norm = heads[0].layers, heads[0].norm
        self.d = d = layers * width
        generator = torch_generator("head", seed, layers, self.norm)
        first = {"weight": torch.zeros(classes, d), "bias": torch.zeros(classes)}
        if recipe.init_std is None:  # as nn.Linear
            for start in first.values():
                start.copy_(torch.rand(start.shape, generator=generator).mul(2).sub(1).div(d**0.5))
        else:
            first["weight"] = torch.randn(classes, d, generator=generator).mul(recipe.init_std)
        if self.norm == "bn":
            first |= {"scale": torch.ones(d), "shift": torch.zeros(d)}
        self.params = {
            name: start.expand(len(heads), *start.shape).clone().to(device).requires_grad_()
            for name, start in first.items()
        }
        self.momentum = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.mean, self.var = torch.zeros(d, device=device), torch.ones(d, device=device)
        self.lr = torch.tensor([head.lr for head in heads], device=device)
        self.decay = torch.tensor([head.weight_decay for head in heads], device=device)

    def logits(self, x: Tensor, *, training: bool) -> Tensor:
        """(B, H, K) for features (B, L * D)."""
        weight, bias = self.params["weight"], self.params["bias"]
        x = x[:, -self.d :]
        if self.norm != "none":
            x = F.batch_norm(x, self.mean, self.var, training=training, eps=EPS[self.norm])
        if self.norm == "bn":  # W (scale * x + shift) + b, without a copy of x for each head
            bias = bias + torch.einsum("hkd,hd->hk", weight, self.params["shift"])
            weight = weight * self.params["scale"][:, None]
        return F.linear(x, weight.flatten(0, 1), bias.flatten()).unflatten(1, bias.shape)

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mean loss over samples and heads, and each head's gradient of every parameter."""
        logits = self.logits(x, training=True)
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, None].expand(logits.shape[:2]).flatten())
        return loss.detach(), torch.autograd.grad(loss * len(self.heads), [*self.params.values()])

    @torch.no_grad()
    def update(self, gradients: tuple[Tensor, ...], rate: Tensor | float) -> None:
        """One update of all heads."""
        factor = self.recipe.momentum
        for (name, p), gradient in zip(self.params.items(), gradients, strict=True):
            per_head = (-1, *[1] * (p.ndim - 1))  # shape of one number per head, to broadcast
            if name in ("weight", "bias") or self.recipe.decay_bn:
                gradient = gradient + self.decay.view(per_head) * p
            if self.recipe.optimizer == "lars" and name == "weight":
                size, steep = p.flatten(1).norm(dim=1), gradient.flatten(1).norm(dim=1)
                trust = torch.where((size > 0) & (steep > 0), TRUST * size / steep, 1.0)
                gradient = gradient * trust.view(per_head)
            ahead = self.momentum[name].mul_(factor).add_(gradient)
            if self.recipe.optimizer == "sgd":  # Nesterov
                ahead = gradient + factor * ahead
            p.sub_(rate * self.lr.view(per_head) * ahead)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Labels (H, n) for features (n, L * D), with the batch norm statistics of training."""
        parts = x.split(max(1, CHUNK // self.params["bias"].numel()))
        near = (part.to(self.mean.device).float() for part in parts)
        return torch.cat([self.logits(part, training=False).argmax(2).T for part in near], dim=1)


def _near(x: Tensor, device: torch.device) -> Tensor:
    """Moves `x` to the device if it takes less than a third of the free memory there."""
    large = device.type == "cuda" and x.nbytes > torch.cuda.mem_get_info(device)[0] / 3
    return x if large else x.to(device)
