"""Masks: those of the released code, and the corrected ones, which favour no part of an image.

Where a statement is about a distribution, a difference is allowed 5 standard errors at fixed seeds.
"""

import functools
import itertools
import math
import random
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import placement
from helpers import golden, golden_about, seeded
from stopmim.method import masks as masking
from stopmim.method.build import build_sampler, configure
from stopmim.method.masks import (
    Block,
    Masks,
    MultiBlock,
    ReleasedMultiBlock,
    Sizes,
    default_context_length,
    draw_sizes,
    multiblock,
    possible_blocks,
)

TARGET_SCALE, TARGET_ASPECT = (0.15, 0.2), (0.75, 1.5)


def covered(index: Tensor, patches: int) -> Tensor:
    """Which of `patches` patches are in `index` (..., K): (..., patches)."""
    return torch.zeros(*index.shape[:-1], patches, dtype=torch.bool).scatter(-1, index, True)


def assert_valid(masks: Masks, side: int, block: Block, *, disjoint: bool = True) -> None:
    context, targets = masks
    assert context.dtype == targets.dtype == torch.int64
    assert (context.diff(dim=1) > 0).all()  # ascending, and so unique
    assert context.min() >= 0
    assert context.max() < side * side
    first = targets[..., :1]
    rows, cols = torch.arange(block.height), torch.arange(block.width)
    assert torch.equal(targets, first + (rows[:, None] * side + cols).flatten())
    assert first.min() >= 0
    assert (first // side).max() + block.height <= side
    assert (first % side).max() + block.width <= side  # or it would wrap into the next row
    if disjoint:
        seen = covered(context, side * side)
        hidden = covered(targets, side * side).any(dim=0)
        assert not (seen & hidden).any()


class Sample(NamedTuple):
    context: Tensor  # (n, N) bool
    targets: Tensor  # (M, n, N) bool
    lengths: list[int]  # of the contexts, per batch


@functools.cache
def corrected(side: int, batches: int = 200, batch: int = 100) -> Sample:
    """20,000 images in 200 batches, each batch checked: the sizes differ from batch to batch."""
    generator, context, targets, lengths = seeded(side), [], [], []
    for _ in range(batches):
        sizes = draw_sizes(side, generator=generator)
        masks = multiblock(batch, side, generator=generator, sizes=sizes)
        assert masks.context.shape == (batch, default_context_length(side))
        assert masks.targets.shape == (4, batch, sizes.target.area)
        assert_valid(masks, side, sizes.target)
        context.append(covered(masks.context, side * side))
        targets.append(covered(masks.targets, side * side))
        lengths.append(masks.context.shape[1])
    return Sample(torch.cat(context), torch.cat(targets, dim=1), lengths)


@functools.cache
def released(side: int) -> Sample:
    """As recorded: 100 batches of 64, sizes of counters 0..99."""
    generator, context, targets, lengths = seeded(side), [], [], []
    for counter in range(100):
        sizes = draw_sizes(side, generator=seeded(counter), compat="released")
        masks = multiblock(64, side, generator=generator, sizes=sizes, compat="released")
        assert_valid(masks, side, sizes.target)
        context.append(covered(masks.context, side * side))
        targets.append(covered(masks.targets, side * side))
        lengths.append(masks.context.shape[1])
    return Sample(torch.cat(context), torch.cat(targets, dim=1), lengths)


def score(difference: Tensor) -> Tensor:
    """How many standard errors the mean of `difference` (n, ...) is from zero."""
    difference = difference.double()
    mean = difference.mean(dim=0)
    error = difference.std(dim=0) / math.sqrt(len(difference))
    return torch.where(error > 0, mean.abs() / error, mean.abs() * math.inf).nan_to_num(0.0)


# ------------------------------------------------------------------------------ the released code


@pytest.mark.parametrize("side", [14, 16])
def test_released_sizes_are_the_recorded_ones_for_every_counter(side: int) -> None:
    recorded = golden("masks")
    sizes = [draw_sizes(side, generator=seeded(i), compat="released") for i in range(200)]
    assert [list(s.target) for s in sizes] == recorded[f"g{side}.target_hw"].tolist()
    assert [list(s.context) for s in sizes] == recorded[f"g{side}.context_hw"].tolist()


@pytest.mark.parametrize("side", [14, 16])
def test_released_maps_are_the_recorded_ones(side: int) -> None:
    recorded, ours = golden("masks"), released(side)
    maps = {
        "p_any_target": (ours.targets.any(dim=0), 0.03),
        "p_target0": (ours.targets[0], 0.03),
        "p_context": (ours.context, 0.06),
    }
    for name, (inside, tolerance) in maps.items():
        ours_map = inside.float().mean(dim=0).view(side, side)
        torch.testing.assert_close(ours_map, recorded[f"g{side}.{name}"], atol=tolerance, rtol=0)
    about = golden_about("masks")["config"]["statistics"][f"g{side}"]
    mean = sum(ours.lengths) / len(ours.lengths)
    assert mean == pytest.approx(about["context_len_mean"], abs=3)


@pytest.mark.parametrize("side", [14, 16])
def test_released_masks_never_touch_the_last_row_or_column(side: int) -> None:
    ours = released(side)
    for inside in (ours.context, ours.targets.any(dim=0)):
        grid = inside.any(dim=0).view(side, side)
        assert not grid[-1].any()
        assert not grid[:, -1].any()
        assert grid[0, :-1].all()


@pytest.mark.parametrize("side", [14, 16])
def test_released_contexts_are_cut_to_the_shortest_of_the_batch_in_raster_order(side: int) -> None:
    sizes = draw_sizes(side, generator=seeded(), compat="released")
    masks = multiblock(64, side, generator=seeded(1), sizes=sizes, compat="released")
    square = torch.zeros(side, side, dtype=torch.bool)
    square[: side - 1, : side - 1] = True  # the context block, which can lie nowhere else
    visible = square.flatten() & ~covered(masks.targets, side * side).any(dim=0)
    length = int(visible.sum(dim=1).min())
    want = [image.nonzero().flatten()[:length].tolist() for image in visible]
    assert masks.context.tolist() == want


def test_released_contexts_give_up_targets_when_nothing_else_is_left_to_see() -> None:
    # Eight targets of 45 % of the grid can leave ten patches or fewer; their code then shows some.
    settings: dict[str, Any] = {"target_scale": (0.45, 0.45), "target_aspect": (1.0, 1.0)}
    masks = multiblock(512, 8, generator=seeded(), compat="released", targets=8, **settings)
    assert_valid(masks, 8, Block(5, 5), disjoint=False)
    assert masks.context.shape[1] > masking.RELEASED_MIN_KEEP
    blocks = covered(masks.targets, 64)  # (M, B, N)
    overlaps = (covered(masks.context, 64) & blocks).any(dim=2)  # (M, B)
    gave_up = overlaps.any(dim=0)
    assert gave_up.any()
    assert not gave_up.all()
    assert overlaps[-1].sum() > overlaps[1].sum() > 0  # the last target goes first
    assert not overlaps[0].any()  # one alone always leaves enough


# ------------------------------------------------------------------------------ no spatial bias


@pytest.mark.parametrize("what", ["context", "targets"])
@pytest.mark.parametrize("side", [14, 16])
def test_an_image_and_its_mirror_image_are_masked_alike(side: int, what: str) -> None:
    sample = corrected(side)
    inside = sample.context if what == "context" else sample.targets.any(dim=0)
    grid = inside.view(-1, side, side).float()
    assert len(grid) == 20_000
    for axis in (1, 2):  # rows, columns
        assert float(score(grid - grid.flip(axis)).max()) <= 5


@pytest.mark.parametrize("side", [14, 16])
def test_the_last_row_and_column_are_seen_and_predicted(side: int) -> None:
    sample = corrected(side)
    for inside in (sample.context, sample.targets.any(dim=0), *sample.targets):
        p = inside.float().mean(dim=0).view(side, side)
        assert p[-1].min() > 0.003  # a target lies in a corner once in about 100 images
        assert p[:, -1].min() > 0.003


def test_the_test_for_symmetry_finds_the_bias_of_the_released_masks() -> None:
    grid = released(14).context.view(-1, 14, 14).float()
    assert float(score(grid - grid.flip(1)).max()) > 20


def test_the_four_targets_are_alike_and_placed_independently() -> None:
    sample = corrected(14)
    middle = sample.targets[:, :, 7 * 14 + 7].float()  # (M, n)
    for a, b in itertools.combinations(range(4), 2):
        assert float(score(sample.targets[a].float() - sample.targets[b].float()).max()) <= 5
        # Whether one covers the middle says nothing about the other, but for the choice of the
        # first placement that leaves enough to see, which favours overlap a little.
        together = (middle[a] * middle[b]).mean() - middle[a].mean() * middle[b].mean()
        assert abs(float(together)) < 0.02


def test_targets_are_placed_uniformly_up_to_what_the_choice_of_a_placement_favours() -> None:
    """More exactly in docs/faithfulness.md."""
    usual = MultiBlock(8)
    low, high = placement.places(usual, 10_000)  # of the largest targets with the least to see
    assert -0.12 < low < -0.02
    assert 0.05 < high < 0.2
    low, high = placement.patches(usual, 6_000)
    assert -0.05 < low < high < 0.05
    # Of the released sampler half of the places of two mirrored corners never occur.
    assert placement.places(ReleasedMultiBlock(14), 2_000).low < -0.4


def test_the_small_presets_never_refuse_a_placement() -> None:
    for preset in ("tiny_cpu", "photos_cpu"):
        sampler = build_sampler(configure(preset))
        assert isinstance(sampler, MultiBlock)
        assert placement.is_uniform(sampler)
    assert not placement.is_uniform(MultiBlock(8))


# ------------------------------------------------------------------------------ shapes


def test_the_context_length_is_28_percent_of_the_grid_or_as_asked() -> None:
    assert [default_context_length(side) for side in (6, 8, 12, 14, 16)] == [10, 18, 40, 55, 72]
    for batch in (1, 7, 300):
        assert multiblock(batch, 14, generator=seeded()).context.shape == (batch, 55)
        asked = multiblock(batch, 14, generator=seeded(), context_length=33, targets=2)
        assert asked.context.shape == (batch, 33)
        assert asked.targets.shape[:2] == (2, batch)


def statistics(masks: Masks, side: int) -> Tensor:
    """Numbers (B, ...) of every image: both maps, and what only pairs of patches can tell."""
    context = covered(masks.context, side * side).double()
    targets = covered(masks.targets, side * side)
    union = targets.any(dim=0).double()
    grid = context.view(-1, side, side)
    pairs = [
        (targets[0] & targets[1]).double().sum(dim=1),  # what two targets share
        union.sum(dim=1),
        (grid[:, 1:] * grid[:, :-1]).sum(dim=(1, 2)),  # neighbours that are both seen
        (grid[:, :, 1:] * grid[:, :, :-1]).sum(dim=(1, 2)),
        grid.sum(dim=2).std(dim=1),  # how unevenly the seen patches are spread over the rows
    ]
    return torch.cat([context, union, torch.stack(pairs, dim=1)], dim=1)


@pytest.mark.parametrize("target", [Block(5, 6), Block(8, 5)])
def test_masks_are_distributed_alike_in_batches_of_8_and_of_1024(target: Block) -> None:
    sizes, generator = Sizes(target, Block(13, 13)), seeded(4)
    small, large = (
        torch.cat(
            [
                statistics(multiblock(batch, 14, generator=generator, sizes=sizes), 14)
                for _ in range(2048 // batch)
            ]
        )
        for batch in (8, 1024)
    )
    error = ((small.var(dim=0) + large.var(dim=0)) / 2048).sqrt()
    difference = (small.mean(dim=0) - large.mean(dim=0)).abs()
    assert (difference <= 5 * error).all()


def test_the_visible_patches_are_thinned_uniformly() -> None:
    # The context block is the whole grid, so that what is visible can be told from the targets.
    generator, seen, visible = seeded(2), [], []
    for _ in range(20):
        masks = multiblock(200, 14, generator=generator, context_scale=(1.0, 1.0))
        seen.append(covered(masks.context, 196))
        visible.append(~covered(masks.targets, 196).any(dim=0))
    s, v = torch.cat(seen).double(), torch.cat(visible).double()  # (n, N)
    count = v.sum(dim=1, keepdim=True)  # of visible patches
    share = v * 55 / count
    deviation = (s - share).sum(dim=0) / (share * (1 - share)).sum(dim=0).sqrt()
    assert float(deviation.abs().max()) <= 5
    # How many of the first half of the visible patches are seen is hypergeometric.
    half = (count / 2).floor()
    first_half = v * (v.cumsum(dim=1) <= half)
    drawn, p = (s * first_half).sum(dim=1), (half / count)[:, 0]
    variance = 55 * p * (1 - p) * (count[:, 0] - 55) / (count[:, 0] - 1)
    z = (drawn - 55 * p) / variance.sqrt()
    assert abs(float(z.mean())) * math.sqrt(len(z)) <= 5
    assert abs(float(z.square().mean()) - 1) <= 5 * math.sqrt(2 / len(z))


# ------------------------------------------------------------------------------ block sizes


@pytest.mark.parametrize(
    ("side", "known"),
    [
        (14, {(5, 6): 0.265, (6, 6): 0.2185, (6, 5): 0.1257, (7, 5): 0.3642, (8, 5): 0.0263}),
        (
            16,
            {
                (5, 7): 0.047,
                (6, 7): 0.279,
                (6, 6): 0.016,
                (7, 6): 0.289,
                (8, 6): 0.296,
                (9, 6): 0.073,
            },
        ),
    ],
)
@pytest.mark.parametrize("compat", [None, "released"])
def test_the_target_sizes_have_the_known_probabilities(
    side: int, known: dict[tuple[int, int], float], compat: masking.Compat
) -> None:
    limit = side - 1 if compat else None
    blocks = possible_blocks(side, TARGET_SCALE, TARGET_ASPECT, limit)
    assert {tuple(b): p for b, p in blocks.items()} == pytest.approx(known, abs=5e-4)
    assert sum(blocks.values()) == pytest.approx(1)


@pytest.mark.parametrize("side", [6, 14])
def test_the_sizes_that_are_drawn_are_the_possible_ones_as_often_as_said(side: int) -> None:
    generator, n = seeded(side), 20_000
    draws = [draw_sizes(side, generator=generator) for _ in range(n)]
    for name, possible in (
        ("target", possible_blocks(side, TARGET_SCALE, TARGET_ASPECT)),
        ("context", possible_blocks(side, (0.85, 1.0), (1.0, 1.0))),
    ):
        counts: dict[Block, int] = {}
        for sizes in draws:
            block = getattr(sizes, name)
            counts[block] = counts.get(block, 0) + 1
        assert counts.keys() <= possible.keys()
        for block, p in possible.items():
            assert abs(counts.get(block, 0) / n - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-9


def test_large_blocks_are_tall_because_one_number_sets_area_and_aspect() -> None:
    blocks = possible_blocks(14, TARGET_SCALE, TARGET_ASPECT)
    assert {b.height / b.width for b in blocks if b.area >= 40} == {8 / 5}
    assert {b.height / b.width for b in blocks if b.area <= 30} == {5 / 6, 6 / 5}


# ------------------------------------------------------------------------------ refusals

IMPOSSIBLE: list[tuple[int, dict[str, Any], str]] = [
    (14, {"targets": 0}, "targets"),
    (14, {"target_scale": (0.2, 0.15)}, "target_scale"),
    (14, {"target_scale": (0.0, 0.2)}, "target_scale"),
    (14, {"target_scale": (0.15, 1.5)}, "target_scale"),
    (14, {"target_scale": (math.nan, 0.2)}, "target_scale"),
    (14, {"context_scale": (0.9, 1.1)}, "context_scale"),
    (14, {"context_scale": (-0.1, 0.5)}, "context_scale"),
    (14, {"target_aspect": (0.0, 1.0)}, "target_aspect"),
    (14, {"target_aspect": (1.5, 0.75)}, "target_aspect"),
    (14, {"target_aspect": (0.75, math.nan)}, "target_aspect"),
    (14, {"target_aspect": (0.75, math.inf)}, "target_aspect"),
    (14, {"target_aspect": (8.0, 9.0)}, "aspect"),  # blocks taller than the grid
    (14, {"target_aspect": (0.1, 0.12)}, "aspect"),  # wider than the grid
    (14, {"context_length": 0}, "context_length"),
    (14, {"context_length": -3}, "context_length"),
    (14, {"context_length": 130}, "context_length"),  # fits some batches, not all
    (14, {"context_scale": (0.15, 0.2)}, "context_scale"),  # no context is left
    (14, {"target_scale": (0.8, 0.9)}, "target_scale"),
    (6, {"target_scale": (0.5, 0.7)}, "target_scale"),
    (2, {}, "target_scale"),  # targets of less than a patch
    (0, {}, "target_scale"),
    (8, {"compat": "released"}, "compat"),  # 3x3 targets: the original tries for ever
    (6, {"compat": "released"}, "compat"),
    (14, {"compat": "released", "context_scale": (0.03, 0.05)}, "context_scale"),
    (14, {"compat": "released", "context_length": 40}, "context_length"),  # would be ignored
    (14, {"compat": "Released"}, "compat"),  # would be read as the corrected sampler
]


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("side", "settings", "to_change"),
    IMPOSSIBLE,
    ids=[f"{side}-{settings}" for side, settings, _ in IMPOSSIBLE],
)
def test_impossible_settings_are_refused_before_anything_is_drawn(
    side: int, settings: dict[str, Any], to_change: str
) -> None:
    generator = seeded()
    before = generator.get_state()
    with pytest.raises(ValueError, match=to_change) as refused:
        multiblock(4, side, generator=generator, **settings)
    assert torch.equal(generator.get_state(), before)
    assert len(str(refused.value).splitlines()) == 1
    if settings.get("compat") in (None, "released"):  # a sampler has no other kinds
        with pytest.raises(ValueError, match=re.escape(str(refused.value))):
            sampler(side, settings).check()


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(Block(14, 14), Block(13, 13)),  # nothing left to see
        Sizes(Block(5, 20), Block(13, 13)),  # wraps around the edge of the grid
        Sizes(Block(5, 6), Block(5, 5)),  # fewer patches than the context length
    ],
)
def test_sizes_that_do_not_fit_are_refused_rather_than_shown_as_context(sizes: Sizes) -> None:
    with pytest.raises(ValueError, match="size"):
        multiblock(4, 14, generator=seeded(), sizes=sizes)


