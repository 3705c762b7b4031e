"""Where tokens are said to be: the recorded table, and what makes positions stochastic."""

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import stopmim
from helpers import golden, golden_about, seeded
from stopmim.method.positions import Positions, StochasticPositions, sincos_2d

SIDE, WIDTH, ENCODER = 4, 12, 6
BASES: tuple[Literal["sincos"], Literal["learned"]] = ("sincos", "learned")
INDEX = torch.tensor([[0, 5], [3, 3]])


def stochastic(sigma: float = 1.0, **options: Any) -> StochasticPositions:
    return StochasticPositions(SIDE, WIDTH, sigma, **options)


def layer(seed: int = 0) -> nn.Linear:
    """A projection with a bias far from zero, so that it shows wherever it does not belong."""
    project = nn.Linear(ENCODER, WIDTH)
    with torch.no_grad():
        project.weight.copy_(torch.randn(WIDTH, ENCODER, generator=seeded(seed)))
        project.bias.copy_(10 + torch.randn(WIDTH, generator=seeded(seed + 1)))
    return project


def covariance(positions: StochasticPositions, project: nn.Linear, n: int = 200_000) -> Tensor:
    draws = positions(torch.zeros(n, dtype=torch.long), project, seeded(2)).detach().double()
    return draws.T.cov()


def assert_covariance(measured: Tensor, expected: Tensor, n: int = 200_000) -> None:
    """Every entry within 5 standard errors: Var(S_ij) = (S_ii S_jj + S_ij^2) / n for a Gaussian."""
    variance = expected.diagonal()
    error = ((variance[:, None] * variance + expected**2) / n).sqrt()
    assert ((measured - expected).abs() <= 5 * error).all()


# ------------------------------------------------------------------------------ the table


def test_the_table_is_the_recorded_one() -> None:
    recorded = golden("positions")
    small, large = sincos_2d(4, 48), sincos_2d(14, 384)
    torch.testing.assert_close(small, recorded["d48_g4.table"], atol=1e-6, rtol=0)
    rows = large[recorded["d384_g14.rows"]]
    torch.testing.assert_close(rows, recorded["d384_g14.values"], atol=1e-6, rtol=0)
    torch.testing.assert_close(large[:, ::16], recorded["d384_g14.col_slice"], atol=1e-6, rtol=0)
    for table, want in zip((small, large), golden_about("positions")["checksums"], strict=True):
        flat = table.double().flatten()
        place = torch.arange(1, len(flat) + 1, dtype=torch.float64)
        assert float(flat.sum()) == pytest.approx(want["sum_of_float32_cast"], rel=1e-9)
        assert float(flat @ place) == pytest.approx(want["weighted_sum_float64"], rel=1e-7)


def test_columns_fill_the_first_half_of_the_channels_and_rows_the_second() -> None:
    table = sincos_2d(5, 8).view(5, 5, 8)
    assert torch.equal(table[..., :4], table[:1, :, :4].expand(5, 5, 4))  # the same in every row
    assert torch.equal(table[..., 4:], table[:, :1, 4:].expand(5, 5, 4))  # ... in every column
    torch.testing.assert_close(table[3, 2, 0], torch.tensor(math.sin(2.0)))
    torch.testing.assert_close(table[3, 2, 4], torch.tensor(math.sin(3.0)))
    torch.testing.assert_close(table[3, 2, 6], torch.tensor(math.cos(3.0)))


def test_a_width_that_four_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="divisible by 4, got 10"):
        sincos_2d(4, 10)


# ------------------------------------------------------------------------------ the mean


@pytest.mark.parametrize("base", BASES)
def test_no_noise_is_the_table_plus_the_mask_token(base: Literal["sincos", "learned"]) -> None:
    positions = stochastic(0.0, base=base)
    want = positions.table[0][INDEX] + positions.mask_token[0, 0]
    torch.testing.assert_close(positions(INDEX, layer(), seeded()), want)
    if base == "sincos":
        assert torch.equal(positions.table[0], sincos_2d(SIDE, WIDTH))


