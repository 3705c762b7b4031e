"""MAE as a configuration: against recordings of its code, then with StoP, on disk and in use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import golden, seeded, under
from stopmim import load_encoder, load_model, pretrain
from stopmim.base.errors import CheckpointError
from stopmim.config.schema import OptimConfig
from stopmim.health.doctor import diagnose, examine
from stopmim.health.measure import patch_features, patch_targets
from stopmim.insight.figures.prediction import predict
from stopmim.insight.figures.subject import load, pixels
from stopmim.insight.report.page import write_report
from stopmim.method.build import build, configure, draw_masks
from stopmim.method.loss import masked_loss
from stopmim.method.model import Batch, Features, MaskedImageModel, Pixels, patchify
from stopmim.method.positions import StochasticPositions
from stopmim.method.predictor import Noise
from stopmim.runs.run import Run
from stopmim.train.draws import draw_noise
from stopmim.train.optimizer import adamw
from stopmim.train.rates import Rates
from stopmim.train.step import Step
from stopmim.weights.export import export
from stopmim.weights.inspect import identify
from tiny import NoiseImages, assert_same_run, tiny, tiny_mae

RECORDED = golden("mae")
STATE = under(RECORDED, "state.")
HEADS = {"heads": 3, "decoder_heads": 4}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """As MAE's code saves it."""
    torch.save({"model": STATE, "epoch": 7}, tmp_path / "mae.pth")
    return tmp_path / "mae.pth"


def recorded_batch() -> Batch:
    hidden = RECORDED["mask"].nonzero()[:, 1].view(1, 3, -1)  # (1, B, K), ascending
    return Batch(RECORDED["images"], RECORDED["ids_keep"].sort(dim=1).values, hidden)


# ------------------------------------------------------------------------ the recordings


def test_the_encoder_of_a_file_gives_the_recorded_latents(file: Path) -> None:
    model, batch = load_model(file, **HEADS), recorded_batch()
    latent = model.encoder(batch.images, batch.context, all_tokens=True)
    # Theirs are in the order of the noise, ours ascending; the class token is first in both.
    order = torch.cat([torch.zeros(3, 1).long(), 1 + RECORDED["ids_keep"].argsort(dim=1)], dim=1)
    want = RECORDED["latent"].gather(1, order[..., None].expand(-1, -1, 24))
    torch.testing.assert_close(latent, want, atol=3e-5, rtol=0)


def test_the_decoder_of_a_file_gives_the_recorded_predictions(file: Path) -> None:
    batch = recorded_batch()
    predicted = load_model(file, **HEADS).predict(*batch)
    want = RECORDED["pred"].gather(1, batch.targets[0][..., None].expand(-1, -1, 192))
    torch.testing.assert_close(predicted[0], want, atol=3e-5, rtol=0)


def test_pixels_are_in_the_order_of_mae() -> None:
    assert torch.equal(patchify(RECORDED["images"][:1], 8), RECORDED["patchify"])


@pytest.mark.parametrize(("norm", "name"), [(False, "loss"), (True, "loss_norm_pix")])
def test_the_loss_is_the_recorded_one(file: Path, norm: bool, name: str) -> None:
    model = load_model(file, **HEADS)
    model.target = Pixels(norm)
    loss = masked_loss(model, model.target, recorded_batch(), Noise()).loss
    assert float(loss.detach()) == pytest.approx(float(RECORDED[name]), rel=1e-5)


def test_gradients_are_the_recorded_ones(file: Path) -> None:
    model = load_model(file, **HEADS)
    masked_loss(model, model.target, recorded_batch(), Noise()).loss.backward()
    class_token, mask_token = model.encoder.cls_token, model.predictor.positions.mask_token
    assert class_token is not None
    for found, name in ((class_token, "grad_cls_token"), (mask_token, "grad_mask_token")):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, RECORDED[name], atol=3e-5, rtol=0)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert float(norm) == pytest.approx(float(RECORDED["grad_norm_norm_pix"]), rel=3e-5)
    assert all(p.grad is not None for p in model.parameters())  # nothing DDP would wait for


# ------------------------------------------------------------------------ files


def test_a_file_without_its_layout_around_it_is_read_too(tmp_path: Path) -> None:
    save_file({f"module.{key}": value for key, value in STATE.items()}, tmp_path / "a.safetensors")
    model = load_model(tmp_path / "a.safetensors", **HEADS)
    assert (model.target, model.target_encoder) == (Pixels(), None)
    assert torch.equal(model.predictor.predictor_proj.weight, STATE["decoder_pred.weight"])


