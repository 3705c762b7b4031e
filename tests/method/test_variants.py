"""What the paper compares StoP with, and noise conditioned on the image: each is what it says."""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import seeded
from stopmim import load_model, pretrain
from stopmim.base.errors import UserError
from stopmim.data.order import shares
from stopmim.data.sources.scenes import Scenes
from stopmim.health.measure import Health, noise_to_signal
from stopmim.insight.figures.similarity import of_model, seen
from stopmim.insight.figures.subject import load
from stopmim.method import masks as masking
from stopmim.method.build import build, build_sampler, configure, draw_masks
from stopmim.method.encoder import VisionTransformer
from stopmim.method.loss import masked_loss
from stopmim.method.masks import Block
from stopmim.method.model import Batch, HalfResolution, MaskedImageModel
from stopmim.method.positions import (
    JitteredPositions,
    Positions,
    StochasticPositions,
    shifted,
    sincos_2d,
)
from stopmim.method.predictor import Noise, Predictor
from stopmim.train.draws import draw_noise
from stopmim.train.optimizer import adamw
from stopmim.train.rates import Rates
from stopmim.train.step import Step
from tiny import NoiseImages, assert_same_run, tiny

SIDE, WIDTH, ENCODER = 4, 12, 6
INDEX = torch.tensor([[0, 5], [3, 15]])
CPU = torch.device("cpu")

# Rectangles of 3 and more patches on the 6x6 grid of `tiny`, which have whole cells.
LARGE = {"targets": 2, "target_scale": [0.3, 0.4], "context_scale": [1.0, 1.0]}
CERTAIN = {"kind": "sincos", "sigma": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "jitter": {"positions": {"kind": "jitter"}, "optim.penalty_l1": 1e-3, "optim.penalty_l2": 0.01},
    "conditioned": {"positions": {"covariance": "conditioned"}},
    "lowres": {"positions": CERTAIN, "lowres": "max", "masking": LARGE},
}


def layer(width: int = WIDTH, encoder: int = ENCODER, seed: int = 0) -> nn.Linear:
    """A projection with a bias far from zero, so that it shows wherever it does not belong."""
    project = nn.Linear(encoder, width)
    with torch.no_grad():
        project.weight.copy_(torch.randn(width, encoder, generator=seeded(seed)))
        project.bias.fill_(10.0)
    return project


