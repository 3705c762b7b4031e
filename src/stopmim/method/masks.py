"""Patches that are seen, and patches to predict: the multi-block masks of I-JEPA, and MAE's.

A sampler owns everything about itself: `draw` for one batch, `at_step` for the batch of an
update, `blocks` it can draw, `check` that it always can, `describe` for people.

The *size* of a block is drawn once per batch and only its *place* per image, so that everything has
one shape; the context is thinned to a fixed length, so that the shapes of a whole run are few and
depend neither on the batch size nor on the number of GPUs.

Shapes: B images, N = side * side patches, C context patches, M targets of K patches or L cells of
2x2 patches, T candidates.

Longer than other files, so that each sampler is in one piece, down to what it refuses.
"""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from stopmim.base.random_keys import torch_generator

Range = tuple[float, float]  # smallest, largest
Compat = Literal["released"] | None

CANDIDATES = 8  # placements tried per image, all at once; the last one always fits
RELEASED_MIN_KEEP = 10  # a released mask is accepted with more patches than this
RELEASED_TRIES = 20  # failed placements after which the released code gives up one target


class Masks(NamedTuple):
    context: Tensor  # (B, C) int64 patch numbers, ascending
    targets: Tensor  # (M, B, K) int64 patch numbers of M blocks, ascending


class Block(NamedTuple):
    height: int
    width: int

    @property
    def area(self) -> int:
        return self.height * self.width


class Corners(NamedTuple):
    """Upper-left corners of blocks, as rows and columns of the grid."""

    top: Tensor
    left: Tensor


class Sizes(NamedTuple):
    """The block sizes of one batch."""

    target: Block
    context: Block


# ------------------------------------------------------------------------------ samplers


@dataclass(frozen=True)
class MaskSampler(ABC):
    """Draws masks on a grid of side x side patches. A subclass gives `draw` and what differs."""

    side: int

    static: ClassVar[bool] = True  # shapes depend on the block sizes alone, so it can be compiled

    @abstractmethod
    def draw(self, batch: int, generator: torch.Generator, sizes: Sizes | None = None) -> Masks:
        """Masks of `batch` images, on the device of the generator."""

    def sizes(self, seed: int, step: int) -> Sizes | None:
        """Block sizes of the batch of `step`, the same on all ranks; None without blocks."""
        return None

    def at_step(
        self, seed: int, step: int, parts: list[slice], total: int, device: torch.device
    ) -> list[Masks]:
        """Masks of every part of the batch of `step`, which has `total` images on all ranks.

        Drawn for the whole batch and then sliced: how a batch is cut does not change its masks.
        """
        generator = torch_generator("masks", seed, step, device=device)  # places, by (seed, step)
        every = self.draw(total, generator, self.sizes(seed, step))  # (total, C), (M, total, K)
        return [Masks(every.context[part], every.targets[:, part]) for part in parts]

    def blocks(self) -> dict[Block, float]:
        """Target rectangles it can draw, with their probabilities; empty without rectangles."""
        return {}

    def check(self) -> None:
        """Raises ValueError unless every batch it can draw has masks, for certain."""
        return

    @abstractmethod
    def describe(self) -> str:
        """A phrase for people."""


