"""How far the corrected masks are from placing every target block uniformly in the grid.

A block is placed uniformly, but the first of a few placements that leaves enough patches to see is
taken: those that spread over the grid and hide much are refused more often. `table` is in
docs/faithfulness.md, written by ``make tables``.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from helpers import seeded
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config
from stopmim.method.build import build_sampler, configure
from stopmim.method.masks import Block, MultiBlock, Sizes

ROWS = {  # of samplers that differ
    "defaults, 8x8": Config(arch="vit_s8", image_size=64),
    "defaults, 14x14: the paper's ViT-B and ViT-L": PRESETS["vit_b16_stop"](),
    "`small_images`": PRESETS["small_images"](),
    "`photos_s16`, `photos_b16`": PRESETS["photos_s16"](),
}
CHUNK = 2000  # images drawn at once


class Range(NamedTuple):
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.low:+.0f} to {100 * self.high:+.0f} %"


def corners(sampler: MultiBlock, sizes: Sizes, images: int, generator: torch.Generator) -> Tensor:
    """How often a target starts at each place that is inside the grid, of all targets together.

    The sampler does not know left from right or up from down: mirrored places are averaged.
    """
    side, block = sampler.side, sizes.target
    counts = torch.zeros(side - block.height + 1, side - block.width + 1, dtype=torch.float64)
    for _ in range(images // CHUNK):
        first = sampler.draw(CHUNK, generator, sizes).targets[..., 0].flatten()
        one = torch.ones(len(first), dtype=torch.float64)
        counts.index_put_((first // side, first % side), one, accumulate=True)
    counts = (counts + counts.flip(0)) / 2
    return (counts + counts.flip(1)) / (2 * counts.sum())


def cover(share: Tensor, block: Block, side: int) -> Tensor:
    """How often a patch is in a block that starts at each place so often: (side, side)."""
    covered = torch.zeros(side, side, dtype=torch.float64)
    for row, shares in enumerate(share):
        for col, each in enumerate(shares):
            covered[row : row + block.height, col : col + block.width] += each
    return covered


def extremes(found: Tensor, uniform: Tensor) -> Range:
    relative = found / uniform - 1
    return Range(float(relative.min()), float(relative.max()))


def is_uniform(sampler: MultiBlock) -> bool:
    """Whether no placement can be refused: all targets apart still leave enough to see."""
    hidden = sampler.targets * max(block.area for block in sampler.blocks())
    return min(block.area for block in sampler._contexts()) - hidden >= sampler.length


def places(sampler: MultiBlock, images: int) -> Range:
    """The places of the largest targets beside the smallest context: the batch that is worst."""
    target = max(sampler.blocks(), key=lambda block: block.area)
    context = min(sampler._contexts(), key=lambda block: block.area)
    share = corners(sampler, Sizes(target, context), images, seeded())
    return extremes(share, torch.full_like(share, 1 / share.numel()))


def patches(sampler: MultiBlock, images: int) -> Range:
    """How often a patch is predicted, over all sizes as often as they are drawn."""
    found, uniform = torch.zeros(2, sampler.side, sampler.side, dtype=torch.float64)
    generator = seeded(1)
    for target, p in sampler.blocks().items():
        for context, q in sampler._contexts().items():
            share = corners(sampler, Sizes(target, context), images, generator)
            even = torch.full_like(share, 1 / share.numel())
            found += p * q * cover(share, target, sampler.side)
            uniform += p * q * cover(even, target, sampler.side)
    return extremes(found, uniform)


@cache
def tables() -> dict[str, str]:
    """The table by its name; a minute on one core."""
    lines = [
        "| masks | patches seen | places of a block, worst batch | a patch is predicted |",
        "| --- | --- | --- | --- |",
    ]
    for name, config in ROWS.items():
        sampler = build_sampler(configure(config))
        assert isinstance(sampler, MultiBlock)
        worst, usual = places(sampler, 200_000), patches(sampler, 40_000)
        seen = f"{sampler.length} of {sampler.side**2}"
        lines.append(f"| {name} | {seen} | {worst} | {usual} |")
    return {"placement": "\n".join(lines)}