def sampler(side: int, settings: dict[str, Any]) -> MultiBlock:
    kind = ReleasedMultiBlock if settings.get("compat") else MultiBlock
    return kind(side, **{key: value for key, value in settings.items() if key != "compat"})


def some_settings(source: random.Random) -> tuple[int, dict[str, Any]]:
    def pair(low: float, high: float) -> tuple[float, float]:
        a, b = sorted(source.uniform(low, high) for _ in range(2))
        return source.choice([(a, b), (a, a), (b, a)]) if source.random() < 0.3 else (a, b)

    side = source.randint(1, 18)
    settings: dict[str, Any] = {
        "targets": source.choice([1, 2, 4, 4, 8]),
        "target_scale": source.choice([(0.15, 0.2), pair(0.0, 0.4), pair(0.0, 1.0)]),
        "target_aspect": source.choice([(0.75, 1.5), (1.0, 1.0), pair(0.1, 6.0)]),
        "context_scale": source.choice([(0.85, 1.0), (1.0, 1.0), pair(0.3, 1.05)]),
        "context_length": source.choice([None, None, 1, source.randint(0, side * side)]),
    }
    if source.random() < 0.25:
        settings |= {"compat": "released", "context_length": None}
    return side, settings


def worst_sizes(side: int, settings: dict[str, Any]) -> list[Sizes]:
    """The sizes a batch may have that are hardest to place."""
    limit = side - 1 if settings.get("compat") else None
    targets = possible_blocks(side, settings["target_scale"], settings["target_aspect"], limit)
    contexts = possible_blocks(side, settings["context_scale"], (1.0, 1.0), limit)
    context = min(contexts, key=lambda block: block.area)
    return [
        Sizes(target, context)
        for target in {
            max(targets, key=lambda block: block.area),
            max(targets, key=lambda block: block.height),
            max(targets, key=lambda block: block.width),
        }
    ]


