"""Ideas since the paper, all off by default: each is what it says, alone and with StoP."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import seeded
from stopmim import pretrain
from stopmim.base.errors import CheckpointError, UserError
from stopmim.data.order import shares
from stopmim.health.measure import Health, patch_features, patch_targets
from stopmim.health.reference import find_reference
from stopmim.insight.report.page import write_report
from stopmim.method.build import build, configure, draw_masks
from stopmim.method.loss import masked_loss
from stopmim.method.masks import nearness
from stopmim.method.model import Batch, Features, MaskedImageModel, variance_covariance
from stopmim.method.positions import StochasticPositions
from stopmim.method.predictor import Noise
from stopmim.train.draws import draw_noise
from stopmim.weights.export import export
from stopmim.weights.load import load_model
from tiny import NoiseImages, assert_same_run, tiny

CPU = torch.device("cpu")
SINCOS: dict[str, Any] = {"positions": {"kind": "sincos", "sigma": None}}
OPTIONS: dict[str, dict[str, Any]] = {
    "layers": {"target_layers": 2},
    "visible": {"visible_loss": 0.5},
    "vicreg": {"vicreg": 0.01},
}
EVERY = {key: value for change in OPTIONS.values() for key, value in change.items()}


def case(**changes: Any) -> tuple[MaskedImageModel, Batch, Noise]:
    """A model, a batch of eight images, and its noise."""
    config = configure(tiny(**changes))
    model = build(config)
    masks = draw_masks(config, 3, [slice(0, 8)], CPU)[0]
    images = torch.randn(8, 3, 24, 24, generator=seeded())
    noise = draw_noise(model.predictor, masks, slice(0, 8), config, 3, torch.float32)
    return model, Batch(images, *masks), noise


def loss_of(model: MaskedImageModel, batch: Batch, noise: Noise) -> Tensor:
    return masked_loss(model, model.target, batch, noise).loss


@pytest.mark.parametrize("positions", [{}, SINCOS], ids=["StoP", "sine-cosine"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_part_learns_but_the_target_encoder(name: str, positions: dict[str, Any]) -> None:
    model, batch, noise = case(**positions | OPTIONS[name])
    loss_of(model, batch, noise).backward()
    assert model.target_encoder is not None
    assert all(p.grad is None for p in model.target_encoder.parameters())
    for part in (model.encoder, model.predictor):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters())


# ------------------------------------------------------------------------------ several layers


@pytest.mark.parametrize(("layers", "after"), [(2, [2, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4])])
def test_layers_are_evenly_spaced_and_each_is_normed_alone(layers: int, after: list[int]) -> None:
    model, batch, _ = case(target_layers=layers)
    teacher = model.branch()
    with torch.no_grad():
        teacher.norm.weight.uniform_(0.5, 2.0, generator=seeded())  # its effect must show
        x, want = teacher.embed(batch.images), []
        for number, block in enumerate(teacher.blocks, start=1):
            x = block(x)
            if number in after:
                hidden = teacher.norm(x) if number == 4 else x
                mean, std = (
                    hidden.mean(-1, keepdim=True),
                    hidden.var(-1, correction=0, keepdim=True),
                )
                want.append((hidden - mean) / (std + 1e-5).sqrt())
    found = patch_targets(model, batch.images)
    assert found.shape == (8, 36, layers * 96)
    torch.testing.assert_close(found, torch.cat(want, dim=-1))
    assert model(batch)[0].shape == model(batch)[1].shape
    # What is measured of the encoder is its last layer, as of a model that predicts nothing else.
    plain = Features().of(teacher, batch.images, torch.arange(36).expand(1, 8, -1))[0]
    torch.testing.assert_close(patch_features(model, batch.images), plain.detach())


def test_the_rank_of_several_layers_is_that_of_the_last() -> None:
    """Early layers keep their rank in a collapse: together they would hide it."""
    config = configure(tiny(target_layers=4))
    model, plain = build(config), build(configure(tiny()))
    assert model.target_encoder is not None
    for one in (model, plain):  # the last block alone writes one and the same into all tokens
        with torch.no_grad():
            one.branch().blocks[-1].mlp.fc2.bias.fill_(1e4)  # type: ignore[union-attr,operator]
            one.branch().blocks[-1].mlp.fc2.bias[0] = -1e4  # type: ignore[union-attr,operator]
    health = Health(NoiseImages(), config, CPU)
    found, want = health.measure(model), Health(NoiseImages(), config, CPU).measure(plain)
    assert found["target_rank"] == pytest.approx(want["target_rank"])
    assert found["target_rank"] < 3
    assert "feature_rank" not in found


# ------------------------------------------------------------------------------ visible patches


def test_the_weight_of_a_visible_patch_is_one_over_the_root_of_its_distance() -> None:
    _, batch, _ = case()
    found = nearness(batch.context, batch.targets, 6)
    assert found.shape == (4, 8, batch.context.shape[1])
    for m, b, c in [(0, 0, 0), (1, 3, 5), (3, 7, 9), (2, 4, 1)]:
        row, col = divmod(int(batch.context[b, c]), 6)
        places = [divmod(int(j), 6) for j in batch.targets[m, b]]
        distance = min(math.dist((row, col), place) for place in places)
        assert found[m, b, c] == pytest.approx(1 / math.sqrt(distance))
    overlap = nearness(torch.tensor([[7]]), torch.tensor([[[7, 8]]]), 6)  # released masks may
    assert overlap.tolist() == [[[1.0]]]


def test_the_loss_of_visible_patches_comes_on_top_of_that_of_masked_ones() -> None:
    model, batch, noise = case(visible_loss=0.5)
    plain, same, _ = case()
    predicted, target, _ = model(batch, noise)
    torch.testing.assert_close(predicted, plain(same, noise)[0])  # masked ones are as without
    torch.testing.assert_close(target, plain(same, noise)[1])
    inputs: list[Tensor] = []
    model.predictor.predictor_norm.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    total = loss_of(model, batch, noise)
    seen = batch.context.shape[1]
    every = model.predictor.predictor_proj(model.predictor.predictor_norm(inputs[0]))
    answers = every[:, :seen].unflatten(0, (4, 8))  # of the context tokens, beside each block
    extra = torch.zeros(4, 8, seen)
    for m in range(4):
        want = model.targets(batch.images, batch.context[None])[0]
        extra[m] = F.smooth_l1_loss(answers[m], want, reduction="none").mean(-1)
    extra *= nearness(batch.context, batch.targets, 6)
    torch.testing.assert_close(total, loss_of(plain, same, noise) + 0.5 * extra.mean())


# ------------------------------------------------------------------------------ VICReg


def test_vicreg_is_its_two_terms_of_the_mean_features_of_an_image() -> None:
    model, batch, noise = case(vicreg=0.01)
    with torch.no_grad():
        for scale in (0.1, 3.0):  # some deviations below 1, and none
            model.encoder.norm.weight.fill_(scale)
            x = model.encoder(batch.images, batch.context).mean(dim=1).double().numpy()
            covariance = np.cov(x, rowvar=False)
            hinge = np.maximum(0, 1 - np.sqrt(covariance.diagonal() + 1e-4)).mean()
            others = covariance[~np.eye(96, dtype=bool)]
            want = 25 * hinge + (others**2).sum() / 96
            found = loss_of(model, batch, noise)
            plain = Features().loss(model(batch, noise)[:2])
            assert float(found - plain) == pytest.approx(0.01 * want, rel=1e-4)


def test_vicreg_pushes_collapsed_features_apart_and_takes_one_image() -> None:
    x = (1e-3 * torch.randn(16, 8, generator=seeded())).requires_grad_()
    (gradient,) = torch.autograd.grad(variance_covariance(x), x)
    assert (gradient * (x - x.mean(dim=0))).sum() < 0  # a step along it lengthens deviations
    assert variance_covariance(x[:1]).isfinite()
    with torch.autocast("cpu", torch.bfloat16):  # statistics stay in float32
        assert torch.equal(variance_covariance(x), variance_covariance(x))
        assert variance_covariance(x).dtype == torch.float32


def test_vicreg_in_parts_is_the_mean_over_parts_and_the_rest_does_not_change(
    tmp_path: Path,
) -> None:
    """Statistics are those of a part; other losses do not depend on how a batch is cut."""
    logged = {}
    for parts in (1, 2):
        for weight in (0.0, 1.0):
            config = tiny(vicreg=weight, visible_loss=0.5, runtime={"accumulate": parts})
            run = pretrain(NoiseImages(), tmp_path / f"{parts}-{weight}", config, stop_at=1)
            logged[parts, weight] = run.metrics[0]["loss"]
    assert logged[1, 0.0] == pytest.approx(logged[2, 0.0], rel=1e-5)
    terms = [logged[parts, 1.0] - logged[parts, 0.0] for parts in (1, 2)]
    assert min(terms) > 0.1
    assert terms[0] != pytest.approx(terms[1], rel=1e-3)


# ------------------------------------------------------------------------------ levels of noise


def test_all_tokens_of_a_block_have_one_of_the_levels() -> None:
    levels = (0.0, 1.0, 4.0)
    positions = StochasticPositions(6, 24, 0.25, levels=levels)
    a = torch.nn.Linear(4096, 24)
    noise = positions.draw(torch.zeros(5, 60, 3, dtype=torch.int64), a, seeded())
    variance = noise.square().mean(dim=-1) / 0.25  # (5, 60, 3)
    near = (variance[..., None] - torch.tensor(levels)).abs().argmin(dim=-1)
    assert (near == near[..., :1]).all()  # one for the tokens of a block
    assert (variance - torch.tensor(levels)[near]).abs().max() < 0.5
    share = near[..., 0].flatten().bincount(minlength=3) / 300
    assert (share - 1 / 3).abs().max() < 0.1  # equally often
    assert len({tuple(x) for x in near[:, :8, 0].T.tolist()}) > 1  # blocks of an image differ
    length = torch.nn.functional.linear(noise, a.weight).square().sum(-1).mean()
    torch.testing.assert_close(positions.power(a.weight), length, rtol=0.15, atol=0)


def test_levels_do_not_depend_on_how_a_batch_is_cut() -> None:
    config = configure(tiny(**{"positions.levels": [0.25, 1.0, 4.0], "optim.batch_size": 80}))
    predictor = build(config).predictor

    def drawn(count: int) -> Tensor:
        parts = shares(80, count)
        masks = draw_masks(config, 2, parts, CPU)
        found = [
            draw_noise(predictor, own, part, config, 2, torch.float32).masked
            for own, part in zip(masks, parts, strict=True)
        ]
        return torch.cat([x for x in found if x is not None], dim=1)

    assert torch.equal(drawn(1), drawn(5))


def test_a_negative_ramp_is_the_reverse_of_a_ramp() -> None:
    found: dict[float, list[float]] = {}
    for ramp in (2.0, -2.0):
        positions: Any = build(configure(tiny(**{"positions.ramp": ramp}))).predictor.positions
        found[ramp] = []
        for step in (0, 5, 10, 15):  # five updates an epoch
            positions.at_step(step, 5)
            found[ramp].append(positions.sigma)
    assert found[2.0] == [0.0, 0.125, 0.25, 0.25]
    assert found[-2.0] == [0.25, 0.125, 0.0, 0.0]


# ------------------------------------------------------------------------------ all of them


def test_all_options_at_once_are_exact_on_resume_and_named_everywhere(tmp_path: Path) -> None:
    noise = {"positions.levels": [0.5, 2.0], "positions.ramp": -1.5}
    config = tiny(**EVERY | noise | {"runtime.health_every": 4})
    whole = pretrain(NoiseImages(), tmp_path / "whole", config)
    pretrain(NoiseImages(), tmp_path / "cut", config, stop_at=4)
    assert_same_run(pretrain(NoiseImages(), tmp_path / "cut", config), whole)
    said = load_model(whole.path).describe()
    words = [
        "2 layers predicted",
        "visible patches weigh 0.5",
        "VICReg 0.01",
        "times one of 0.5, 2",
    ]
    for word in (*words, "falling to 0 in 1.5 epochs"):
        assert word in said
        assert word in write_report(whole).read_text()
    with pytest.raises(CheckpointError, match="I-JEPA's layout has no place for targets of 2 lay"):
        export(whole.path, "ijepa", tmp_path / "out")
    export(whole.path, "timm", tmp_path / "timm")  # the encoder alone is as any other
    card = " ".join((tmp_path / "timm" / "README.md").read_text().split())
    assert "EMA 0.999 to 0.99, 2 layers predicted, visible patches weigh 0.5, VICReg 0.01," in card


def test_an_export_knows_its_levels_and_a_loss_beside_does_not_hinder_it(tmp_path: Path) -> None:
    config = tiny(visible_loss=0.5, vicreg=0.01, **{"positions.levels": [0.5, 2.0]})
    run = pretrain(NoiseImages(), tmp_path / "run", config, stop_at=1)
    export(run.path, "ijepa", tmp_path / "out")
    back: Any = load_model(tmp_path / "out" / "model.pth.tar").predictor.positions
    assert back.levels == (0.5, 2.0)
    drawn = back.draw(torch.arange(6).expand(1, 8, -1), torch.nn.Linear(96, 24), seeded())
    assert drawn.isfinite().all()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_is_not_compared_with_the_reference_of_another_loss(name: str) -> None:
    assert find_reference(configure("tiny_cpu"), {"source": "scenes:9:48"}) is not None
    assert find_reference(configure("tiny_cpu", OPTIONS[name]), {"source": "scenes:9:48"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layers": 5}, "target_layers: vit_micro4 has 4, got 5"),
        (SINCOS | {"lowres": "max", "vicreg": 1.0}, "vicreg has no effect with lowres: max"),
        ({"positions.levels": [1.0]}, "positions.levels"),
        ({"positions.levels": [1.0, -1.0]}, "positions.levels"),
        ({"positions.ramp": -3.0}, "positions.ramp -3 is more than 2 epochs"),
        ({"positions": {"kind": "jitter", "levels": [1.0, 2.0]}}, "levels has no effect"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        configure(tiny(**changes))


def test_everything_compiles_into_one_graph() -> None:
    """Otherwise a GPU would wait for Python within every update."""
    model, batch, noise = case(**EVERY | {"positions.levels": [0.5, 2.0]})
    found = torch.compile(masked_loss, backend="eager", fullgraph=True)
    want = masked_loss(model, model.target, batch, noise)
    torch.testing.assert_close(found(model, model.target, batch, noise).loss, want.loss)