@dataclass(frozen=True)
class MultiBlock(MaskSampler):
    """I-JEPA's masks: rectangles to predict, and a large square to see less the rectangles.

    Args:
        targets: rectangles per image.
        target_scale: area of a rectangle as a fraction of the grid.
        target_aspect: its height over its width.
        context_scale: area of the square, as a fraction of the grid.
        context_length: patches the encoder sees, C; None is round(0.28 side^2).
    """

    targets: int = 4
    target_scale: Range = (0.15, 0.2)
    target_aspect: Range = (0.75, 1.5)
    context_scale: Range = (0.85, 1.0)
    context_length: int | None = None

    @property
    def length(self) -> int:
        """C, the patches the encoder sees."""
        return self.context_length or default_context_length(self.side)

    def sizes(self, seed: int, step: int) -> Sizes:
        return self.draw_sizes(torch_generator("sizes", seed, step))

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        """Draws the size of targets from one uniform number, that of contexts from another.

        Give it a CPU generator: the sizes are shapes, which the host must know.
        """
        # I-JEPA draws sizes once per batch too, seeded by a counter that its workers share.
        draws = torch.rand(2, generator=generator, device=generator.device).tolist()
        return Sizes(
            _block(draws[0], self.side, self._longest, self.target_scale, self.target_aspect),
            _block(draws[1], self.side, self._longest, self.context_scale, (1.0, 1.0)),
        )

    @property
    def _longest(self) -> int | None:
        return None  # no edge is cut; `check` refuses blocks that do not fit

    def blocks(self) -> dict[Block, float]:
        return possible_blocks(self.side, self.target_scale, self.target_aspect, self._longest)

    def _contexts(self) -> dict[Block, float]:
        return possible_blocks(self.side, self.context_scale, (1.0, 1.0), self._longest)

    def draw(self, batch: int, generator: torch.Generator, sizes: Sizes | None = None) -> Masks:
        """Takes the first of CANDIDATES placements that leaves enough patches to see.

        All are drawn at once: nothing loops and nothing waits for the device. The choice favours
        targets that overlap: docs/faithfulness.md has how far their places are from uniform.
        """
        sizes = self._fitting(sizes or self.draw_sizes(generator))
        side, length, device = self.side, self.length, generator.device
        # Inclusive ranges: blocks may touch the last row and column. 2 x (T, M, B)
        places = _places(sizes.target, (CANDIDATES, self.targets, batch), side, 1, generator)
        for corner in places:  # the candidate that always fits: all targets in one place
            corner[-1] = corner[-1, :1]
        context = _places(sizes.context, (CANDIDATES, batch), side, 1, generator)  # 2 x (T, B)
        hidden = _covers(places, sizes.target, side).any(dim=1)  # (T, B, N)
        visible = _covers(context, sizes.context, side) & ~hidden  # (T, B, N)
        enough = visible.sum(dim=-1) >= length  # (T, B)
        first = enough.byte().argmax(dim=0)  # (B,) the first candidate with enough patches to see
        image = torch.arange(batch, device=device)
        visible = visible[first, image]  # (B, N)
        places = Corners(*(corner[first, :, image].T for corner in places))  # 2 x (M, B)
        # Visible patches get a rank in [0, 1), hidden ones 2: the lowest are a uniform choice.
        rank = torch.rand(visible.shape, generator=generator, device=device)
        rank = rank.masked_fill(~visible, 2.0)
        seen = rank.topk(length, dim=1, largest=False).indices.sort(dim=1).values  # (B, C)
        return Masks(seen, _patches(places, sizes.target, side))

    def _fitting(self, sizes: Sizes) -> Sizes:
        """`sizes`, refused if they are not of this grid or leave too few patches to see."""
        side = self.side
        if max(*sizes.target, *sizes.context) > side or min(sizes.target) < 1:
            raise ValueError(f"sizes {sizes} do not fit a grid of {side}x{side}; see draw_sizes")
        if self.static and sizes.context.area - sizes.target.area < self.length:
            few = f"fewer than {self.length} patches to see"
            raise ValueError(f"sizes {sizes} leave {few}; see draw_sizes")
        return sizes

    def check(self) -> None:
        _check_ranges(self)
        grid, targets = f"on a {self.side}x{self.side} grid", self.blocks()
        scale = f"target_scale {self.target_scale}"
        if min(block.area for block in targets) == 0:
            raise ValueError(f"{scale} gives empty blocks {grid}; raise it")
        for block in targets:
            if max(block) > self.side:
                raise ValueError(
                    f"{scale} with target_aspect {self.target_aspect} gives blocks of "
                    f"{block.height}x{block.width} {grid}; lower the scale or bring the aspect "
                    f"near 1"
                )
        self._check_context(grid)

    def _check_context(self, grid: str) -> None:
        # The worst batch: the largest targets with the smallest context.
        largest = max(self.blocks(), key=lambda block: block.area)
        context = min(self._contexts(), key=lambda block: block.area)
        if self.context_length is not None and self.context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {self.context_length}")
        # The last candidate puts all targets in one place, so at most one target is cut out.
        left = context.area - largest.area
        if left < self.length:
            raise ValueError(
                f"{grid} a context block of {context.height}x{context.width} less a target of "
                f"{largest.height}x{largest.width} leaves {max(left, 0)} patches to see, fewer "
                f"than context_length {self.length}; lower context_length or target_scale, raise "
                f"context_scale"
            )

    def _seen(self) -> str:
        return f"{self.length} patches"

    def describe(self) -> str:
        blocks = sorted(self.blocks().items())
        shapes = ", ".join(f"{b.height}x{b.width} ({p:.0%})" for b, p in blocks)
        return f"{self._seen()} seen, {self.targets} targets of {shapes}"