def psi(row: Tensor, col: Tensor, width: int) -> Tensor:
    """The sine-cosine position of any place, written down a second time."""
    omega = torch.tensor([10000 ** (-i / (width // 4)) for i in range(width // 4)]).double()
    x, y = (axis.double()[..., None] * omega for axis in (col, row))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)


# ------------------------------------------------------------------------------ jitter


def test_moved_positions_are_those_of_the_continuous_coordinates() -> None:
    by = 3 * torch.randn(14 * 14, 2, generator=seeded())
    row, col = (axis.flatten() for axis in torch.meshgrid(*[torch.arange(14.0)] * 2, indexing="ij"))
    want = psi(row + by[:, 0], col + by[:, 1], 48).float()
    torch.testing.assert_close(shifted(sincos_2d(14, 48), by), want, atol=2e-6, rtol=0)
    assert torch.equal(shifted(sincos_2d(14, 48), torch.zeros(2)), sincos_2d(14, 48))


def test_jitter_has_the_variance_sigma_in_each_coordinate_and_no_correlation() -> None:
    positions = JitteredPositions(SIDE, WIDTH, 0.25)
    drawn = positions.draw(torch.zeros(100_000, 2, dtype=torch.long), generator=seeded())
    assert drawn.shape == (100_000, 2, 2)
    found = drawn.flatten(1).double().T.cov()  # two tokens, two coordinates each
    error = 5 * 0.25 * math.sqrt(2 / 100_000)
    torch.testing.assert_close(found, 0.25 * torch.eye(4).double(), atol=error, rtol=0)


def test_a_jittered_token_is_the_moved_position_and_the_mask_token() -> None:
    positions = JitteredPositions(SIDE, WIDTH, 1.0)
    noise = positions.draw(INDEX, generator=seeded())
    place = psi(INDEX // SIDE + noise[..., 0], INDEX % SIDE + noise[..., 1], WIDTH).float()
    masked = positions(INDEX, noise=noise)
    torch.testing.assert_close(masked, place + positions.mask_token[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(positions(INDEX, noise=noise, tokens="context"), place)
    assert torch.equal(positions(INDEX, None, seeded()), masked)  # draws the same by itself
    assert torch.equal(positions.eval()(INDEX), positions.mean(INDEX))
    still = positions(INDEX, noise=torch.zeros_like(noise), tokens="context")
    assert torch.equal(still, sincos_2d(SIDE, WIDTH)[INDEX])
    assert set(positions.state_dict()) == {"table", "mask_token"}


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf])
def test_a_jitter_that_is_no_variance_is_refused(sigma: float) -> None:
    with pytest.raises(ValueError, match="sigma is a variance"):
        JitteredPositions(SIDE, WIDTH, sigma)


# ------------------------------------------------------------------------------ conditioned


def conditioned(sigma: float = 0.25) -> StochasticPositions:
    return StochasticPositions(SIDE, WIDTH, sigma, covariance="conditioned")


def context(count: int = 5, images: int = 1) -> Tensor:
    """Tokens that differ much more in some directions than in others, around a mean far from 0."""
    stretch = torch.tensor([5.0, 2.0, 1.0, 0.3, 0.1, 0.0])
    return 3 + stretch * torch.randn(images, count, ENCODER, generator=seeded(9))


def spread_of(s: Tensor) -> Tensor:
    """The covariance of tokens (C, D)."""
    return s.double().T.cov(correction=0)


def test_conditioned_noise_has_the_covariance_of_the_projected_context() -> None:
    positions, project, s, n = conditioned(), layer(), context()[0], 200_000
    index = torch.zeros(n, dtype=torch.long)
    added = positions(index, project, seeded(2), context=s) - positions.mean(index)
    found = added.detach().double().T.cov()
    a, c = project.weight.detach().double(), spread_of(s)
    want = 0.25 * ENCODER / c.trace() * a @ c @ a.T
    error = 5 * ((want.diagonal()[:, None] * want.diagonal() + want**2) / n).sqrt()
    assert ((found - want).abs() <= error).all()
    assert ((found - 0.25 * a @ a.T).abs() > error).any()  # not the isotropic noise of StoP


def test_every_image_has_noise_of_its_own_context_and_every_block_of_its_image() -> None:
    positions, project, s = conditioned(), layer(), context(images=2)
    index = INDEX.expand(3, 2, 2)  # (M, B, K)
    noise = positions.draw(index, project, seeded(), seen=5)
    assert noise.shape == (3, 2, 2, 5)
    together = positions(index, project, noise=noise, context=s)
    for b in range(2):
        alone = positions(index[:, b], project, noise=noise[:, b], context=s[b])
        torch.testing.assert_close(together[:, b], alone)
    other = positions(index, project, noise=noise, context=torch.stack([s[0], s[1].flip(0)]))
    assert torch.equal(other[:, 0], together[:, 0])
    assert not torch.allclose(other[:, 1], together[:, 1])


def test_before_a_it_has_the_variance_of_stop_so_that_sigma_means_the_same() -> None:
    whole = nn.Linear(ENCODER, ENCODER).requires_grad_(False)
    whole.weight.copy_(torch.eye(ENCODER))
    for s in (context(), 100 * context(), 0.01 * context()):
        assert float(conditioned().power(whole.weight, s)) == pytest.approx(
            0.25 * ENCODER, rel=1e-4
        )
    tied = StochasticPositions(SIDE, WIDTH, 0.25)
    assert float(tied.power(whole.weight)) == pytest.approx(0.25 * ENCODER)


def test_no_matrix_lowers_conditioned_noise_more_than_what_is_seen_of_the_context() -> None:
    """Unlike isotropic noise, from which a matrix can turn away."""
    s, project = context(), layer(2).requires_grad_(False)
    axes = torch.linalg.eigh(spread_of(s[0])).eigenvectors.T.float()  # rows, least spread first
    matrices = [torch.randn(2, ENCODER, generator=seeded(i)) for i in range(3)]
    matrices += [axes[-2:], axes[1:3], 1e-3 * axes[-2:]]  # null spaces chosen, and a tiny A
    ratios: dict[str, list[float]] = {"conditioned": [], "projected": []}
    for matrix in matrices:
        project.weight.copy_(matrix)
        seen = F.linear(s, project.weight)[0].var(dim=0, correction=0).sum()
        for name, found in ratios.items():
            positions = StochasticPositions(SIDE, 4, 0.25, covariance=name)  # type: ignore[arg-type]
            found.append(float(positions.power(project.weight, s) / seen))
    constant = 0.25 * ENCODER / float(spread_of(s[0]).trace())
    assert ratios["conditioned"] == pytest.approx([constant] * len(matrices), rel=1e-3)
    assert max(ratios["projected"]) > 10 * min(ratios["projected"])


def test_the_encoder_learns_nothing_through_conditioned_noise_and_a_does() -> None:
    positions, project, s = conditioned(), layer(), context().requires_grad_()
    positions(INDEX[:1], project, seeded(), context=s).square().sum().backward()
    assert s.grad is None
    assert project.weight.grad is not None
    assert project.weight.grad.abs().max() > 0
    assert project.bias.grad is None


def test_the_gradient_of_the_context_in_the_predictor_is_that_of_its_own_tokens_alone() -> None:
    predictor = Predictor(conditioned(), ENCODER, 1, 3)
    s, seen = context(3, 2).requires_grad_(), torch.tensor([[1, 2, 4], [0, 6, 7]])
    noise = predictor.draw(seen, INDEX[None], seeded())
    assert noise.masked is not None
    assert noise.masked.shape == (1, 2, 2, 3)
    (through,) = torch.autograd.grad(
        predictor(s, seen, INDEX[None], noise).square().sum(), s, retain_graph=True
    )
    # The same tokens with noise that is a constant: as if it came from nowhere.
    still = predictor(s, seen, INDEX[None], Noise(torch.zeros_like(noise.masked)))
    fixed = Predictor(StochasticPositions(SIDE, WIDTH, 0.25), ENCODER, 1, 3)
    fixed.load_state_dict(predictor.state_dict())
    centred = (s - s.mean(dim=1, keepdim=True)).detach()
    scale = (centred.square().mean(dim=(1, 2), keepdim=True)).rsqrt()
    constant = Noise(noise.masked @ (centred * scale))
    (plain,) = torch.autograd.grad(fixed(s, seen, INDEX[None], constant).square().sum(), s)
    torch.testing.assert_close(through, plain)
    assert not torch.allclose(still, predictor(s, seen, INDEX[None], noise))


@pytest.mark.parametrize("s", [context(1), context(1).expand(1, 5, ENCODER)], ids=["one", "same"])
def test_context_tokens_that_are_all_the_same_make_no_noise_and_no_nan(s: Tensor) -> None:
    positions, project = conditioned(), layer()
    noise = positions.draw(INDEX[:1], project, seeded(), seen=s.shape[1])
    found = positions(INDEX[:1], project, noise=noise, context=s)
    torch.testing.assert_close(found, positions.mean(INDEX[:1]), atol=1e-3, rtol=0)
    found.sum().backward()
    assert project.weight.grad is not None
    assert project.weight.grad.isfinite().all()


def test_the_similarity_figure_of_conditioned_noise_is_of_an_image(tmp_path: Path) -> None:
    images = NoiseImages()
    run = pretrain(images, tmp_path, tiny(**VARIANTS["conditioned"]), stop_at=1)
    (subject,) = load([run], images, 1)
    found = [of_model(subject.model, 0, context=k * seen(subject)) for k in (1.0, 0.0)]
    assert found[0].strength > 0
    assert found[1].strength == 0  # an image whose tokens are all the same


def test_conditioned_noise_without_a_context_is_refused() -> None:
    with pytest.raises(ValueError, match="made from context tokens"):
        conditioned()(INDEX, layer())


# ------------------------------------------------------------------------------ low resolution


@pytest.mark.parametrize("side", [8, 14])
def test_cells_are_whole_inside_their_block_and_as_many_wherever_it_lies(side: int) -> None:
    for height in range(3, side):
        block = Block(height, 3 + (2 * height) % (side - 3))
        rows, cols = side - block.height + 1, side - block.width + 1
        top, left = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        inside = torch.arange(block.height)[:, None] * side + torch.arange(block.width)
        targets = (top * side + left)[..., None] + inside.flatten()  # (rows, cols, K)
        found = masking.cells(targets, block, side)
        assert found.shape == (rows, cols, (block.height - 1) // 2 * ((block.width - 1) // 2))
        assert (found // side % 2 == 0).all()
        assert (found % side % 2 == 0).all()
        for patch in (0, 1, side, side + 1):  # all four lie in the block
            assert (found[..., None] + patch == targets[:, :, None]).any(dim=-1).all()
        assert all(len(set(cell.tolist())) == len(cell) for cell in found.flatten(0, 1))
        even = torch.arange(0, side, 2)
        every = (even[:, None] * side + even).flatten()
        assert torch.equal(found.unique(), every)  # none is out of reach


def low_model(kind: Literal["bilinear", "max"] | None, side: int = 4) -> MaskedImageModel:
    torch.manual_seed(0)
    encoder = VisionTransformer(8 * side, 8, 24, 1, 3)
    predictor = Predictor(Positions(side, WIDTH), 24, 1, 3)
    return MaskedImageModel(encoder, predictor, HalfResolution(side, kind) if kind else None)


def low_batch(side: int = 4) -> Batch:
    targets = torch.tensor([[[0, 1, 2], [1, 2, 3]]])  # (M, B, K), of no consequence here
    cells = torch.tensor([[[0, 2], [2 * side, 2 * side + 2]]])
    images = torch.randn(2, 3, 8 * side, 8 * side, generator=seeded())
    return Batch(images, torch.tensor([[5, 6, 7], [4, 9, 3]]), targets, cells)


@pytest.mark.parametrize("side", [4, 5])
def test_low_resolution_targets_are_the_resized_map_at_the_cells(side: int) -> None:
    batch = low_batch(side)
    for kind in ("bilinear", "max"):
        model = low_model(kind, side)
        _, target, predicted, low = model(batch)
        assert predicted.shape == low.shape == (1, 2, 2, 24)
        every = torch.arange(side**2).expand(1, 2, -1)
        grid = model.targets(batch.images, every)[0].unflatten(1, (side, side))  # (B, S, S, D)
        grid = grid.permute(0, 3, 1, 2)[..., : side // 2 * 2, : side // 2 * 2]  # whole cells
        if kind == "max":
            small = F.max_pool2d(grid, 2)
        else:
            small = F.interpolate(grid, scale_factor=0.5, mode="bilinear", align_corners=False)
        want = torch.stack([small[0, :, 0, :2].T, small[1, :, 1, :2].T])
        torch.testing.assert_close(low[0], want)
        torch.testing.assert_close(target, model.targets(batch.images, batch.targets))
        assert not low.requires_grad


def test_low_resolution_predictions_are_asked_for_at_the_centres_of_the_cells() -> None:
    model, batch = low_model("max"), low_batch()
    assert batch.cells is not None
    asked: list[Tensor] = []
    model.predictor.predictor_blocks[0].register_forward_pre_hook(
        lambda _, inputs: asked.append(inputs[0][:, 3:])
    )
    predicted, _, _, _ = model(batch)
    row, col = batch.cells[0] // 4 + 0.5, batch.cells[0] % 4 + 0.5
    centre = psi(row, col, WIDTH).float() + model.predictor.positions.mask_token[0]
    torch.testing.assert_close(asked[1], centre, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(asked[0], model.predictor.positions(batch.targets[0]))
    table = model.predictor.positions.table[0]
    mean = torch.stack([table[batch.cells[0] + step] for step in (0, 1, 4, 5)]).mean(dim=0)
    assert (asked[1] - model.predictor.positions.mask_token[0] - mean).abs().max() > 0.05
    # Both scales together change nothing about the first.
    plain, _ = low_model(None)(batch)
    torch.testing.assert_close(predicted, plain)


def test_the_two_losses_count_alike_however_many_tokens_each_has() -> None:
    model, batch = low_model("bilinear"), low_batch()
    predicted, target, low, coarse = model(batch)
    want = (F.smooth_l1_loss(predicted, target) + F.smooth_l1_loss(low, coarse)) / 2
    torch.testing.assert_close(masked_loss(model, model.target, batch, Noise()).loss, want)
    assert predicted.shape[2] != low.shape[2]


def test_a_low_resolution_model_wants_cells_and_certain_sine_cosine_positions() -> None:
    with pytest.raises(ValueError, match="needs the cells of the targets"):
        low_model("max")(low_batch()._replace(cells=None))
    encoder = VisionTransformer(32, 8, 24, 1, 3)
    for positions in (StochasticPositions(4, 12, 0.25), Positions(4, 12, base="learned")):
        with pytest.raises(ValueError, match="certain sine-cosine positions"):
            MaskedImageModel(encoder, Predictor(positions, 24, 1, 3), HalfResolution(4))


# ------------------------------------------------------------------------------ the penalty


def test_the_penalty_adds_its_gradient_to_that_of_a_alone_and_its_value_to_no_loss() -> None:
    batch, optim = low_batch(), configure(tiny()).optim
    plain, values = {}, {}
    for penalty in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.25), (0.5, 0.25)):
        model = low_model(None)
        a = model.predictor.predictor_embed.weight
        before = a.detach().clone()
        own = optim.model_copy(update={"penalty_l1": penalty[0], "penalty_l2": penalty[1]})
        update = Step(model, adamw(model, own), own, n_parts=4)
        found = update([(batch, Noise())] * 4, Rates(own.lr, 0.0, 1.0))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if not any(penalty):
            plain, values = gradients, found
            assert "penalty" not in found
            continue
        assert torch.equal(found["loss"], values["loss"])
        l1, l2 = penalty
        want = l1 * before.abs().sum() + l2 * before.square().sum()
        torch.testing.assert_close(found["penalty"], want)
        for name, gradient in gradients.items():
            extra = (l1 * before.sign() + 2 * l2 * before) if "predictor_embed.w" in name else 0.0
            torch.testing.assert_close(gradient, plain[name] + extra)
        assert found["grad_norm"] > values["grad_norm"]


# ------------------------------------------------------------------------------ as runs


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_resumes_exactly_and_loads_as_itself(name: str, tmp_path: Path) -> None:
    config = tiny(**VARIANTS[name])
    whole = pretrain(NoiseImages(), tmp_path / "whole", config, stop_at=2)
    pretrain(NoiseImages(), tmp_path / "cut", config, stop_at=1)
    assert_same_run(pretrain(NoiseImages(), tmp_path / "cut", config, stop_at=2), whole)
    assert ("penalty" in whole.metrics[0]) == ("optim.penalty_l1" in VARIANTS[name])
    start, loaded = build(configure(config)), load_model(whole.path)
    ours, theirs = start.predictor.positions, loaded.predictor.positions
    assert type(theirs) is type(ours)
    assert loaded.target == start.target
    for about in ("sigma", "covariance", "bias"):
        assert getattr(theirs, about, None) == getattr(ours, about, None)
    assert loaded.state_dict().keys() == build(configure(tiny())).state_dict().keys()
    a, b = (model.predictor.predictor_embed.weight for model in (start, loaded))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_makes_the_same_update_from_a_batch_in_parts(name: str) -> None:
    config = configure(tiny(**VARIANTS[name]))
    images = torch.randn(8, 3, 24, 24, generator=seeded())
    sizes = build_sampler(config).sizes(config.seed, 5)
    found = []
    for cut in (1, 4):
        model, parts = build(config).train(), shares(8, cut)
        batches = [
            (
                model.target.batch(images[part], masks, sizes),
                draw_noise(model.predictor, masks, part, config, 5, torch.float32),
            )
            for masks, part in zip(draw_masks(config, 5, parts, CPU), parts, strict=True)
        ]
        sgd = torch.optim.SGD(
            [{"params": list(model.parameters()), "decays": False}], lr=1.0, fused=True
        )
        values = Step(model, sgd, config.optim, n_parts=cut)(batches, Rates(1.0, 0.0, 0.9))
        found.append(({k: values[k] for k in values if "std" not in k}, model.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["jitter", "conditioned"])
def test_the_draws_of_a_variant_do_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    config = configure(tiny(**VARIANTS[name], optim={"batch_size": 160}))
    predictor = build(config).predictor

    def noise(parts: list[slice]) -> Tensor:
        drawn = [
            draw_noise(predictor, masks, part, config, 3, torch.float32).masked
            for masks, part in zip(draw_masks(config, 3, parts, CPU), parts, strict=True)
        ]
        return torch.cat([one for one in drawn if one is not None], dim=1)

    whole = noise(shares(160, 1))
    for cut in (2, 5):
        assert torch.equal(noise(shares(160, cut)), whole)
    width, variance = {"jitter": (2, 1.0), "conditioned": (10, 0.25 / 10)}[name]
    assert whole.shape[-1] == width
    assert float(whole.var()) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("name", ["jitter", "conditioned", "fixed"])
def test_noise_to_signal_is_the_power_that_the_draws_have(name: str) -> None:
    changes = VARIANTS.get(name, {"positions": {"covariance": name}})
    config = configure(tiny(**changes))
    model = build(config)
    predictor, positions = model.predictor, model.predictor.positions
    with torch.no_grad():
        predictor.predictor_embed.weight.mul_(10)
    health = Health(Scenes(32, size=24), config, CPU)
    s = health._context(model)
    assert (s is None) == (name != "conditioned")
    images = 32 if s is None else len(s)
    index = torch.arange(36).expand(40, images, 36)
    noise = positions.draw(index, predictor.noise_layer, seeded(), seen=10)
    with torch.no_grad():
        still = positions.mean(index)
        added = positions(index, predictor.noise_layer, noise=noise, context=s) - still
        power = added.square().sum(-1).mean() / still.square().sum(-1).mean()
    assert noise_to_signal(model, s) == pytest.approx(float(power), rel=0.03)
    assert health.measure(model)["noise_to_signal"] == noise_to_signal(model, s)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions.covariance": "conditioned", "positions.tokens": "both"}, "masked tokens"),
        ({"positions.kind": "jitter", "positions.base": "learned"}, "base has no effect"),
        ({"positions.kind": "jitter", "positions.covariance": "fixed"}, "covariance has no effect"),
        ({"lowres": "max"}, "lowres: needs positions.kind: sincos, got stochastic"),
        (
            {"lowres": "max", "positions.kind": "sincos", "masking.kind": "random"},
            "config: lowres: needs rectangles; set masking.kind: multiblock",
        ),
        (
            {"lowres": "max", "positions.kind": "sincos", "masking.target_scale": [0.02, 0.05]},
            "config: lowres: a target of 2x2 on a 14x14 grid need not hold one whole cell",
        ),
        ({"optim.penalty_l1": -0.1}, "optim.penalty_l1: input should be greater than or equal"),
    ],
    ids=str,
)
def test_a_variant_that_cannot_be_is_refused_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        configure("vit_b16_stop", changes)
    assert len(str(caught.value).splitlines()) == 1


def test_a_jitter_of_one_patch_is_the_default_whatever_the_model() -> None:
    for preset in ("vit_b16_stop", "vit_h14_stop", "vit_b16_stop_released"):
        assert configure(preset, {"positions.kind": "jitter"}).positions.sigma == 1.0