@pytest.mark.parametrize("covariance", ["projected", "fixed"])
def test_context_tokens_get_noise_but_not_the_mask_token(covariance: str) -> None:
    positions, project = stochastic(covariance=covariance), layer()
    noise = positions.draw(INDEX, project, seeded())
    masked = positions(INDEX, project, noise=noise)
    context = positions(INDEX, project, noise=noise, tokens="context")
    torch.testing.assert_close(masked - context, positions.mask_token[0].expand_as(masked))
    added = noise if covariance == "fixed" else noise @ project.weight.T
    torch.testing.assert_close(context, sincos_2d(SIDE, WIDTH)[INDEX] + added)


def test_certain_positions_are_the_table_and_the_mask_token_in_training_too() -> None:
    positions = Positions(SIDE, WIDTH).train()
    table = sincos_2d(SIDE, WIDTH)[INDEX]
    torch.testing.assert_close(positions(INDEX), table + positions.mask_token[0])
    assert torch.equal(positions(INDEX, tokens="context"), table)
    released = Positions(SIDE, WIDTH, bias="project")
    assert torch.equal(released(INDEX), table)  # the released code with StoP off: psi alone


def test_only_a_learned_table_is_a_parameter_and_the_unused_mask_token_is_frozen() -> None:
    def trained(positions: Positions) -> set[str]:
        return {name for name, p in positions.named_parameters() if p.requires_grad}

    assert trained(stochastic()) == {"mask_token"}
    assert trained(stochastic(base="learned")) == {"mask_token", "table"}
    assert trained(stochastic(bias="project")) == set()
    for positions in (stochastic(), stochastic(base="learned"), stochastic(bias="project")):
        assert set(positions.state_dict()) == {"mask_token", "table"}
        assert positions.mask_token.abs().max() > 0


def test_a_learned_table_learns_where_it_is_used() -> None:
    positions = stochastic(base="learned")
    positions(torch.tensor([3, 3, 7]), layer(), seeded()).sum().backward()
    want = torch.zeros(1, SIDE * SIDE, WIDTH)
    want[0, 3], want[0, 7] = 2.0, 1.0
    assert positions.table.grad is not None
    assert torch.equal(positions.table.grad, want)


# ------------------------------------------------------------------------------ the noise


@pytest.mark.parametrize("bias", ["mask_token", "project"])
@pytest.mark.parametrize("base", BASES)
def test_the_covariance_is_sigma_times_a_a_transposed(base: str, bias: str) -> None:
    positions, project = stochastic(0.25, base=base, bias=bias), layer()
    measured, a = covariance(positions, project), project.weight.detach().double()
    assert_covariance(measured, 0.25 * a @ a.T)
    with pytest.raises(AssertionError):
        assert_covariance(measured, 0.25**2 * a @ a.T)  # what reading sigma as a std would give


@pytest.mark.parametrize("base", BASES)
def test_the_fixed_covariance_is_sigma_times_one_whatever_the_projection(base: str) -> None:
    positions = stochastic(0.25, base=base, covariance="fixed")
    measured = covariance(positions, layer())
    assert_covariance(measured, 0.25 * torch.eye(WIDTH, dtype=torch.float64))
    with pytest.raises(AssertionError):
        assert_covariance(measured, 0.25**2 * torch.eye(WIDTH, dtype=torch.float64))
    assert torch.equal(measured, covariance(positions, layer(7)))


def test_the_noise_is_centred_and_independent_between_tokens() -> None:
    positions, project = stochastic(4.0), layer()
    noise = positions.draw(torch.zeros(50_000, 2, dtype=torch.long), project, seeded())
    flat = noise.flatten(1).double()  # (50000, 2 * D): two tokens of the same patch
    assert (flat.mean(dim=0).abs() < 5 * 2 / math.sqrt(50_000)).all()
    assert_covariance(flat.T.cov(), 4 * torch.eye(2 * ENCODER, dtype=torch.float64), 50_000)