def refusal(side: int, settings: dict[str, Any]) -> str | None:
    try:
        sampler(side, settings).check()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.timeout(30)
def test_any_settings_are_refused_or_give_valid_masks() -> None:
    source, accepted, refused = random.Random(0), 0, 0
    for _ in range(500):
        side, settings = some_settings(source)
        generator = seeded(source.getrandbits(32))
        if (reason := refusal(side, settings)) is not None:
            refused += 1
            assert len(reason.splitlines()) == 1
            with pytest.raises(ValueError, match=re.escape(reason)):
                multiblock(3, side, generator=generator, **settings)
            continue
        accepted += 1
        released_mode = settings.get("compat") == "released"
        length = settings["context_length"] or default_context_length(side)
        shape = {k: v for k, v in settings.items() if k.endswith(("scale", "aspect", "compat"))}
        drawn = draw_sizes(side, generator=generator, **shape)
        for sizes in (drawn, *worst_sizes(side, settings)):
            masks = multiblock(3, side, generator=generator, sizes=sizes, **settings)
            assert_valid(masks, side, sizes.target, disjoint=not released_mode)
            assert masks.targets.shape == (settings["targets"], 3, sizes.target.area)
            assert masks.context.shape[0] == 3
            if released_mode:
                assert masks.context.shape[1] > masking.RELEASED_MIN_KEEP
            else:
                assert masks.context.shape[1] == length
    assert min(accepted, refused) >= 120


