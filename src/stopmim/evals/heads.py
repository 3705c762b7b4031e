"""Many linear classifiers trained at once on frozen features, as if each were trained alone.

The heads do not meet: their losses are added up, and each has rates and a decay of its own. Those
that see the same input (last block or last four, with or without batch norm) are one matrix.

Shapes: H heads of one input, K classes, D features, B samples.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.console import Ticker
from stopmim.base.random_keys import torch_generator
from stopmim.evals.recipes import Norm, Recipe
from stopmim.gpu.cuda_graphs import CudaGraphs

TRUST = 0.001  # eta of LARS
EPS = {"bn": 1e-5, "fixed bn": 1e-6}  # vissl's default; MAE's
CHUNK = 2**25  # logits in memory at a time when testing


@dataclass(frozen=True)
class Head:
    layers: int  # last blocks that it sees
    norm: Norm
    lr: float  # as a factor of the recipe's
    weight_decay: float

    def __str__(self) -> str:
        """What was chosen; the layers are part of the protocol."""
        norm = "no bn" if self.norm == "none" else self.norm
        return f"{norm}, lr x{self.lr:g}, wd {self.weight_decay:g}"


def grid(recipe: Recipe, layers: Sequence[int]) -> list[Head]:
    """All heads of `recipe` for features of the last `layers` blocks."""
    return [
        Head(n, norm, lr, decay)
        for lr, decay, n, norm in itertools.product(
            recipe.lr_factors, recipe.weight_decays, layers, recipe.norms
        )
    ]


class Outcome(NamedTuple):
    correct: Tensor  # (epochs, heads) int64, test samples told right after an epoch; 0: not tested
    predicted: Tensor  # (heads, N) int64, after the last epoch


def train_heads(
    heads: Sequence[Head],
    recipe: Recipe,
    train: Sequence[Tensor],
    y: Tensor,
    test: Tensor,
    test_y: Tensor,
    *,
    width: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    every_epoch: bool = True,
    tf32: bool = True,
) -> Outcome:
    """Trains `heads` by `recipe` and tests them, after every epoch or after the last one only.

    The order of samples depends on (seed, epoch), the first weights on seed and input: a head comes
    out the same in any company, up to rounding. Products on a GPU are in TF32, which has as many
    digits as half-precision features; `stopmim bench probe` compares it with float32.

    Args:
        train: features (N, L * D) of one or several views of the training images; epoch e sees view
            e modulo their number.
        y: labels (N,).
        width: D; a head of n layers sees the last n * D columns.
    """
    classes = int(torch.cat([y, test_y]).max()) + 1
    if len(y.unique()) < 2:
        raise ValueError(f"all {len(y)} labels are {int(y[0])}: there is nothing to separate")
    device = torch.device(device)
    views = [_near(x, device) for x in train]
    test, y, test_y = _near(test, device), y.to(device), test_y.to(device)
    place = {head: i for i, head in enumerate(heads)}
    key = lambda head: (head.layers, head.norm)  # noqa: E731
    groups = [
        _Group(list(some), recipe, width, classes, seed, device)
        for _, some in itertools.groupby(sorted(heads, key=key), key)
    ]

    def update(x: Tensor, y: Tensor, rate: Tensor | float) -> dict[str, Tensor]:
        found = [group.slopes(x, y) for group in groups]  # first of all, if memory runs out
        for group, (_, slopes) in zip(groups, found, strict=True):
            group.move(slopes, rate)
        return {"loss": torch.stack([loss for loss, _ in found]).sum()}

    # Hundreds of small kernels on a GPU, and none of them takes long.
    step = CudaGraphs(update, device) if device.type == "cuda" else update
    correct = torch.zeros(recipe.epochs, len(heads), dtype=torch.long)
    predicted = torch.zeros(len(heads), len(test_y), dtype=torch.long)
    with (
        _tf32(tf32 and device.type == "cuda"),
        Ticker(f"{len(heads)} heads", recipe.epochs) as ticker,
    ):
        for epoch in range(recipe.epochs):
            x = views[epoch % len(views)]
            order = torch.randperm(len(y), generator=torch_generator("heads", seed, epoch))
            labels = y[order.to(device)].split(recipe.batch_size)
            # A lone sample has no deviation to be normed by; it waits for the next epoch.
            parts = [part for part in order.to(x.device).split(recipe.batch_size) if len(part) > 1]
            for i, part in enumerate(parts):
                rate = recipe.rate(epoch + i / len(parts))
                step(x[part].to(device).float(), labels[i], rate)
            ticker.update(epoch + 1, f"{recipe.batch_size} samples at a time")
            if not every_epoch and epoch + 1 < recipe.epochs:
                continue
            for group in groups:
                found = group.predict(test)  # (H, N)
                rows = [place[head] for head in group.heads]
                predicted[rows] = found.cpu()
                correct[epoch, rows] = (found == test_y).sum(dim=1).cpu()
    return Outcome(correct, predicted)


class _Group:
    """Heads that see the same input, with what their optimizer remembers."""

    def __init__(
        self,
        heads: list[Head],
        recipe: Recipe,
        width: int,
        classes: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.heads, self.recipe = heads, recipe
        layers, self.norm = heads[0].layers, heads[0].norm
        self.d = d = layers * width
        generator = torch_generator("head", seed, layers, self.norm)
        if recipe.init_std is None:  # as nn.Linear
            weight = torch.rand(classes, d, generator=generator).mul(2).sub(1).div(d**0.5)
            bias = torch.rand(classes, generator=generator).mul(2).sub(1).div(d**0.5)
        else:
            weight = torch.randn(classes, d, generator=generator).mul(recipe.init_std)
            bias = torch.zeros(classes)
        first = {"weight": weight, "bias": bias}
        if self.norm == "bn":
            first |= {"scale": torch.ones(d), "shift": torch.zeros(d)}
        self.params = {
            name: start.expand(len(heads), *start.shape).clone().to(device).requires_grad_()
            for name, start in first.items()
        }
        self.speed = {name: torch.zeros_like(p) for name, p in self.params.items()}
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

    def slopes(self, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The mean loss over samples and heads, and its gradient by every parameter, per head."""
        logits = self.logits(x, training=True)
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, None].expand(logits.shape[:2]).flatten())
        return loss.detach(), torch.autograd.grad(loss * len(self.heads), [*self.params.values()])

    @torch.no_grad()
    def move(self, slopes: tuple[Tensor, ...], rate: Tensor | float) -> None:
        """One update of all heads."""
        for (name, p), slope in zip(self.params.items(), slopes, strict=True):
            decays = name in ("weight", "bias") or self.recipe.decay_bn
            self._move(name, p, slope, rate, decays=decays)

    def _move(
        self, name: str, p: Tensor, slope: Tensor, rate: Tensor | float, *, decays: bool
    ) -> None:
        def each(values: Tensor) -> Tensor:  # one number per head, to stand before p
            return values.view(-1, *[1] * (p.ndim - 1))

        if decays:
            slope = slope + each(self.decay) * p
        momentum, speed = self.recipe.momentum, self.speed[name]
        if self.recipe.optimizer == "lars" and name == "weight":
            size, steep = p.flatten(1).norm(dim=1), slope.flatten(1).norm(dim=1)
            trust = torch.where((size > 0) & (steep > 0), TRUST * size / steep, 1.0)
            slope = slope * each(trust)
        speed.mul_(momentum).add_(slope)
        ahead = slope + momentum * speed if self.recipe.optimizer == "sgd" else speed  # Nesterov
        p.sub_(rate * each(self.lr) * ahead)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Labels (H, N) for features (N, L * D), with the mean and deviation of training."""
        rows = max(1, CHUNK // self.params["bias"].numel())
        device = self.mean.device
        found = [
            self.logits(some.to(device).float(), training=False).argmax(dim=2).T
            for some in x.split(rows)
        ]
        return torch.cat(found, dim=1)


def _near(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device if it takes less than a third of what is free there."""
    if device.type == "cuda" and x.nbytes > torch.cuda.mem_get_info(device)[0] / 3:
        return x
    return x.to(device)


@contextlib.contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
