"""Which patches are seen and which are predicted: the multi-block masks of I-JEPA, and MAE's.

Pure functions of a generator. The *size* of a block is drawn once per batch and only its *place*
per image, so that everything has one shape; the context is thinned to a fixed length, so that the
shapes of a whole run are few and depend neither on the batch size nor on the number of GPUs.

Shapes: B images, N = side * side patches, C context patches, M targets of K patches or L cells of
2x2 patches, T candidates.
"""

import functools
import itertools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Range = tuple[float, float]
Compat = Literal["released"] | None

CANDIDATES = 8  # placements tried per image, all at once; the last one always fits
RELEASED_MIN_KEEP = 10  # a released mask is accepted with more patches than this
RELEASED_TRIES = 20  # failed placements after which the released code gives up one target


class Masks(NamedTuple):
    context: Tensor  # (B, C) int64 patch numbers, ascending
    targets: Tensor  # (M, B, K) int64 patch numbers of M rectangles, ascending


class Block(NamedTuple):
    height: int
    width: int

    @property
    def area(self) -> int:
        return self.height * self.width


class Corners(NamedTuple):
    """Where blocks begin, as rows and columns of the grid."""

    top: Tensor
    left: Tensor


class Sizes(NamedTuple):
    """The block sizes of one batch."""

    target: Block
    context: Block


def default_context_length(side: int) -> int:
    """Patches the encoder sees: 10, 18, 40, 55, 72 on grids of side 6, 8, 12, 14, 16."""
    return round(0.28 * side * side)


def draw_sizes(
    side: int,
    *,
    generator: torch.Generator,
    target_scale: Range = (0.15, 0.2),
    target_aspect: Range = (0.75, 1.5),
    context_scale: Range = (0.85, 1.0),
    compat: Compat = None,
) -> Sizes:
    """The block sizes of one batch: one uniform number for the targets, then one for the context.

    Give it a CPU generator: the sizes are shapes, which the host must know.
    """
    limit = _limit(side, compat)
    draws = torch.rand(2, generator=generator, device=generator.device).tolist()
    return Sizes(
        _block(draws[0], side, limit, target_scale, target_aspect),
        _block(draws[1], side, limit, context_scale, (1.0, 1.0)),
    )


def _limit(side: int, compat: Compat) -> int | None:
    return side - 1 if compat == "released" else None  # the released code shrinks what is larger


def _block(draw: float, side: int, limit: int | None, scale: Range, aspect: Range) -> Block:
    # One number sets area *and* aspect, so large blocks are tall ones: I-JEPA multiblock.py:56-63.
    area = int(side * side * (scale[0] + draw * (scale[1] - scale[0])))
    ratio = aspect[0] + draw * (aspect[1] - aspect[0])
    height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    return Block(min(height, limit or height), min(width, limit or width))


@functools.cache
def possible_blocks(
    side: int, scale: Range, aspect: Range, *, compat: Compat = None
) -> dict[Block, float]:
    """Every block size that can be drawn, with its probability: exact, not sampled.

    Area, height and width are monotonic step functions of the one draw u in [0, 1): between two
    neighbouring steps of any of them the block is constant.
    """
    limit = _limit(side, compat)
    low, high = (side * side * s for s in scale)
    slope = aspect[1] - aspect[0]
    steps = {0.0, 1.0}
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


