"""The predictor: both recorded ones, the tie, and what may depend on what."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from helpers import golden, golden_about, seeded, under
from stopmim.method.positions import Covariance, Positions, StochasticPositions
from stopmim.method.predictor import Noise, Predictor

SIDE, WIDTH, ENCODER = 4, 12, 8
CONTEXT_INDEX = torch.tensor([[0, 2, 5, 7, 11], [1, 3, 8, 12, 15]])  # (B, C)
TARGET_INDEX = torch.tensor(  # (M, B, K)
    [
        [[1, 4, 9], [0, 2, 4]],
        [[3, 6, 10], [5, 6, 7]],
        [[12, 13, 14], [9, 10, 11]],
    ]
)
CONTEXT = torch.randn(2, 5, ENCODER, generator=seeded(5))


def small(
    positions: Positions | None = None,
    *,
    noisy: Literal["masked", "context", "both"] = "masked",
    tied: bool = True,
) -> Predictor:
    """A predictor whose weights are large enough for every dependence to show."""
    torch.manual_seed(0)
    covariance: Covariance = "tied" if tied else "untied"
    positions = positions or StochasticPositions(SIDE, WIDTH, 0.25, covariance=covariance)
    predictor = Predictor(positions, ENCODER, 2, 3, noisy=noisy)
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=seeded(parameter.numel())))
    return predictor


def call(predictor: Predictor, noise: Noise | None = None, **changes: Tensor) -> Tensor:
    given = {"context": CONTEXT, "context_index": CONTEXT_INDEX, "target_index": TARGET_INDEX}
    with torch.no_grad():
        return predictor(**(given | changes), noise=noise)


def recorded_predictor(name: str, positions: Positions) -> tuple[Predictor, dict[str, Tensor]]:
    recorded, c = golden(name), golden_about(name)["config"]
    predictor = Predictor(positions, c["embed_dim"], c["depth"], c["num_heads"], c["mlp_ratio"])
    predictor.load_state_dict(under(recorded, "state."))
    return predictor.eval(), recorded


def blocks(recorded: dict[str, Tensor], name: str) -> Tensor:
    return torch.stack([recorded[f"{name}.{i}"] for i in range(4)])


# ------------------------------------------------------------------------------ recordings


def test_the_recorded_noise_gives_the_recorded_stop_predictions() -> None:
    # Recorded with "noise_var" 0.25, which their code takes for the standard deviation.
    positions = StochasticPositions(4, 24, 0.25**2, bias="project")
    predictor, recorded = recorded_predictor("predictor_stop", positions)
    with torch.no_grad():
        predicted = predictor(
            recorded["context"],
            recorded["masks_x"],
            blocks(recorded, "masks"),
            Noise(masked=blocks(recorded, "noise")),
        )
    torch.testing.assert_close(predicted, blocks(recorded, "out_stop"), atol=2e-5, rtol=0)
    spread = float(blocks(recorded, "noise").std())
    assert spread == pytest.approx(positions.sigma**0.5, rel=0.05)


def test_the_released_code_with_stop_off_predicts_from_bare_positions() -> None:
    predictor, recorded = recorded_predictor("predictor_stop", Positions(4, 24, bias="project"))
    with torch.no_grad():
        predicted = predictor(recorded["context"], recorded["masks_x"], blocks(recorded, "masks"))
    torch.testing.assert_close(predicted, blocks(recorded, "out_nostop"), atol=2e-5, rtol=0)


def test_the_recorded_ijepa_predictions_come_from_certain_positions() -> None:
    predictor, recorded = recorded_predictor("predictor_ijepa", Positions(5, 24))
    with torch.no_grad():
        predicted = predictor(recorded["context"], recorded["masks_x"], blocks(recorded, "masks"))
        # Two contexts per image are, here, two images.
        two = predictor(
            recorded["context2"],
            torch.cat([recorded["masks_x2.0"], recorded["masks_x2.1"]]),
            torch.stack([recorded["masks.0"], recorded["masks.1"]]).repeat(1, 2, 1),
        )
    torch.testing.assert_close(predicted, blocks(recorded, "out"), atol=2e-5, rtol=0)
    torch.testing.assert_close(two.flatten(0, 1), recorded["out_two_contexts"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("sigma", [0.0, 0.25])
def test_stop_without_noise_is_ijepa(sigma: float) -> None:
    quiet, recorded = recorded_predictor("predictor_ijepa", StochasticPositions(5, 24, sigma))
    with torch.no_grad():
        if sigma == 0:
            quiet.train()
        predicted = quiet(recorded["context"], recorded["masks_x"], blocks(recorded, "masks"))
    torch.testing.assert_close(predicted, blocks(recorded, "out"), atol=2e-5, rtol=0)


# ------------------------------------------------------------------------------ the state dict


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("predictor_ijepa", Positions(5, 24)),
        ("predictor_ijepa", Positions(5, 24, base="learned")),
        ("predictor_ijepa", StochasticPositions(5, 24, 0.25)),
        ("predictor_stop", StochasticPositions(4, 24, 0.25, bias="project")),
    ],
)
def test_the_state_dict_is_exactly_the_published_one(name: str, positions: Positions) -> None:
    predictor, recorded = recorded_predictor(name, positions)
    want = under(recorded, "state.")
    state = predictor.state_dict()
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in want.items()
    }
    assert state["predictor_pos_embed"].shape == (1, positions.side**2, 24)
    assert state["mask_token"].shape == (1, 1, 24)
    assert all(torch.equal(state[key], want[key]) for key in want)


def test_a_state_dict_goes_round() -> None:
    first, second = small(), small()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
        second.positions.table.zero_()
    second.load_state_dict(first.state_dict())
    noise = first.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    assert torch.equal(call(first, noise), call(second, noise))
    again = second.state_dict()
    assert all(torch.equal(again[key], value) for key, value in first.state_dict().items())
    # As part of a larger module, with its prefix.
    outer = nn.ModuleDict({"predictor": first})
    assert "predictor.mask_token" in outer.state_dict()
    other = nn.ModuleDict({"predictor": small(Positions(SIDE, WIDTH))})
    other.load_state_dict(outer.state_dict())
    assert torch.equal(other.state_dict()["predictor.mask_token"], first.positions.mask_token)


def test_loading_is_strict_about_the_published_names() -> None:
    predictor = small()
    for name in ("mask_token", "predictor_pos_embed"):
        state = predictor.state_dict()
        del state[name]
        with pytest.raises(RuntimeError, match="Missing key"):
            predictor.load_state_dict(state)


def test_loading_leaves_the_callers_state_dict_as_it_was() -> None:
    predictor = small()
    state = predictor.state_dict()
    names = list(state)
    predictor.load_state_dict(state)
    assert list(state) == names


# ------------------------------------------------------------------------------ dependence


@pytest.mark.parametrize("kind", ["certain", "stochastic"])
def test_target_blocks_are_predicted_independently(kind: str) -> None:
    predictor = small(Positions(SIDE, WIDTH) if kind == "certain" else None)
    noise = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    before = call(predictor, noise)
    other = TARGET_INDEX.clone()
    other[0] = torch.tensor([[13, 14, 15], [12, 13, 14]])
    after = call(predictor, noise, target_index=other)
    assert torch.equal(before[1:], after[1:])
    assert ((before[0] - after[0]).abs().amax(dim=-1) > 0).all()
    own = Noise() if noise.masked is None else Noise(noise.masked[1:2])
    alone = call(predictor, own, target_index=TARGET_INDEX[1:2])
    torch.testing.assert_close(alone[0], before[1])


def test_images_are_predicted_independently() -> None:
    predictor = small()
    noise = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    other = CONTEXT.clone()
    other[0] += 1
    change = (call(predictor, noise, context=other) - call(predictor, noise)).abs().amax(dim=-1)
    assert (change[:, 0] > 0).all()
    assert (change[:, 1] == 0).all()


def test_the_order_of_the_context_does_not_matter() -> None:
    predictor = small()
    noise = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled = call(
        predictor, noise, context=CONTEXT[:, order], context_index=CONTEXT_INDEX[:, order]
    )
    torch.testing.assert_close(shuffled, call(predictor, noise))
    # ... but where its tokens are said to be does.
    moved = call(predictor, noise, context_index=CONTEXT_INDEX[:, order])
    assert (moved - call(predictor, noise)).abs().max() > 1e-3


def test_the_order_of_a_block_is_the_order_of_its_predictions() -> None:
    predictor = small()
    noise = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded()).masked
    assert noise is not None
    order = torch.tensor([2, 0, 1])
    shuffled = call(predictor, Noise(noise[:, :, order]), target_index=TARGET_INDEX[..., order])
    torch.testing.assert_close(shuffled, call(predictor, Noise(noise))[:, :, order])


# ------------------------------------------------------------------------------ the tie


def masked_noise(predictor: Predictor) -> Noise:
    return predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())


def noise_effect(predictor: Predictor) -> Tensor:
    """What the noise does to the masked tokens as they enter the first block, (M * B, K, P)."""
    tokens: list[Tensor] = []
    hook = predictor.predictor_blocks[0].register_forward_pre_hook(
        lambda _, inputs: tokens.append(inputs[0][:, CONTEXT_INDEX.shape[1] :])
    )
    call(predictor, masked_noise(predictor))
    call(predictor, Noise(torch.zeros(3, 2, 3, ENCODER)))
    hook.remove()
    return tokens[0] - tokens[1]


def test_tied_noise_goes_through_the_matrix_of_the_context() -> None:
    predictor = small()
    noise = masked_noise(predictor).masked
    assert noise is not None
    want = (noise @ predictor.predictor_embed.weight.T).flatten(0, 1)
    torch.testing.assert_close(noise_effect(predictor), want)
    with torch.no_grad():
        predictor.predictor_embed.weight.mul_(2)
        predictor.predictor_embed.bias.add_(5)  # must not show
    torch.testing.assert_close(noise_effect(predictor), 2 * want, atol=1e-4, rtol=1e-4)
    assert predictor.noise_layer is predictor.predictor_embed


def test_untied_noise_goes_through_a_matrix_of_its_own() -> None:
    predictor = small(tied=False)
    noise, own = masked_noise(predictor).masked, predictor.noise_embed
    assert noise is not None
    assert own is not None
    want = (noise @ own.weight.T).flatten(0, 1)
    with torch.no_grad():
        predictor.predictor_embed.weight.mul_(2)  # must not show
    torch.testing.assert_close(noise_effect(predictor), want)
    assert set(predictor.state_dict()) - set(small().state_dict()) == {"noise_embed.weight"}
    assert set(small().state_dict()) <= set(predictor.state_dict())


def test_the_noise_alone_trains_the_tied_matrix_and_not_its_bias() -> None:
    for tied in (True, False):
        predictor = small(tied=tied)
        silent = torch.zeros_like(CONTEXT)  # no context: what reaches A comes through the noise
        noise = masked_noise(predictor)
        predictor(silent, CONTEXT_INDEX, TARGET_INDEX, noise).square().sum().backward()
        embed = predictor.predictor_embed.weight.grad
        assert embed is not None
        assert bool(embed.abs().max() > 1e-3) == tied
        if predictor.noise_embed is not None:
            own = predictor.noise_embed.weight.grad
            assert own is not None
            assert own.abs().max() > 1e-3


# ------------------------------------------------------------------------------ which tokens


@pytest.mark.parametrize("noisy", ["masked", "context", "both"])
def test_noise_is_drawn_for_the_tokens_that_are_uncertain(noisy: Any) -> None:
    predictor = small(noisy=noisy)
    noise = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    shapes = [None if part is None else tuple(part.shape) for part in noise]
    masked, context = (3, 2, 3, ENCODER), (2, 5, ENCODER)
    assert shapes == [
        masked if noisy in ("masked", "both") else None,
        context if noisy in ("context", "both") else None,
    ]
    for part in predictor.draw(
        CONTEXT_INDEX.repeat(99, 1), TARGET_INDEX.repeat(1, 99, 1), seeded()
    ):
        if part is not None:
            assert float(part.std()) == pytest.approx(0.5, rel=0.03)  # sigma is the variance 0.25
    again = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    assert torch.equal(call(predictor, noise), call(predictor, again))
    assert (call(predictor.eval()) - call(predictor, noise)).abs().max() > 1e-3


def test_context_noise_moves_the_context_by_a_n_and_leaves_out_the_mask_token() -> None:
    predictor = small(noisy="context")
    tokens: list[Tensor] = []
    predictor.predictor_blocks[0].register_forward_pre_hook(
        lambda _, inputs: tokens.append(inputs[0])
    )
    noise = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    assert noise.context is not None
    call(predictor, noise)
    embed, positions = predictor.predictor_embed, predictor.positions
    table = positions.table[0]
    context = embed(CONTEXT) + table[CONTEXT_INDEX] + noise.context @ embed.weight.T
    masked = table[TARGET_INDEX] + positions.mask_token[0]
    torch.testing.assert_close(tokens[0][:, :5], context.repeat(3, 1, 1))
    torch.testing.assert_close(tokens[0][:, 5:], masked.flatten(0, 1))


def test_certain_positions_draw_nothing() -> None:
    predictor, generator = small(Positions(SIDE, WIDTH)), seeded()
    before = generator.get_state()
    assert predictor.draw(CONTEXT_INDEX, TARGET_INDEX, generator) == Noise()
    assert torch.equal(generator.get_state(), before)


def test_training_without_given_noise_draws_its_own_and_evaluation_does_not() -> None:
    predictor = small().train()
    assert (call(predictor) - call(predictor)).abs().max() > 1e-3
    assert torch.equal(call(predictor.eval()), call(predictor))
    released = small(StochasticPositions(SIDE, WIDTH, 0.25, bias="project")).eval()
    assert (call(released) - call(released)).abs().max() > 1e-3


@pytest.mark.parametrize("bias", ["mask_token", "project"])
def test_every_trained_parameter_takes_part(bias: Any) -> None:
    # One without a gradient would stop DistributedDataParallel.
    predictor = small(StochasticPositions(SIDE, WIDTH, 0.25, bias=bias))
    noise = predictor.draw(CONTEXT_INDEX, TARGET_INDEX, seeded())
    predictor(CONTEXT, CONTEXT_INDEX, TARGET_INDEX, noise).square().mean().backward()
    trained = {name for name, p in predictor.named_parameters() if p.requires_grad}
    assert {name for name, p in predictor.named_parameters() if p.grad is not None} == trained
    assert ("positions.mask_token" in trained) == (bias == "mask_token")


# ------------------------------------------------------------------------------ refusals


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="predictor width 12 is not divisible by 5 heads"):
        Predictor(Positions(SIDE, WIDTH), ENCODER, 1, 5)


def test_an_unknown_choice_of_tokens_is_refused_rather_than_left_without_noise() -> None:
    noisy: Any = "all"
    with pytest.raises(ValueError, match=r"noisy.*all"):
        small(noisy=noisy)
