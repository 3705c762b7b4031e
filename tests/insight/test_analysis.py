import json
import math
import re

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import nn

from stopmim.base.random_keys import torch_generator
from stopmim.config.presets import tiny_cpu
from stopmim.config.schema import Config, resolve
from stopmim.data.crops import augment
from stopmim.data.loading import loader
from stopmim.data.order import shares
from stopmim.health.log import training_seconds
from stopmim.insight.figures import curves, pictures
from stopmim.insight.figures import similarity as similarity_module
from stopmim.insight.figures.similarity import Similarity, default_queries, similarity
from stopmim.method.build import draw_masks
from stopmim.method.positions import Positions, StochasticPositions

SIDE, WIDTH = 8, 48


def layer(scale: float = 0.3, bias: float = 0.0) -> nn.Linear:
    project = nn.Linear(32, WIDTH)
    with torch.no_grad():
        project.weight.normal_(0, scale, generator=torch.Generator().manual_seed(1))
        project.bias.fill_(bias)
    return project


def measured(positions: Positions, project: nn.Linear | None = None, draws: int = 64) -> Similarity:
    queries = torch.arange(SIDE * SIDE)
    generator = torch.Generator().manual_seed(2)
    return similarity(positions, project or layer(), queries, draws, generator)


def contrast(found: Similarity, column: int) -> float:
    """Similarity to itself minus that to the neighbours, averaged over the queries."""
    peaks = []
    for query, maps in zip(found.queries, found.maps, strict=True):
        row, col = divmod(int(query), SIDE)
        near = [(row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)]
        values = [maps[column][r, c] for r, c in near if 0 <= r < SIDE and 0 <= c < SIDE]
        peaks.append(maps[column][row, col] - np.mean(values))
    return float(np.mean(peaks))


# ------------------------------------------------------------------------------ similarity


def test_a_certain_position_is_most_similar_to_itself() -> None:
    found = measured(StochasticPositions(SIDE, WIDTH, 0.25))
    assert found.maps.shape == (SIDE * SIDE, 3, SIDE, SIDE)
    flat = found.maps[:, 0].reshape(SIDE * SIDE, -1)
    np.testing.assert_array_equal(flat.argmax(axis=1), found.queries)
    np.testing.assert_allclose(flat.max(axis=1), 1.0, atol=1e-12)


def test_without_variance_the_draws_are_the_certain_position() -> None:
    found = measured(StochasticPositions(SIDE, WIDTH, 0.0))
    for column in (1, 2):
        np.testing.assert_allclose(found.maps[:, column], found.maps[:, 0], atol=1e-6)
    assert found.found.tolist() == [1.0] * SIDE * SIDE
    assert found.strength == 0


def test_the_more_variance_the_less_a_place_stands_out_from_its_neighbours() -> None:
    found = [measured(StochasticPositions(SIDE, WIDTH, s)) for s in (0.0, 0.25, 1.0, 4.0)]
    certain = [contrast(f, 0) for f in found]
    mean = [contrast(f, 2) for f in found]
    assert max(certain) == min(certain)
    assert mean[0] > 1.2 * mean[1] > 1.2 * 1.2 * mean[2] > 1.2**3 * mean[3] > 0
    recognised = [f.found.mean() for f in found]
    assert recognised[0] == 1 > recognised[1] > recognised[2] > recognised[3]


def test_the_strength_of_the_noise_is_that_of_the_covariance_sigma_a_at() -> None:
    project = layer()
    found = measured(StochasticPositions(SIDE, WIDTH, 0.25), project)
    # |psi_j|^2 is the number of sine-cosine pairs, WIDTH / 2; E|A n|^2 = sigma trace(A A^T).
    expected = math.sqrt(0.25 * float(project.weight.detach().square().sum()) / (WIDTH / 2))
    assert found.strength == pytest.approx(expected, rel=0.02)