def test_an_export_has_the_keys_and_values_of_maes_code(tmp_path: Path) -> None:
    """And is read back with heads and norm, which those keys do not tell."""
    config = tiny_mae(positions={"kind": "stochastic", "share": 0.5}, norm_pixels=False)
    run = pretrain(NoiseImages(), tmp_path / "run", config, stop_at=1)
    out = export(run.path, "mae", tmp_path / "out") / "model.safetensors"
    weights, model = load_file(out), run.model()
    assert {key.split(".")[0] for key in weights} == {key.split(".")[0] for key in STATE}
    assert weights["decoder_pos_embed"].shape == (1, 37, 24)
    assert not weights["decoder_pos_embed"][:, 0].any()
    back = load_model(out)
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    positions = back.predictor.positions
    assert isinstance(positions, StochasticPositions)
    assert (positions.share, back.target) == (0.5, Pixels(normed=False))
    assert "MAE's layout" in identify(out).project
    assert "MAE" in (tmp_path / "out" / "README.md").read_text()


def test_a_decoder_of_published_width_needs_no_heads(tmp_path: Path) -> None:
    config = tiny_mae(predictor={"width": 512, "heads": 16, "depth": 1})
    export_of = pretrain(NoiseImages(), tmp_path / "run", config, stop_at=1)
    out = export(export_of.path, "mae", tmp_path / "out") / "model.safetensors"
    torch.save({"model": load_file(out), "epoch": 3}, tmp_path / "checkpoint-3.pth")
    about = identify(tmp_path / "checkpoint-3.pth")
    assert (about.project, about.epoch) == ("MAE, with its decoder", 3)
    assert about.model is not None
    assert "MAE, sine-cosine positions" in str(about)