@functools.cache
def check_multiblock(
    side: int,
    *,
    targets: int = 4,
    target_scale: Range = (0.15, 0.2),
    target_aspect: Range = (0.75, 1.5),
    context_scale: Range = (0.85, 1.0),
    context_length: int | None = None,
    compat: Compat = None,
) -> None:
    """Raises ValueError unless every batch these settings can draw has masks, for certain."""
    if targets < 1:
        raise ValueError(f"targets must be at least 1, got {targets}")
    for name, (low, high) in (("target_scale", target_scale), ("context_scale", context_scale)):
        if not 0 < low <= high <= 1:
            raise ValueError(f"{name} must be 0 < smallest <= largest <= 1, got {low}, {high}")
    if compat not in (None, "released"):
        raise ValueError(f'compat must be "released" or None, got {compat!r}')
    if not 0 < target_aspect[0] <= target_aspect[1] < math.inf:
        raise ValueError(f"target_aspect must be 0 < smallest <= largest, got {target_aspect}")
    target_blocks = possible_blocks(side, target_scale, target_aspect, compat=compat)
    context_blocks = possible_blocks(side, context_scale, (1.0, 1.0), compat=compat)
    smallest = min(target_blocks, key=lambda block: block.area)
    largest = max(target_blocks, key=lambda block: block.area)
    context = min(context_blocks, key=lambda block: block.area)
    grid = f"on a {side}x{side} grid"
    if smallest.area == 0:
        raise ValueError(f"target_scale {target_scale} gives empty blocks {grid}; raise it")
    for block in target_blocks:
        if max(block) > side:
            raise ValueError(
                f"target_scale {target_scale} with target_aspect {target_aspect} gives blocks of "
                f"{block.height}x{block.width} {grid}; lower the scale or bring the aspect near 1"
            )
    if compat == "released":
        for name, block in (("target", smallest), ("context", context)):
            if block.area <= RELEASED_MIN_KEEP:
                raise ValueError(
                    f"a {name} block of {block.height}x{block.width} {grid} is refused by the "
                    f"released sampler, which wants more than {RELEASED_MIN_KEEP} patches and "
                    f"would try for ever; leave out compat, raise {name}_scale, or use a finer grid"
                )
        if context_length is not None:
            raise ValueError(
                f"context_length {context_length} has no effect with compat released, which cuts "
                f"contexts to the shortest of the batch; leave out one of them"
            )
        return
    length = default_context_length(side) if context_length is None else context_length
    if length < 1:
        raise ValueError(f"context_length must be at least 1, got {length}")
    # The last candidate puts all targets in one place, so at most one target is cut out.
    left = context.area - largest.area
    if left < length:
        raise ValueError(
            f"{grid} a context block of {context.height}x{context.width} less a target of "
            f"{largest.height}x{largest.width} leaves {max(left, 0)} patches to see, fewer than "
            f"context_length {length}; lower context_length or target_scale, raise context_scale"
        )


def multiblock(
    batch: int,
    side: int,
    *,
    generator: torch.Generator,
    targets: int = 4,
    target_scale: Range = (0.15, 0.2),
    target_aspect: Range = (0.75, 1.5),
    context_scale: Range = (0.85, 1.0),
    context_length: int | None = None,
    compat: Compat = None,
    sizes: Sizes | None = None,
) -> Masks:
    """Samples the multi-block masks of I-JEPA for a batch of images, on the generator's device.

    Every image gets `targets` rectangles to predict and one large square to see, less the patches
    of its rectangles, of which `context_length` are kept at random. A placement that leaves too few
    is passed over for the next of CANDIDATES; nothing loops and nothing waits for the device.

    Args:
        batch: images in the batch; it changes neither the shapes nor where anything lies.
        side: patches along one edge of the (square) grid.
        generator: the only source of randomness; the same state gives the same masks.
        target_scale: area of a rectangle as a fraction of the grid.
        target_aspect: its height over its width.
        context_scale: area of the square, likewise.
        context_length: patches the encoder sees, C; None is round(0.28 side^2).
        compat: "released" samples as the released code does, for weights trained that way: no
            block touches the last row or column (``randint(0, side - height)``), and contexts are
            cut to the shortest of the batch, lowest numbers first: the bottom rows are lost.
        sizes: block sizes from `draw_sizes`; None draws them from `generator` first.

    Raises:
        ValueError: the settings cannot work; `check_multiblock` proves it without drawing.
    """
    check_multiblock(
        side,
        targets=targets,
        target_scale=target_scale,
        target_aspect=target_aspect,
        context_scale=context_scale,
        context_length=context_length,
        compat=compat,
    )
    if sizes is None:
        sizes = draw_sizes(
            side,
            generator=generator,
            target_scale=target_scale,
            target_aspect=target_aspect,
            context_scale=context_scale,
            compat=compat,
        )
    if max(*sizes.target, *sizes.context) > side or min(sizes.target) < 1:
        raise ValueError(f"sizes {sizes} do not fit a grid of {side}x{side}; see draw_sizes")
    if compat == "released":
        return _released(batch, side, targets, sizes, generator)
    length = default_context_length(side) if context_length is None else context_length
    if sizes.context.area - sizes.target.area < length:
        raise ValueError(f"sizes {sizes} leave fewer than {length} patches to see; see draw_sizes")
    places = _places(sizes.target, (CANDIDATES, targets, batch), side, 1, generator)
    for corner in places:  # the candidate that always fits: all targets in one place
        corner[-1] = corner[-1, :1]
    context = _places(sizes.context, (CANDIDATES, batch), side, 1, generator)
    hidden = _covers(places, sizes.target, side).any(dim=1)  # (T, B, N)
    visible = _covers(context, sizes.context, side) & ~hidden  # (T, B, N)
    enough = visible.sum(dim=-1) >= length  # (T, B)
    first = enough.byte().argmax(dim=0)  # (B,) the first candidate with enough patches to see
    image = torch.arange(batch, device=generator.device)
    visible = visible[first, image]  # (B, N)
    places = Corners(*(corner[first, :, image].T for corner in places))  # 2 x (M, B)
    # Visible patches get a rank in [0, 1), hidden ones 2: the lowest ranks are a uniform choice.
    rank = torch.rand(visible.shape, generator=generator, device=generator.device)
    rank = rank.masked_fill(~visible, 2.0)
    seen = rank.topk(length, dim=1, largest=False).indices.sort(dim=1).values
    return Masks(seen, _patches(places, sizes.target, side))