def test_images_that_cannot_see_around_their_targets_get_them_in_one_place() -> None:
    # Eight targets of a quarter of the grid each, and half of the grid to see.
    settings: dict[str, Any] = {"target_scale": (0.25, 0.25), "target_aspect": (1.0, 1.0)}
    settings |= {"targets": 8, "context_scale": (1.0, 1.0), "context_length": 100}
    masks = multiblock(400, 14, generator=seeded(), **settings)
    assert_valid(masks, 14, Block(7, 7))
    together = (masks.targets == masks.targets[:1]).all(dim=2).all(dim=0)
    assert together.float().mean() > 0.9
    corners = masks.targets[0, together, 0]
    assert len(corners.unique()) > 50  # anywhere, of 64 places


# ------------------------------------------------------------------------------ randomness


@pytest.mark.parametrize("compat", [None, "released"])
def test_the_state_of_the_generator_decides_the_masks_and_nothing_else_does(
    compat: masking.Compat,
) -> None:
    first = multiblock(16, 14, generator=seeded(3), compat=compat)
    default = torch.get_rng_state()
    torch.manual_seed(99)
    again = multiblock(16, 14, generator=seeded(3), compat=compat)
    other = multiblock(16, 14, generator=seeded(4), compat=compat)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first.targets.shape != other.targets.shape or not torch.equal(
        first.targets, other.targets
    )
    torch.set_rng_state(default)
    multiblock(16, 14, generator=seeded(3), compat=compat)
    assert torch.equal(torch.get_rng_state(), default)
    generator = seeded(3)
    sizes = draw_sizes(14, generator=generator, compat=compat)
    apart = multiblock(16, 14, generator=generator, sizes=sizes, compat=compat)
    assert all(torch.equal(a, b) for a, b in zip(first, apart, strict=True))