@dataclass(frozen=True)
class ReleasedMultiBlock(MultiBlock):
    """The released sampler, with its biases, for weights that were trained that way.

    No block touches the last row or column (``randint(0, side - height)``), and contexts are cut to
    the shortest of those drawn together, lowest numbers first: the bottom rows are lost.
    """

    static = False  # the shortest context differs from batch to batch

    @property
    def _longest(self) -> int:
        return self.side - 1  # the released code shrinks larger blocks

    def at_step(
        self, seed: int, step: int, parts: list[slice], total: int, device: torch.device
    ) -> list[Masks]:
        """Drawn part by part: contexts are cut to the shortest on one GPU, as published."""
        sizes = self.sizes(seed, step)
        starts = [torch_generator("masks", seed, step, p.start, device=device) for p in parts]
        return [self.draw(p.stop - p.start, g, sizes) for p, g in zip(parts, starts, strict=True)]

    def draw(self, batch: int, generator: torch.Generator, sizes: Sizes | None = None) -> Masks:
        """After RELEASED_TRIES failures gives up the last target, then the one before.

        Contexts may then overlap targets. Here all tries of a level are drawn at once, and the
        last level has no targets.
        """
        sizes, side = self._fitting(sizes or self.draw_sizes(generator)), self.side
        places = _places(sizes.target, (self.targets, batch), side, 0, generator)  # 2 x (M, B)
        blocks = _covers(places, sizes.target, side)  # (M, B, N)
        visible = torch.zeros(batch, side * side, dtype=torch.bool, device=generator.device)
        for kept in range(self.targets, -1, -1):  # targets that the context must avoid
            hidden = blocks[:kept].any(dim=0)  # (B, N)
            squares = _places(sizes.context, (RELEASED_TRIES, batch), side, 0, generator)
            tries = _covers(squares, sizes.context, side) & ~hidden  # (T, B, N)
            good = tries.sum(dim=-1) > RELEASED_MIN_KEEP  # (T, B)
            image = torch.arange(batch, device=generator.device)
            found = tries[good.byte().argmax(dim=0), image]  # (B, N)
            missing = visible.sum(dim=1) == 0
            visible |= found & (missing & good.any(dim=0)).unsqueeze(1)
        length = int(visible.sum(dim=1).min())
        # A stable sort on "not visible" lists the visible patches first, in raster order.
        context = (~visible).byte().argsort(dim=1, stable=True)[:, :length]
        return Masks(context, _patches(places, sizes.target, side))

    def _check_context(self, grid: str) -> None:
        for name, found in (("target", self.blocks()), ("context", self._contexts())):
            block = min(found, key=lambda block: block.area)
            if block.area <= RELEASED_MIN_KEEP:
                raise ValueError(
                    f"a {name} block of {block.height}x{block.width} {grid} is refused by the "
                    f"released sampler, which wants more than {RELEASED_MIN_KEEP} patches and "
                    f"would retry forever; drop compat, raise {name}_scale, or use a finer grid"
                )
        if self.context_length is not None:
            raise ValueError(
                f"context_length {self.context_length} has no effect with compat released, which "
                f"cuts contexts to the shortest of the batch; leave out one of them"
            )

    def _seen(self) -> str:
        return "as many patches as the batch allows"