def test_neither_the_mask_token_nor_the_bias_of_a_enters_the_similarity() -> None:
    paper = StochasticPositions(SIDE, WIDTH, 0.25)
    with torch.no_grad():
        paper.mask_token.fill_(100.0)
    released = StochasticPositions(SIDE, WIDTH, 0.25, bias="project")
    a, b = measured(paper, layer(bias=0.0)), measured(released, layer(bias=10.0))
    np.testing.assert_allclose(a.maps, b.maps, atol=1e-5)


def test_noise_of_the_predictors_own_width_needs_no_projection() -> None:
    found = measured(StochasticPositions(SIDE, WIDTH, 0.25, covariance="fixed"))
    assert found.strength == pytest.approx(math.sqrt(0.25 * WIDTH / (WIDTH / 2)), rel=0.02)


def test_positions_without_noise_have_three_equal_maps() -> None:
    found = measured(Positions(SIDE, WIDTH))
    np.testing.assert_array_equal(found.maps[:, 1], found.maps[:, 0])
    np.testing.assert_allclose(found.maps[:, 2], found.maps[:, 0], atol=1e-12)


def test_the_same_generator_gives_the_same_maps() -> None:
    positions = StochasticPositions(SIDE, WIDTH, 0.25)
    np.testing.assert_array_equal(measured(positions).maps, measured(positions).maps)


@pytest.mark.parametrize("side", [1, 2, 3, 8, 14, 16])
def test_the_usual_queries_lie_on_the_grid(side: int) -> None:
    queries = default_queries(side)
    assert queries.min() >= 0
    assert queries.max() < side * side