def test_the_bias_of_the_projection_reaches_the_noise_in_released_mode_only() -> None:
    project, zero = layer(), torch.zeros(*INDEX.shape, ENCODER)
    table = sincos_2d(SIDE, WIDTH)[INDEX]
    paper, released = stochastic(), stochastic(bias="project")
    torch.testing.assert_close(paper(INDEX, project, noise=zero), table + paper.mask_token[0])
    torch.testing.assert_close(released(INDEX, project, noise=zero), table + project.bias)


@pytest.mark.parametrize("bias", ["mask_token", "project"])
def test_the_tokens_are_the_formula_with_the_given_noise(bias: str) -> None:
    positions, project = stochastic(0.3, bias=bias), layer()
    noise = torch.randn(*INDEX.shape, ENCODER, generator=seeded())
    shift = positions.mask_token[0] if bias == "mask_token" else project.bias
    want = sincos_2d(SIDE, WIDTH)[INDEX] + noise @ project.weight.T + shift
    torch.testing.assert_close(positions(INDEX, project, noise=noise), want)
    # In evaluation too: noise that is handed in is noise that was asked for, and sigma is in it.
    torch.testing.assert_close(positions.eval()(INDEX, project, noise=noise), want)


def test_the_draw_and_then_the_call_is_the_call() -> None:
    positions, project = stochastic(0.5), layer()
    noise = positions.draw(INDEX, project, seeded(3))
    assert torch.equal(positions(INDEX, project, noise=noise), positions(INDEX, project, seeded(3)))


def test_noise_that_is_handed_in_leaves_every_generator_alone() -> None:
    positions, project, generator = stochastic(), layer(), seeded()
    noise = positions.draw(INDEX, project, seeded(1))
    before, default = generator.get_state(), torch.get_rng_state()
    positions(INDEX, project, generator, noise=noise)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), default)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (4, 2, 3), (2, 1, 3, 2)])
def test_an_index_may_have_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    index, project = torch.randint(0, SIDE * SIDE, shape, generator=seeded()), layer()
    positions, fixed = stochastic(0.5), stochastic(0.5, covariance="fixed")
    assert positions.draw(index, project, seeded()).shape == (*shape, ENCODER)
    assert fixed.draw(index, project, seeded()).shape == (*shape, WIDTH)
    tokens = positions(index, project, seeded())
    flat = positions(index.flatten(), project, seeded())
    torch.testing.assert_close(tokens.reshape(-1, WIDTH), flat)


def test_a_draw_is_the_standard_normal_times_the_root_of_sigma_in_float32() -> None:
    project = layer().to(torch.bfloat16)
    noise = stochastic(0.25).draw(INDEX, project, seeded())
    assert torch.equal(noise, 0.5 * torch.randn(*INDEX.shape, ENCODER, generator=seeded()))


@pytest.mark.parametrize("base", BASES)
def test_evaluation_is_without_noise_and_in_released_mode_with_it(base: str) -> None:
    project = layer()
    quiet = stochastic(base=base).eval()
    assert torch.equal(quiet(INDEX, project, seeded()), quiet.mean(INDEX))
    noisy = stochastic(base=base, bias="project").eval()
    first, second = (noisy(INDEX, project, seeded(seed)) for seed in (1, 2))
    assert (first - second).abs().min() > 0
    assert (quiet.train()(INDEX, project, seeded()) - quiet.mean(INDEX)).abs().min() > 0


def test_the_generator_is_the_only_source_of_noise() -> None:
    positions, project = stochastic(), layer()
    first = positions(INDEX, project, seeded(7))
    before = torch.get_rng_state()
    torch.manual_seed(123)
    assert torch.equal(first, positions(INDEX, project, seeded(7)))
    assert not torch.equal(first, positions(INDEX, project, seeded(8)))
    torch.set_rng_state(before)
    positions(INDEX, project, seeded(7))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------ gradients