@dataclass(frozen=True)
class RandomPatches(MaskSampler):
    """MAE's masks: `ratio` of the patches are hidden, uniformly at random, and all are predicted.

    The one "block" of targets is (1, B, K); context and targets together are the whole image.
    """

    ratio: float = 0.75

    @property
    def length(self) -> int:
        """C, the patches the encoder sees."""
        return int(self.side**2 * (1 - self.ratio))

    def draw(self, batch: int, generator: torch.Generator, sizes: Sizes | None = None) -> Masks:
        self.check()
        # A random order of the patches, cut in two: MAE models_mae.py:random_masking.
        rank = torch.rand(batch, self.side**2, generator=generator, device=generator.device)
        order, keep = rank.argsort(dim=1), self.length  # (B, N), C
        return Masks(order[:, :keep].sort(dim=1).values, order[None, :, keep:].sort(dim=2).values)

    def check(self) -> None:
        if not 0 < self.length < self.side**2:
            raise ValueError(
                f"ratio {self.ratio} on a {self.side}x{self.side} grid leaves {self.length} of "
                f"{self.side**2} patches to see, want 1 to {self.side**2 - 1}; bring the ratio "
                f"nearer to 0.5, or use a finer grid"
            )

    def describe(self) -> str:
        return f"{self.ratio:.0%} of the patches hidden at random"


def multiblock(
    batch: int,
    side: int,
    *,
    generator: torch.Generator,
    compat: Compat = None,
    sizes: Sizes | None = None,
    **options: Any,
) -> Masks:
    """Draws the multi-block masks of I-JEPA for a batch of images, on the generator's device.

    Args:
        batch: images in the batch; it changes neither the shapes nor where anything lies.
        side: patches along one edge of the (square) grid.
        generator: the only source of randomness; the same state gives the same masks.
        compat: "released" draws as the released code does: see `ReleasedMultiBlock`.
        sizes: block sizes from `draw_sizes`; None draws them from `generator` first.
        options: arguments of `MultiBlock`: targets, target_scale, context_length and so on.

    Raises:
        ValueError: the settings cannot work; `MultiBlock.check` proves it without drawing.
    """
    sampler = _kind(compat)(side, **options)
    sampler.check()
    return sampler.draw(batch, generator, sizes)


def random(batch: int, side: int, *, generator: torch.Generator, ratio: float = 0.75) -> Masks:
    """Draws MAE's masks for a batch of images: see `RandomPatches`."""
    return RandomPatches(side, ratio).draw(batch, generator)


def draw_sizes(
    side: int, *, generator: torch.Generator, compat: Compat = None, **options: Any
) -> Sizes:
    """Draws the block sizes of one batch, for `multiblock` with the same options."""
    return _kind(compat)(side, **options).draw_sizes(generator)


def _kind(compat: Compat) -> type[MultiBlock]:
    if compat not in (None, "released"):
        raise ValueError(f'compat must be "released" or None, got {compat!r}')
    return ReleasedMultiBlock if compat == "released" else MultiBlock


# ------------------------------------------------------------------------------ block sizes


def default_context_length(side: int) -> int:
    """Patches the encoder sees: 10, 18, 40, 55, 72 on grids of side 6, 8, 12, 14, 16."""
    return round(0.28 * side * side)


def _check_ranges(sampler: MultiBlock) -> None:
    if sampler.targets < 1:
        raise ValueError(f"targets must be at least 1, got {sampler.targets}")
    for name in ("target_scale", "context_scale"):
        low, high = getattr(sampler, name)
        if not 0 < low <= high <= 1:
            raise ValueError(f"{name} must be 0 < smallest <= largest <= 1, got {low}, {high}")
    low, high = sampler.target_aspect
    if not 0 < low <= high < math.inf:
        raise ValueError(f"target_aspect must be 0 < smallest <= largest, got {low, high}")


def _block(draw: float, side: int, limit: int | None, scale: Range, aspect: Range) -> Block:
    # One number sets area *and* aspect, so large blocks are tall ones: I-JEPA multiblock.py:56-63.
    area = int(side * side * (scale[0] + draw * (scale[1] - scale[0])))
    ratio = aspect[0] + draw * (aspect[1] - aspect[0])
    height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    return Block(min(height, limit or height), min(width, limit or width))


