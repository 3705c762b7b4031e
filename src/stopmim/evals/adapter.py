"""Adapter that makes any network an encoder, for every evaluation of frozen encoders."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from stopmim.base.pictures import Pictures, as_input
from stopmim.data.pixels import MEAN, STD
from stopmim.data.transform import Transform
from stopmim.evals.features import evaluating
from stopmim.gpu.blocks import take
from stopmim.method.encoder import Pool


class Adapter(nn.Module):
    """A network of yours with the interface of an `Encoder`: ``Adapter(network)``.

    For images (B, 3, S, S) it returns vectors (B, D), tokens (B, N, D), a map (B, D, H, W), or an
    object with `last_hidden_state`. The tokens that do not fit a square grid come first: a class
    token, registers. Features are not cached: a hash of weights says nothing about foreign code.

    Args:
        network: put in evaluation mode while it is measured, and restored afterwards.
        size: edge of the images that it is made for.
        pool: what is measured, the "mean" of the patches or the first token ("cls"); by default
            the first token, if any precede the patches.
        mean, std: how its images are normalised, red, green and blue; by default ImageNet's.
    """

    cacheable = False

    def __init__(
        self,
        network: nn.Module,
        size: int = 224,
        *,
        pool: Pool | None = None,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([network])  # all of it is one layer
        self.mean, self.std, self.transform = mean, std, Transform(size)
        with evaluating(network):
            tokens = self.tokens(torch.zeros(1, 3, size, size))
        _, count, self.width = tokens.shape
        side = math.isqrt(count)
        self.prefix = count - side**2  # tokens before the patch tokens
        if size % side:  # patches overlap or leave a border: a grid, but none to track with
            side = 1
        self.side, self.patch = side, size // side
        self.pool: Pool = pool or ("cls" if self.prefix else "mean")

    def tokens(self, images: Tensor) -> Tensor:
        """All tokens (B, N, D); a vector counts as one token."""
        if (self.mean, self.std) != (MEAN, STD):
            mean, std, own_mean, own_std = (
                torch.tensor(numbers, device=images.device).view(3, 1, 1)
                for numbers in (MEAN, STD, self.mean, self.std)
            )
            images = (images * std + mean - own_mean) / own_std
        weights = (p for p in self.parameters() if p.is_floating_point())
        images = images.to(next(weights, images))  # its device and precision
        found: Any = self.blocks[0](images)
        found = getattr(found, "last_hidden_state", found)
        if not isinstance(found, Tensor) or found.ndim not in (2, 3, 4):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"network: expected (B, D), (B, N, D) or (B, D, H, W), got {got}")
        if found.ndim == 2:
            return found[:, None]
        return found if found.ndim == 3 else found.flatten(2).mT

    def forward(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Tokens of the patches (B, N, D), or (B, K, D) of those at `index` (B, K)."""
        if self.side == 1:
            raise ValueError("this network returns no grid of patches, which tracking needs")
        found = self.tokens(images)[:, self.prefix :]
        return found if index is None else take(found, index)

    def features(self, images: Pictures, layers: int = 1, pool: Pool = "mean") -> Tensor:
        """One vector per image, (B, D): the mean of the patches, or the first token."""
        if layers != 1:
            raise ValueError(f"an adapted network has one layer, got layers={layers}")
        found = self.tokens(as_input(images, self.transform))
        return found[:, 0] if pool == "cls" else found[:, self.prefix :].mean(dim=1)