def test_the_gradient_reaches_the_matrix_through_the_noise_but_not_its_bias() -> None:
    positions, project = stochastic(), layer()
    noise = positions.draw(INDEX, project, seeded())
    positions(INDEX, project, noise=noise).sum().backward()
    want = noise.sum(dim=(0, 1)).expand(WIDTH, ENCODER)  # d/dA of sum (A n) is 1 n^T
    assert project.weight.grad is not None
    torch.testing.assert_close(project.weight.grad, want)
    assert project.bias.grad is None
    assert positions.mask_token.grad is not None
    assert torch.equal(positions.mask_token.grad, torch.full((1, 1, WIDTH), 4.0))


def test_in_released_mode_the_gradient_reaches_the_bias_instead_of_the_mask_token() -> None:
    positions, project = stochastic(bias="project"), layer()
    positions(INDEX, project, seeded()).sum().backward()
    assert project.bias.grad is not None
    assert torch.equal(project.bias.grad, torch.full((WIDTH,), 4.0))
    assert positions.mask_token.grad is None


def test_fixed_noise_teaches_the_projection_nothing() -> None:
    positions, project = stochastic(covariance="fixed"), layer()
    positions(INDEX, project, seeded()).square().sum().backward()
    assert project.weight.grad is None
    assert project.bias.grad is None


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("sigma", [-0.25, -1e-30, math.nan, math.inf, -math.inf])
def test_a_sigma_that_is_no_variance_is_refused(sigma: float) -> None:
    with pytest.raises(ValueError, match="sigma is a variance"):
        stochastic(sigma)


def test_stochastic_positions_without_the_matrix_are_refused() -> None:
    with pytest.raises(ValueError, match="need the layer A"):
        stochastic()(INDEX)


@pytest.mark.parametrize("word", ["base", "covariance", "bias"])
def test_an_unknown_kind_is_refused_rather_than_read_as_the_default(word: str) -> None:
    options: dict[str, Any] = {word: "loose"}
    with pytest.raises(ValueError, match=rf"{word}.*loose"):
        stochastic(**options)


def test_unknown_tokens_are_refused_rather_than_read_as_context() -> None:
    tokens: Any = "target"
    with pytest.raises(ValueError, match=r"tokens.*target"):
        stochastic()(INDEX, layer(), seeded(), tokens=tokens)


# ------------------------------------------------------------------------------ elsewhere


class Theirs(nn.Module):
    """Somebody else's predictor; the three lines with `positions` are all that is ours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(ENCODER, WIDTH)
        self.positions = stopmim.StochasticPositions(SIDE, WIDTH, sigma=0.25)
        self.mix = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, ENCODER)

    def forward(self, context: Tensor, seen: Tensor, hidden: Tensor, g: torch.Generator) -> Tensor:
        c = self.embed(context) + self.positions.mean(seen, "context")
        m = self.positions(hidden, self.embed, g)
        return self.out(self.mix(torch.cat([c, m], dim=1))[:, seen.shape[1] :])


@pytest.mark.parametrize("covariance", ["projected", "fixed"])
def test_a_predictor_in_bfloat16_gets_tokens_in_bfloat16(covariance: Any) -> None:
    positions = StochasticPositions(4, 8, sigma=0.25, covariance=covariance).to(torch.bfloat16)
    project = nn.Linear(6, 8).to(torch.bfloat16)
    assert positions(torch.arange(3).expand(2, 3), project).dtype == torch.bfloat16


def test_they_work_alone_in_a_predictor_that_is_not_ours() -> None:
    torch.manual_seed(0)
    theirs, context = Theirs(), torch.randn(2, 3, ENCODER)
    seen, hidden = torch.tensor([[0, 1, 2], [4, 5, 6]]), torch.tensor([[7, 8], [9, 10]])
    target = torch.randn(2, 2, ENCODER)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        loss = (theirs(context, seen, hidden, seeded(step)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in theirs.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4

    theirs.eval()
    calm = theirs(context, seen, hidden, seeded(1))
    assert torch.equal(calm, theirs(context, seen, hidden, seeded(2)))
    copy = Theirs().eval()
    copy.load_state_dict(theirs.state_dict())
    assert torch.equal(calm, copy(context, seen, hidden, seeded(3)))