@functools.cache
def possible_blocks(
    side: int, scale: Range, aspect: Range, limit: int | None = None
) -> dict[Block, float]:
    """Every block size that can be drawn, with its probability: exact, not sampled.

    Area, height and width are monotonic step functions of the one draw u in [0, 1): between two
    neighbouring steps of any of them the block is constant. Edges longer than `limit` are cut.
    """
    low, high = (side * side * s for s in scale)  # area in patches
    slope = aspect[1] - aspect[0]
    steps = {0.0, 1.0}  # values of u at which something jumps
    for area in range(int(low), int(high) + 1):
        if high > low:
            steps.add((area - low) / (high - low))
        if slope and area:
            for edge in range(side + 1):  # height or width goes from `edge` to `edge + 1` here
                steps.add(((edge + 0.5) ** 2 / area - aspect[0]) / slope)
                steps.add((area / (edge + 0.5) ** 2 - aspect[0]) / slope)
    cuts = sorted(u for u in steps if 0 <= u <= 1)
    blocks: dict[Block, float] = {}
    for left, right in itertools.pairwise(cuts):
        block = _block((left + right) / 2, side, limit, scale, aspect)
        blocks[block] = blocks.get(block, 0.0) + right - left
    return blocks


# ------------------------------------------------------------------------------ places and patches


def _places(
    block: Block, shape: tuple[int, ...], side: int, inclusive: int, generator: torch.Generator
) -> Corners:
    """Uniform upper-left corners (*shape) of blocks inside the grid; `inclusive` is 0 or 1."""
    room = [max(1, side - edge + inclusive) for edge in block]  # starts along each axis
    draws = [torch.randint(0, r, shape, generator=generator, device=generator.device) for r in room]
    return Corners(*draws)


def _covers(places: Corners, block: Block, side: int) -> Tensor:
    """Patches (..., N) that a block at `places` (...) covers, as a mask."""
    row, col = (
        _intervals(side, edge, start.device)[start]  # (..., side)
        for start, edge in zip(places, block, strict=True)
    )
    return (row.unsqueeze(-1) & col.unsqueeze(-2)).flatten(-2)


def _patches(places: Corners, block: Block, side: int) -> Tensor:
    """The patch numbers (..., K) of a block at `places` (...), ascending."""
    first = places.top * side + places.left  # (...) number of the upper-left patch
    return first.unsqueeze(-1) + _offsets(side, block, first.device)


def cells(targets: Tensor, block: Block, side: int) -> Tensor:
    """Cells (M, B, L) of the grid of half the resolution inside rectangles `targets` (M, B, K).

    A cell is 2x2 patches, wholly inside the rectangle, starting at an even row and column; its
    number is that of its first patch. A block of height h holds (h - 1) // 2 or h // 2 rows of
    cells, depending on where it starts. The smaller number is always taken, so that shapes do not
    depend on places: an even h that starts at an even row loses one row of cells, the one nearer to
    the middle of the grid. (Dropping always the last would never predict the last row of the grid.)
    Columns likewise.
    """
    first = targets[..., 0]  # (M, B), the upper left patch of each block
    corners = []
    for start, edge in zip((first // side, first % side), block, strict=True):
        begin = start + start % 2
        spare = (edge - start % 2) // 2 - (edge - 1) // 2  # 0 or 1
        corners.append(begin + 2 * spare * (2 * start + edge > side))
    held = Block(*((edge - 1) // 2 for edge in block))
    offsets = 2 * _offsets(side, held, targets.device)  # (L,)
    return (corners[0] * side + corners[1]).unsqueeze(-1) + offsets


def nearness(context: Tensor, targets: Tensor, side: int) -> Tensor:
    """1 / sqrt(distance in patches to the nearest patch of a block), (M, B, C).

    Takes context patches (B, C) and target blocks (M, B, K). Near patches say most about a block.
    """
    seen, masked = context[None, :, :, None], targets[:, :, None]  # (1, B, C, 1), (M, B, 1, K)
    squared = (seen // side - masked // side) ** 2 + (seen % side - masked % side) ** 2
    return squared.amin(dim=-1).clamp(min=1) ** -0.25  # released contexts may overlap: 1


# Tables stay on the device: masks are drawn at every step, and every operation costs a launch.


@functools.cache
def _intervals(side: int, edge: int, device: torch.device) -> Tensor:
    """Row i marks the `edge` places from i on, (side, side) bool."""
    line = torch.arange(side, device=device)
    return (line >= line[:, None]) & (line < line[:, None] + edge)


@functools.cache
def _offsets(side: int, block: Block, device: torch.device) -> Tensor:
    """The patch numbers (K,) of a block in the upper left corner."""
    rows = torch.arange(block.height, device=device)
    return (rows[:, None] * side + torch.arange(block.width, device=device)).flatten()