def _places(
    block: Block, shape: tuple[int, ...], side: int, inclusive: int, generator: torch.Generator
) -> Corners:
    """Uniform upper-left corners (*shape) of blocks that lie inside the grid."""
    room = [max(1, side - edge + inclusive) for edge in block]
    draws = [torch.randint(0, r, shape, generator=generator, device=generator.device) for r in room]
    return Corners(*draws)


def _covers(places: Corners, block: Block, side: int) -> Tensor:
    """Which patches (..., N) a block at `places` (...) covers."""
    row, col = (
        _intervals(side, edge, start.device)[start]  # (..., side)
        for start, edge in zip(places, block, strict=True)
    )
    return (row.unsqueeze(-1) & col.unsqueeze(-2)).flatten(-2)


def _patches(places: Corners, block: Block, side: int) -> Tensor:
    """The patch numbers (..., K) of a block at `places` (...), ascending."""
    first = places.top * side + places.left
    return first.unsqueeze(-1) + _offsets(side, block, first.device)


def cells(targets: Tensor, block: Block, side: int) -> Tensor:
    """The cells of the grid of half the resolution in rectangles `targets` (M, B, K): (M, B, L).

    A cell is 2x2 patches, whole and inside the rectangle, from an even row and an even column on,
    and is called by the number of its first patch. A block of height h holds (h - 1) // 2 or h // 2
    rows of them, by where it begins. The smaller number is taken of every block, so that shapes do
    not depend on places: an even h that begins at an even row loses one row, the one nearer to the
    middle of the grid. (Were it always the last, the last row of the grid would never be
    predicted.) For columns it is the same.
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


# Tables, kept on the device: masks are drawn at every step, and every operation has its price.


@functools.cache
def _intervals(side: int, edge: int, device: torch.device) -> Tensor:
    """Row i is what `edge` places from i on cover of `side`, (side, side) bool."""
    line = torch.arange(side, device=device)
    return (line >= line[:, None]) & (line < line[:, None] + edge)


@functools.cache
def _offsets(side: int, block: Block, device: torch.device) -> Tensor:
    """The patch numbers (K,) of a block in the upper left corner."""
    rows = torch.arange(block.height, device=device)
    return (rows[:, None] * side + torch.arange(block.width, device=device)).flatten()


def _released(
    batch: int, side: int, targets: int, sizes: Sizes, generator: torch.Generator
) -> Masks:
    """The released sampler: exclusive ranges, contexts cut to the batch minimum in raster order.

    After RELEASED_TRIES failures it gives up the last target, then the one before: contexts may
    then overlap targets. Here all tries of a level are drawn at once, and the last level has none.
    """
    places = _places(sizes.target, (targets, batch), side, 0, generator)
    blocks = _covers(places, sizes.target, side)  # (M, B, N)
    visible = torch.zeros(batch, side * side, dtype=torch.bool, device=generator.device)
    for kept in range(targets, -1, -1):
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


def check_random(side: int, ratio: float) -> int:
    """The patches that `random` leaves to see, C; ValueError if that is none or all."""
    patches = side * side
    keep = int(patches * (1 - ratio))
    if not 0 < keep < patches:
        raise ValueError(
            f"ratio {ratio} on a {side}x{side} grid leaves {keep} of {patches} patches to see, "
            f"want 1 to {patches - 1}; bring the ratio nearer to 0.5, or use a finer grid"
        )
    return keep


def random(batch: int, side: int, *, generator: torch.Generator, ratio: float = 0.75) -> Masks:
    """MAE's masks: `ratio` of the patches are hidden, uniformly at random, and all are predicted.

    The one "block" of targets is (1, B, K); context and targets together are the whole image.
    """
    keep = check_random(side, ratio)
    rank = torch.rand(batch, side * side, generator=generator, device=generator.device)
    order = rank.argsort(dim=1)
    return Masks(order[:, :keep].sort(dim=1).values, order[None, :, keep:].sort(dim=2).values)