def changed(**changes: Any) -> dict[str, Tensor]:
    return {k: v for k, v in (STATE | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (changed(decoder_extra=torch.zeros(2)), "unexpected decoder_extra"),
        (changed(mask_token=None), "missing mask_token"),
        (changed(**{"decoder_blocks.0.mlp.fc1.bias": None}), "missing predictor_blocks.0.mlp.fc1"),
        (changed(decoder_pos_embed=STATE["decoder_pos_embed"] + 1), "class token has a place"),
        (changed(decoder_pos_embed=STATE["decoder_pos_embed"] * 2), "not its project's fixed"),
        (changed(**{"decoder_pred.weight": torch.zeros(24, 16)}), "predictor_proj.weight is (24,"),
        (changed(decoder_embed=3), "decoder: predictor_embed is not a tensor but int"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_a_file_that_is_not_quite_mae_is_refused(
    tmp_path: Path, weights: dict[str, Tensor], message: str
) -> None:
    torch.save({"model": weights}, tmp_path / "odd.pth")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "odd.pth", **HEADS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_nobody_knows_are_asked_for(file: Path) -> None:
    with pytest.raises(CheckpointError, match="say decoder_heads="):
        load_model(file, heads=3)
    assert "say decoder_heads=" in str(identify(file, heads=3))


def test_layouts_are_not_taken_for_each_other(tmp_path: Path) -> None:
    features = pretrain(NoiseImages(), tmp_path / "f", tiny(), stop_at=1)
    pixels = pretrain(NoiseImages(), tmp_path / "p", tiny_mae(), stop_at=1)
    with pytest.raises(CheckpointError, match="no predictor of pixels in it"):
        export(features.path, "mae", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no place for a predictor of pixels: use --to mae"):
        export(pixels.path, "ijepa", tmp_path / "out")
    ijepa = load_model(export(features.path, "ijepa", tmp_path / "out") / "model.pth.tar")
    assert (ijepa.target, ijepa.target_encoder is None) == (Features(), False)


# ------------------------------------------------------------------------ StoP, share, ramp


def test_the_same_matrix_carries_context_and_noise_of_a_decoder() -> None:
    """Moving A moves masked tokens by A n: the tie of the paper holds in MAE too."""
    model = build(configure(tiny_mae(positions={"kind": "stochastic"})))
    masks = draw_masks(configure(tiny_mae()), 0, [slice(0, 8)], torch.device("cpu"))[0]
    noise = model.predictor.draw(*masks, seeded())
    assert noise.masked is not None
    assert noise.masked.shape == (1, 8, 27, 96)  # of the encoder's width, not of pixels
    assert model.predictor.noise_layer is model.predictor.predictor_embed
    images = torch.randn(8, 3, 24, 24, generator=seeded())
    still = model.predict(images, *masks, torch.zeros_like(noise.masked))
    assert still.shape == (1, 8, 27, 48)
    assert not torch.allclose(model.predict(images, *masks, noise), still, atol=1e-4)


def test_the_others_get_mask_token_and_position_exactly() -> None:
    positions = StochasticPositions(6, 24, 0.25, share=0.3)
    project = torch.nn.Linear(96, 24)
    index = torch.randint(36, (4, 50, 27), generator=seeded())
    noise = positions.draw(index, project, seeded())
    certain = (noise == 0).all(dim=-1)
    assert float(certain.float().mean()) == pytest.approx(0.7, abs=0.02)
    assert not certain.all(dim=-1).any()  # drawn per image, not for all at once
    assert float(noise[~certain].var()) == pytest.approx(0.25, rel=0.02)
    token = positions(index, project, noise=noise)
    assert torch.equal(token[certain], positions.mean(index)[certain])
    whole = StochasticPositions(6, 24, 0.25).draw(index, project, seeded())
    assert torch.equal(whole[~certain], noise[~certain])


def test_who_is_uncertain_does_not_depend_on_how_a_batch_is_cut() -> None:
    changes = {"positions": {"kind": "stochastic", "share": 0.5}, "optim.batch_size": 80}
    config = configure(tiny_mae(**changes))
    predictor = build(config).predictor

    def drawn(parts: list[slice]) -> Tensor:
        masks = draw_masks(config, 3, parts, torch.device("cpu"))
        pieces = [
            draw_noise(predictor, m, part, config, 3, torch.float32).masked
            for m, part in zip(masks, parts, strict=True)
        ]
        return torch.cat([x for x in pieces if x is not None], dim=1)

    whole = drawn([slice(0, 80)])
    assert torch.equal(drawn([slice(i, i + 20) for i in range(0, 80, 20)]), whole)
    assert 0.4 < float((whole == 0).all(dim=-1).float().mean()) < 0.6


def test_sigma_grows_linearly_and_then_stays() -> None:
    config = configure(tiny_mae(positions={"kind": "stochastic", "sigma": 0.4, "ramp": 2.0}))
    positions = build(config).predictor.positions
    assert isinstance(positions, StochasticPositions)
    sigmas = []
    for step in (0, 5, 10, 19, 20, 50):
        positions.at_step(step, steps_per_epoch=10)
        sigmas.append(positions.sigma)
    assert sigmas == pytest.approx([0, 0.1, 0.2, 0.38, 0.4, 0.4])


# ------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """MAE + StoP with everything on, measured and logged."""
    config = tiny_mae(
        positions={"kind": "stochastic", "share": 0.5, "ramp": 1.0},
        data={"augmentation": "flip"},
        **{"runtime.health_every": 5},
    )
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("mae") / "run", config)


def test_a_run_that_was_cut_is_the_run_that_was_not(run: Run, tmp_path: Path) -> None:
    pretrain(NoiseImages(), tmp_path / "cut", run.config, stop_at=4)  # sigma is still growing
    assert_same_run(pretrain(NoiseImages(), tmp_path / "cut", run.config), run)


def test_there_is_no_second_encoder_anywhere(run: Run) -> None:
    names = load_file(run.checkpoint / "model.safetensors")
    assert {name.split(".")[0] for name in names} == {"encoder", "predictor"}
    assert "momentum" not in run.metrics[-1]
    model = run.model()
    for branch in ("target", "context"):
        encoder: Any = load_encoder(run.path, branch)
        for name, value in model.encoder.state_dict().items():
            assert torch.equal(encoder.state_dict()[name], value), name


def test_an_update_changes_encoder_and_decoder_and_lowers_the_loss() -> None:
    config = configure(tiny_mae(**{"optim.lr": 2e-3}))
    model = build(config)
    optimizer = adamw(model, config.optim)
    masks = draw_masks(config, 0, [slice(0, 8)], torch.device("cpu"))[0]
    batch = Batch(torch.randn(8, 3, 24, 24, generator=seeded()), *masks)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = [
        float(_update(model, batch, optimizer)["loss"]) for _ in range(8)
    ]  # the same patches again and again
    assert losses[-1] < 0.9 * losses[0]
    fixed = {name for name, value in model.state_dict().items() if torch.equal(before[name], value)}
    assert fixed == {"encoder.pos_embed", "predictor.predictor_pos_embed"}


def _update(
    model: MaskedImageModel, batch: Batch, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    noise = model.predictor.draw(batch.context, batch.targets)
    optim = OptimConfig(epochs=1, warmup_epochs=0)
    return Step(model, optimizer, optim)([(batch, noise)], Rates(2e-3, 0.0, 0.5))


def test_multiblock_masks_hide_pixels_too(tmp_path: Path) -> None:
    config = tiny(target="pixels", **{"optim.ema": [0.996, 1.0]})
    run = pretrain(NoiseImages(), tmp_path, config, stop_at=2)
    assert run.metrics[-1]["loss"] < 2
    assert run.config.masking.kind == "multiblock"


def test_images_are_mirrored_and_nothing_else() -> None:
    from stopmim.data.crops import AUGMENT

    images = torch.randint(256, (2, 3, 4, 6), dtype=torch.uint8, generator=seeded())
    numbers = torch.tensor([[1.0, 1.0, 2.0], [0.0, 1.0, 2.0]])  # grey and blur are not for it
    out = AUGMENT["flip"](images, numbers)
    assert torch.equal(out, torch.stack([images[0].flip(-1), images[1]]))


def test_analyses_ask_for_pixels_where_they_compare_and_for_features_where_they_look(
    run: Run,
) -> None:
    (subject,) = load([run], NoiseImages(), 3)
    found = predict(subject.model, subject.views, run.config)
    assert found.shape == (3, 27, 36)  # every hidden patch with every patch
    images = pixels(subject.views, run.config)
    assert patch_targets(subject.model, images).shape == (3, 36, 48)  # 4 x 4 x 3 pixels
    assert patch_features(subject.model, images).shape == (3, 36, 96)
    assert "<b>MAE + StoP</b>" in write_report(run).read_text()


# ------------------------------------------------------------------------ its health


def test_what_is_measured_of_the_encoder_are_its_features(run: Run) -> None:
    measured = [row for row in run.metrics if "feature_rank" in row]
    assert len(measured) == 2
    start = run.metrics[0]["random_init"]
    for key in ("target_rank", "target_spread", "target_image_share"):  # pixels stay pixels
        assert measured[-1][key] == pytest.approx(start[key])
    assert measured[-1]["feature_rank"] != start["feature_rank"]
    assert measured[-1]["neighbours"] != start["neighbours"]


def rows(now: dict[str, float]) -> list[dict[str, Any]]:
    usual = {"target_rank": 1.2, "target_spread": 0.8, "target_image_share": 0.9, "skill": 0.3}
    usual |= {"predicted_image_share": 0.4, "predicted_mean_share": 0.1, "feature_rank": 9.0}
    begin = usual | {"feature_rank": 60.0}
    later = [usual | {"step": step} | now for step in (50, 100)]
    return [{"step": 1, "random_init": begin}, *later]


@pytest.mark.parametrize(
    ("now", "verdict", "word"),
    [
        ({}, "not collapsed", "tells images apart"),  # whatever the rank of the pixels
        ({"skill": 0.0, "predicted_image_share": 0.0}, "shortcut", "masking.ratio"),
        ({"skill": -2.0}, "too early to say", "nothing has settled"),
        ({"target_image_share": 0.0}, "collapse", "look at the data"),
    ],
)
def test_a_verdict_on_pixels_never_speaks_of_what_there_is_not(
    now: dict[str, float], verdict: str, word: str
) -> None:
    found = diagnose(rows(now))
    assert found.verdict == verdict
    assert word in str(found)
    assert "ema" not in str(found)
    assert "targets: " not in str(found)


def test_weights_are_examined_against_maes_own_random_ones(run: Run) -> None:
    found = examine(run.path, "scenes:24:24")
    rank = next(e for e in found.evidence if e.name == "features: effective rank")
    assert rank.start is not None
    assert rank.start > 5  # N(0, 0.02) on so narrow a network would leave hardly more than one
    assert json.loads(found.as_json())["verdict"] == found.verdict


def test_matrices_begin_as_in_mae() -> None:
    """Xavier-uniform: variance 2 / (rows + columns), and never beyond its bound."""
    model = build(configure(tiny_mae()))
    first: Any = model.encoder.blocks[0]
    for layer in (first.mlp.fc1, model.predictor.predictor_proj):
        weight = layer.weight.detach()
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound < float(weight.abs().max()) <= bound
        assert not layer.bias.any()
    patches = model.encoder.patch_embed.proj.weight.detach().flatten(1)
    assert float(patches.var()) == pytest.approx(2 / sum(patches.shape), rel=0.1)
