"""The whole model: its targets, its EMA encoder, and three recorded updates of the released code.

Losses, gradients and weights of the recording are reproduced through the functions that training
itself uses: `Step`, `adamw`, `rates`.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import golden, golden_about, seeded, under
from stopmim.config.schema import Config, OptimConfig, PositionsConfig, PredictorConfig, resolve
from stopmim.method.build import build
from stopmim.method.encoder import VisionTransformer
from stopmim.method.model import Batch, MaskedImageModel
from stopmim.method.positions import Positions, StochasticPositions
from stopmim.method.predictor import Noise, Predictor
from stopmim.train.optimizer import adamw, set_rates
from stopmim.train.rates import rates
from stopmim.train.step import Step

MODULES = ("encoder", "predictor", "target_encoder")


def small() -> MaskedImageModel:
    """A model whose target encoder has already moved away from its encoder."""
    torch.manual_seed(0)
    encoder = VisionTransformer(32, 8, 24, 2, 3)
    predictor = Predictor(StochasticPositions(4, 12, 0.25), 24, 2, 3)
    model = MaskedImageModel(encoder, predictor)
    with torch.no_grad():
        for part in (model.encoder, model.branch()):
            for parameter in part.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def small_batch() -> Batch:
    context = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]])
    targets = torch.tensor([[[8, 9], [12, 13]], [[10, 11], [14, 15]], [[2, 3], [0, 1]]])
    return Batch(torch.randn(2, 3, 32, 32, generator=seeded()), context, targets)


def draw(model: MaskedImageModel, batch: Batch, seed: int = 0) -> Noise:
    return model.predictor.draw(batch.context, batch.targets, seeded(seed))


# ------------------------------------------------------------------------------ targets


def test_targets_are_normed_features_of_the_ema_encoder_at_the_target_patches() -> None:
    model, batch = small(), small_batch()
    features = model.branch()(batch.images)  # of the whole image
    normed = F.layer_norm(features, (24,), eps=1e-5)
    want = torch.stack(
        [torch.stack([normed[b, index[b]] for b in range(2)]) for index in batch.targets]
    )
    _, target = model(batch, draw(model, batch))
    torch.testing.assert_close(target, want.detach())
    torch.testing.assert_close(target.mean(dim=-1), torch.zeros(3, 2, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        target.var(dim=-1, correction=0), torch.ones(3, 2, 2), atol=1e-3, rtol=0
    )


def test_predictions_come_from_the_context_patches_and_the_trained_encoder() -> None:
    model, batch = small(), small_batch()
    noise = draw(model, batch)
    predicted, _ = model(batch, noise)
    context = model.encoder(batch.images, batch.context)
    want = model.predictor(context, batch.context, batch.targets, noise)
    assert torch.equal(predicted, want)
    hidden = batch.images.clone()
    hidden[:, :, 16:] = math.nan  # rows 2 and 3 of the grid are in no context
    assert torch.equal(model.predict(hidden, batch.context, batch.targets, noise), predicted)


def test_a_bare_tensor_of_noise_is_for_the_masked_tokens() -> None:
    model, batch = small(), small_batch()
    noise = draw(model, batch)
    assert isinstance(noise.masked, Tensor)
    assert torch.equal(model(batch, noise.masked)[0], model(batch, noise)[0])
    other = draw(model, batch, 1)
    assert not torch.equal(model(batch, other)[0], model(batch, noise)[0])


def test_no_gradient_reaches_the_target_encoder() -> None:
    model, batch = small().train(), small_batch()
    predicted, target = model(batch, draw(model, batch))
    assert not target.requires_grad
    (predicted - target).square().sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in model.branch().parameters())
    for part in (model.encoder, model.predictor):
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in part.parameters())


def test_the_target_encoder_starts_as_a_copy_that_shares_nothing() -> None:
    encoder = VisionTransformer(32, 8, 24, 1, 3)
    model = MaskedImageModel(encoder, Predictor(Positions(4, 12), 24, 1, 3))
    assert model.encoder is encoder
    ours, theirs = encoder.state_dict(), model.branch().state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key])
        assert value.data_ptr() != theirs[key].data_ptr()


# ------------------------------------------------------------------------------ the EMA


@pytest.mark.parametrize("momentum", [0.0, 0.25, 0.996, 1.0])
def test_the_target_encoder_becomes_the_weighted_mean(momentum: float) -> None:
    model = small()
    online = {k: v.clone() for k, v in model.encoder.named_parameters()}
    before = {k: v.clone() for k, v in model.branch().named_parameters()}
    model.update_target(momentum)
    for name, after in model.branch().named_parameters():
        want = momentum * before[name].double() + (1 - momentum) * online[name].double()
        torch.testing.assert_close(after.double(), want, atol=1e-7, rtol=1e-6)
        if momentum in (0.0, 1.0):
            assert torch.equal(after, online[name] if momentum == 0 else before[name])
    for name, value in model.encoder.named_parameters():
        assert torch.equal(value, online[name])


# ------------------------------------------------------------------------------ the recording


def recorded_model() -> tuple[MaskedImageModel, OptimConfig]:
    recorded, c = golden("train"), golden_about("train")["config"]
    size = c["embed_dim"], c["depth"], c["num_heads"]
    encoder = VisionTransformer(c["img_size"], c["patch_size"], *size)
    positions = StochasticPositions(
        encoder.side, c["predictor_embed_dim"], c["noise_std"] ** 2, bias="project"
    )
    predictor = Predictor(positions, c["embed_dim"], c["predictor_depth"], c["predictor_heads"])
    encoder.load_state_dict(under(recorded, "init.encoder."))
    predictor.load_state_dict(under(recorded, "init.predictor."))
    o = c["optimization"]
    optim = OptimConfig(
        epochs=o["epochs"],
        lr=o["lr"],
        start_lr=o["start_lr"],
        final_lr=o["final_lr"],
        warmup_epochs=o["warmup"],
        weight_decay=(o["weight_decay"], o["final_weight_decay"]),
        ema=(c["ema"][0], c["ema"][1]),
    )
    return MaskedImageModel(encoder, predictor).train(), optim


def recorded_part(recorded: dict[str, Tensor], step: int) -> tuple[Batch, Noise]:
    targets = torch.stack([recorded[f"masks_pred.{step}.{block}"] for block in range(4)])
    noise = torch.stack([recorded[f"noise.{step}.{block}"] for block in range(4)])
    images, context = recorded[f"images.{step}"], recorded[f"masks_enc.{step}"]
    return Batch(images, context, targets), Noise(masked=noise)


def norm_of(module: nn.Module) -> float:
    grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return float(torch.cat(grads).double().norm())


def test_three_recorded_updates_of_the_released_code_are_reproduced() -> None:
    recorded, about = golden("train"), golden_about("train")
    model, config = recorded_model()
    update = Step(model, adamw(model, config), config)
    for step, want in enumerate(about["per_step"]):
        now = rates(config, step, about["config"]["iterations_per_epoch"])
        assert now == pytest.approx((want["lr"], want["wd"], want["momentum"]), rel=1e-12)
        values = update([recorded_part(recorded, step)], now)
        assert float(values["loss"]) == pytest.approx(want["loss"], rel=1e-6)
        assert float(values["grad_norm"]) == pytest.approx(want["grad_norm"], rel=1e-5)
        assert norm_of(model.encoder) == pytest.approx(want["grad_norm_encoder"], rel=1e-5)
        assert norm_of(model.predictor) == pytest.approx(want["grad_norm_predictor"], rel=1e-5)
        if step == 0:
            for key, gradient in under(recorded, "grad_step0.").items():
                torch.testing.assert_close(
                    model.get_parameter(key).grad, gradient, atol=1e-6, rtol=1e-4
                )
    for name in MODULES:
        assert_weights(name, model.get_submodule(name).state_dict(), recorded, lr=config.lr)


def assert_weights(
    name: str, ours: dict[str, Tensor], recorded: dict[str, Tensor], lr: float
) -> None:
    final, initial = under(recorded, f"final.{name}."), under(recorded, f"init.{name}.")
    assert ours.keys() == final.keys()
    differences, moved = [], 0.0
    for key, want in final.items():
        difference = (ours[key] - want).abs()
        if key.endswith("qkv.bias"):
            query, by_key, value = difference.chunk(3)
            assert by_key.max() <= 3 * lr  # its true gradient is zero: Adam steps on rounding
            difference = torch.cat([query, value])
        differences.append(difference.flatten())
        if key in initial:
            moved = max(moved, float((want - initial[key]).abs().max()))
    together = torch.cat(differences).double()
    assert float(together.max()) <= 3e-5, name
    assert float(together.square().mean().sqrt()) <= 1e-6, name
    if name != "target_encoder":  # it starts as the encoder and has no entry of its own
        assert moved > 1e-3  # or the comparison would show nothing


def test_the_unused_mask_token_of_released_mode_never_moves() -> None:
    recorded, (model, config) = golden("train"), recorded_model()
    update = Step(model, adamw(model, config), config)
    update([recorded_part(recorded, 0)], rates(config, 0, 4))
    assert torch.equal(
        model.predictor.state_dict()["mask_token"], recorded["init.predictor.mask_token"]
    )


def test_the_four_groups_are_the_published_ones() -> None:
    model, config = recorded_model()
    groups = adamw(model, config).param_groups
    # The recording counts pos_embed, predictor_pos_embed and mask_token, which have no gradient.
    published = [g["n"] for g in golden_about("train")["param_groups_last_step"]]
    assert [len(g["params"]) for g in groups] == [
        published[0] - 1,
        published[1] - 2,
        *published[2:],
    ]
    assert [g["decays"] for g in groups] == [True, True, False, False]
    assert all((p.ndim > 1) == g["decays"] for g in groups for p in g["params"])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in trained}


def test_weight_decay_is_set_for_matrices_only_and_the_mask_token_is_one() -> None:
    model = small()
    config = OptimConfig()
    optimizer = adamw(model, config)
    set_rates(optimizer, rates(config, 100, 10))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay[id(model.predictor.positions.mask_token)] > 0.04
    assert decay[id(model.encoder.blocks[0].get_parameter("attn.qkv.weight"))] > 0.04
    assert decay[id(model.encoder.norm.weight)] == 0
    assert decay[id(model.predictor.predictor_embed.bias)] == 0


# ------------------------------------------------------------------------------ from a config


def tiny(**changes: object) -> Config:
    config = Config(arch="vit_micro8", image_size=32, predictor=PredictorConfig(width=24))
    return resolve(Config.model_validate(dict(config) | changes))


def test_the_seed_of_a_config_and_nothing_else_decides_the_first_weights() -> None:
    torch.manual_seed(1)
    first, before = build(tiny(seed=3)), torch.get_rng_state()
    second, other = build(tiny(seed=3)), build(tiny(seed=4))
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])
    weight = "encoder.blocks.0.mlp.fc1.weight"
    assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])


def test_a_config_builds_the_variant_it_names() -> None:
    stop = build(tiny()).predictor
    assert isinstance(stop.positions, StochasticPositions)
    assert (stop.positions.sigma, stop.positions.bias) == (0.25, "mask_token")
    assert stop.noise_embed is None
    ijepa = build(tiny(positions=PositionsConfig(kind="sincos"))).predictor.positions
    assert type(ijepa) is Positions
    assert ijepa.bias == "mask_token"
    released = build(tiny(compat="released")).predictor.positions
    assert isinstance(released, StochasticPositions)
    assert (released.sigma, released.bias) == (0.0625, "project")
    untied = build(tiny(positions=PositionsConfig(covariance="untied", tokens="both"))).predictor
    assert isinstance(untied.noise_embed, nn.Linear)
    assert (untied.noisy_masked, untied.noisy_context) == (True, True)
    fixed = build(tiny(positions=PositionsConfig(covariance="fixed"))).predictor.positions
    assert isinstance(fixed, StochasticPositions)
    assert fixed.covariance == "fixed"
    learned = build(tiny(positions=PositionsConfig(kind="learned"))).predictor.positions
    assert isinstance(learned.table, nn.Parameter)


def test_a_config_that_is_not_resolved_is_refused() -> None:
    with pytest.raises(ValueError, match="not resolved"):
        build(Config(arch="vit_micro8", image_size=32))