# ------------------------------------------------------------------------------ MAE's masks


@pytest.mark.parametrize(("side", "ratio", "keep"), [(14, 0.75, 49), (4, 0.5, 8), (3, 0.4, 5)])
def test_random_masks_divide_the_image_into_seen_and_predicted(
    side: int, ratio: float, keep: int
) -> None:
    context, targets = masking.random(50, side, generator=seeded(), ratio=ratio)
    assert context.shape == (50, keep)
    assert targets.shape == (1, 50, side * side - keep)
    assert (context.diff(dim=1) > 0).all()
    assert (targets.diff(dim=2) > 0).all()
    whole = torch.cat([context, targets[0]], dim=1).sort(dim=1).values
    assert torch.equal(whole, torch.arange(side * side).expand(50, -1))


def test_random_masks_are_uniform_over_patches_and_pairs_of_patches() -> None:
    n, patches, keep = 20_000, 16, 4
    seen = covered(masking.random(n, 4, generator=seeded()).context, patches).double()
    together = seen.T @ seen / n
    single = torch.full((patches,), keep / patches, dtype=torch.float64)
    pair = keep * (keep - 1) / (patches * (patches - 1))
    want = torch.full((patches, patches), pair, dtype=torch.float64).diagonal_scatter(single)
    assert ((together - want).abs() <= 5 * (want * (1 - want) / n).sqrt()).all()


@pytest.mark.parametrize("ratio", [0.0, 1.0, 0.999, -0.5, 1.5])
def test_random_masks_that_hide_all_or_nothing_are_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio"):
        masking.random(2, 4, generator=seeded(), ratio=ratio)