def test_every_map_of_the_figure_marks_its_query_and_has_one_colour_scale() -> None:
    positions, queries = StochasticPositions(SIDE, WIDTH, 0.25), torch.tensor([9, 62])
    found = similarity(positions, layer(), queries, 4, torch.Generator().manual_seed(0))
    axes = similarity_module.figure(found).axes[:6]
    for i, ax in enumerate(axes):
        row, col = divmod(int(queries[i // 3]), SIDE)
        assert {patch.get_xy() for patch in ax.patches} == {(col, row)}  # type: ignore[attr-defined]
        assert ax.images[0].get_clim() == (found.maps.min(), found.maps.max())
        np.testing.assert_array_equal(ax.images[0].get_array(), found.maps[i // 3, i % 3])


# ------------------------------------------------------------------------------ masks


class Noise:
    """Images of random pixels."""

    labels: dict[str, np.ndarray] = {}  # noqa: RUF012 - as the protocol has it
    fingerprint = "noise"

    def __len__(self) -> int:
        return 40

    def read(self, i: int) -> np.ndarray:
        return np.random.default_rng(i).integers(0, 256, (60, 70, 3), dtype=np.uint8)

    def name(self, i: int) -> str:
        return f"noise {i}"


def small(**changes: object) -> Config:
    tree = tiny_cpu().model_dump(mode="json")
    tree["optim"]["batch_size"] = 8
    tree["masking"]["targets"] = 4
    tree["runtime"]["workers"] = 0
    for name, value in changes.items():
        tree[name] |= value
    return resolve(Config.model_validate_json(json.dumps(tree)))


@pytest.mark.parametrize("augmentation", ["crop", "released"])
def test_a_preview_is_what_training_is_fed(augmentation: str) -> None:
    config = small(data={"augmentation": augmentation})
    found = pictures.previews(Noise(), config, step=6, count=3)
    batch = next(loader(Noise(), config, 6, device=torch.device("cpu")))
    (masks,) = draw_masks(config, 6, shares(8, 1), torch.device("cpu"))
    pixels = batch.images.float()
    if augmentation == "released":
        pixels = augment(batch.images, batch.augmentation)
    for i, preview in enumerate(found):
        fed = pixels[i].permute(1, 2, 0).numpy()
        np.testing.assert_allclose(preview.image, fed, atol=0.5)
        np.testing.assert_array_equal(preview.context, masks.context[i])
        np.testing.assert_array_equal(preview.targets, masks.targets[:, i])
    assert len(found) == 3


def test_a_preview_of_more_images_than_a_batch_is_the_batch() -> None:
    assert len(pictures.previews(Noise(), small(), step=0, count=100)) == 8


def test_exactly_the_seen_patches_are_solid_and_no_pixel_changes_its_colour() -> None:
    (preview,) = pictures.previews(Noise(), small(), step=0, count=1)
    shown = pictures.faded(preview.image, preview.context, SIDE)
    np.testing.assert_array_equal(shown[..., :3], preview.image)
    patches = shown[..., 3].reshape(SIDE, 6, SIDE, 6).transpose(0, 2, 1, 3).reshape(SIDE * SIDE, -1)
    solid = np.flatnonzero((patches == 255).all(axis=1))
    faint = np.flatnonzero((patches == pictures.HIDDEN_ALPHA).all(axis=1))
    np.testing.assert_array_equal(solid, preview.context)
    np.testing.assert_array_equal(faint, np.setdiff1d(np.arange(SIDE * SIDE), preview.context))


def enclosed(segments: np.ndarray, side: int) -> list[int]:
    """The patches whose centre has an odd number of upright segments to its left."""
    upright = segments[segments[:, 0, 0] == segments[:, 1, 0]]
    x, top = upright[:, 0, 0], upright[:, :, 1].min(axis=1)
    bottom = upright[:, :, 1].max(axis=1)
    return [
        patch
        for patch in range(side * side)
        for cx, cy in [(patch % side + 0.5, patch // side + 0.5)]
        if ((x < cx) & (top < cy) & (cy < bottom)).sum() % 2
    ]


@pytest.mark.parametrize("inset", [0.0, 0.1, 0.4])
def test_an_outline_encloses_exactly_the_patches_of_its_block(inset: float) -> None:
    found = pictures.previews(Noise(), small(), step=3, count=8)
    blocks = [block for preview in found for block in preview.targets]
    scattered = torch.randperm(SIDE * SIDE, generator=torch_generator("test"))[:30].sort().values
    for block in [*blocks, scattered.numpy(), np.arange(SIDE * SIDE), np.array([], int)]:
        outline = pictures.outline(block, SIDE, inset)
        assert enclosed(outline, SIDE) == sorted(block.tolist())
        lengths = np.abs(outline[:, 0] - outline[:, 1]).sum(axis=1)
        assert lengths.sum() <= 4 * len(block)  # every border is drawn once


def test_an_outline_is_closed_whatever_its_inset() -> None:
    corner = np.array([0, 1, 2, 8, 10, 16, 17, 18, 27])  # has a hole, and touches itself
    for inset in (0.0, 0.2):
        ends = np.round(pictures.outline(corner, SIDE, inset).reshape(-1, 2), 6)
        _, count = np.unique(ends, axis=0, return_counts=True)
        assert set(count.tolist()) <= {2, 4}


def test_a_figure_of_masks_outlines_every_block_in_a_colour_of_its_own() -> None:
    (preview,) = pictures.previews(Noise(), small(), step=0, count=1)
    (axes,) = pictures.figure(preview).axes
    coloured = axes.collections[1::2]  # each over a dark line
    for lines, block in zip(coloured, preview.targets, strict=True):
        assert enclosed(np.array(lines.get_segments()), SIDE) == block.tolist()  # type: ignore[attr-defined]
    colours = [to_hex(lines.get_color()[0]) for lines in coloured]  # type: ignore[attr-defined]
    assert colours == list(pictures.BLOCKS[:4])
    alpha = np.asarray(axes.images[0].get_array())[:: 256 // SIDE, :: 256 // SIDE, 3]
    np.testing.assert_array_equal(np.flatnonzero(alpha == 255), preview.context)


def test_a_picture_of_a_large_image_of_noise_is_small_enough_for_a_page() -> None:
    image = np.random.default_rng(0).integers(0, 256, (896, 896, 3), dtype=np.uint8)
    preview = pictures.Preview(image, np.arange(70), np.arange(80).reshape(4, 20), 16)
    assert len(pictures.svg(pictures.figure(preview), "x")) < 500_000


# ------------------------------------------------------------------------------ curves


def row(step: object, **values: object) -> dict[str, object]:
    return {"step": step, **values}


def test_a_short_series_is_drawn_as_it_is() -> None:
    found = curves.curve([row(i, loss=i * i) for i in range(1, 6)], "loss")
    assert found.step.tolist() == [1, 2, 3, 4, 5]
    for values in (found.low, found.mean, found.high):
        assert values.tolist() == [1, 4, 9, 16, 25]


def test_a_long_series_is_thinned_and_keeps_its_extremes_and_its_mean() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    values[1234], values[4321] = 50.0, -60.0
    found = curves.curve([row(i, loss=float(v)) for i, v in enumerate(values)], "loss", 100)
    assert len(found.step) == 100
    assert (found.high.max(), found.low.min()) == (50.0, -60.0)
    assert found.mean.mean() == pytest.approx(values.mean())
    assert len(pictures.svg(curves.figure([found, found]), "x")) < 40_000


@pytest.mark.parametrize(
    "broken",
    [None, "0.5", True, math.nan, math.inf, -math.inf, 10**400, [1], {}],
    ids=lambda value: str(value)[:9],
)
def test_what_is_no_finite_number_is_left_out_of_a_curve(broken: object) -> None:
    rows = [row(1, loss=2.0), row(2, loss=broken), row(broken, loss=7.0), {}, row(3, loss=4.0)]
    found = curves.curve(rows, "loss")
    assert found.step.tolist() == [1, 3]
    assert found.mean.tolist() == [2, 4]


def test_a_curve_without_values_is_empty_and_can_be_drawn() -> None:
    found = curves.curve([row(1)], "loss")
    assert len(found.step) == 0
    assert pictures.svg(curves.figure([found]), "x").startswith("<svg")


@pytest.mark.parametrize("values", [(0.996, 0.99600001), (2.2e-4, 2.3e-4), (0.0, 1e-9), (5, 5)])
def test_the_ticks_of_an_axis_differ_however_little_a_curve_changes(
    values: tuple[float, float],
) -> None:
    picture = curves.figure([curves.curve([row(1, x=values[0]), row(2, x=values[1])], "x")])
    text = pictures.svg(picture, "x")
    (axes,) = picture.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == len(set(labels)) > 2
    assert max(map(len, labels)) <= 8
    assert all(f">{label}<" in text for label in labels[1:-1])


def test_training_time_is_updates_over_throughput_and_ignores_pauses() -> None:
    rows = [row(10, images_per_s=100.0), row(20, images_per_s=50.0), row(30)]
    rows.append(row(40, images_per_s=0))
    assert training_seconds(rows, batch_size=8) == 10 * 8 / 100 + 10 * 8 / 50


# ------------------------------------------------------------------------------ style


def line() -> Figure:
    return curves.figure([curves.curve([row(1, x=0.1), row(9, x=0.9)], "x")])


def test_figures_ignore_the_users_matplotlibrc_and_leave_it_alone() -> None:
    plain = pictures.svg(line(), "x")
    with matplotlib.rc_context({"text.usetex": True, "font.size": 40, "svg.fonttype": "path"}):
        assert pictures.svg(line(), "x") == plain
        assert matplotlib.rcParams["text.usetex"] is True


def test_figures_under_two_names_share_no_id_and_refer_to_their_own_only() -> None:
    a, b = (pictures.svg(line(), name) for name in ("a", "b"))
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in (a, b)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for text, own in zip((a, b), ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', text)) <= own


def test_the_lines_and_text_of_a_figure_take_the_colours_of_the_page() -> None:
    text = pictures.svg(line(), "x")
    assert f"var(--series-1, {pictures.SERIES[0]})" in text
    assert f"var(--ink, {pictures.INK})" in text
    assert "#000000" not in text
    assert "<style" not in text
