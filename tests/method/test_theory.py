"""The propositions of the paper, on problems small enough to take every expectation exactly.

Section 3 and appendices A and B: a free A collapses to zero, a tied A does not, and the optimal
predictor under noise smooths the clean one. (That the tokens have the covariance sigma A A^T is in
test_positions.py.)
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import seeded
from stopmim.method.positions import StochasticPositions

SIGMA, SIDE, WIDTH, ENCODER = 0.25, 3, 4, 2


# ------------------------------------------------------------------------------ A and the tie


def gauss_hermite(sigma: float, points: int = 5) -> tuple[Tensor, Tensor]:
    """Nodes (Q, D) and weights (Q,) that integrate over n ~ N(0, sigma I) without sampling."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(points))
    grid = torch.cartesian_prod(*[math.sqrt(sigma) * nodes] * ENCODER)
    product = torch.cartesian_prod(*[weights / weights.sum()] * ENCODER).prod(dim=1)
    return grid, product


class Regression(nn.Module):
    """The regression task of the proposition: F(A n_j + psi_j + m~, B x_i) is to be y_ij.

    y depends on the position j, and with `useful` also on the context x_i, which is centred.
    """

    def __init__(self, *, tied: bool, useful: bool = True) -> None:
        super().__init__()
        g = seeded(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.positions = StochasticPositions(SIDE, WIDTH, SIGMA)
        self.context = nn.Linear(ENCODER, WIDTH, bias=False)  # B
        self.noise = self.context if tied else nn.Linear(ENCODER, WIDTH, bias=False)  # A
        self.f = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.Tanh(), nn.Linear(16, 6))
        self.double()
        with torch.no_grad():
            for parameter in (self.positions.mask_token, *self.f.parameters()):
                parameter.copy_(0.4 * normal(*parameter.shape))
            start = 0.5 * normal(WIDTH, ENCODER)
            self.context.weight.copy_(start)
            self.noise.weight.copy_(start)
        self.x = normal(6, ENCODER)
        self.x -= self.x.mean(dim=0)
        place = self.positions.table[0] @ normal(WIDTH, 6)  # (J, 6)
        self.y = place.expand(6, -1, -1)  # (I, J, 6)
        if useful:
            gain, mixed = self.x @ normal(ENCODER, 6), self.x @ normal(ENCODER, 6)
            self.y = self.y + gain[:, None] + mixed[:, None] * place.sin()

    def tokens(self, noise: Tensor | None) -> Tensor:
        """Masked tokens (Q, J, P) for noise (Q, D), the same at every position, or none at all."""
        index = torch.arange(SIDE * SIDE)
        if noise is None:
            return self.positions.eval()(index[None], self.noise)
        same = noise[:, None].expand(-1, len(index), -1)
        return self.positions(index.expand(len(noise), -1), self.noise, noise=same)

    def loss(self, noise: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """J with an expectation over `noise`; without noise, J_det."""
        m, c = self.tokens(noise), self.context(self.x)
        shape = (len(m), len(c), m.shape[1], WIDTH)  # (Q, I, J, P)
        pairs = torch.cat([m[:, None].expand(shape), c[None, :, None].expand(shape)], dim=-1)
        error = (self.f(pairs) - self.y).square().sum(dim=-1).mean(dim=(1, 2))  # (Q,)
        return error.sum() if weights is None else weights @ error

    def expected(self) -> Tensor:
        return self.loss(*gauss_hermite(SIGMA))


def gradient(loss: Tensor, matrix: Tensor) -> Tensor:
    return torch.autograd.grad(loss, matrix)[0]


def zero(layer: nn.Linear) -> Tensor:
    nn.init.zeros_(layer.weight)
    return layer.weight


def noise_norm_after_training(task: Regression, steps: int) -> list[float]:
    """The norm of A, relative to its start, through plain gradient descent on the expected loss."""
    optimizer = torch.optim.SGD(task.parameters(), lr=0.05)
    start = float(task.noise.weight.detach().norm())
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        task.expected().backward()
        optimizer.step()
        norms.append(float(task.noise.weight.detach().norm()) / start)
    return norms


def test_zero_is_a_critical_point_of_a_free_matrix() -> None:
    task = Regression(tied=False)
    away = gradient(task.expected(), task.noise.weight)
    a = zero(task.noise)
    at_zero = gradient(task.expected(), a)
    assert away.norm() > 0.1
    assert at_zero.norm() < 1e-12 * away.norm()
    # It is the expectation that vanishes: a single draw pushes A away from zero.
    one = gradient(task.loss(gauss_hermite(SIGMA)[0][:1]), a)
    assert one.norm() > 0.1


def test_zero_is_a_minimum_of_a_free_matrix_along_every_direction() -> None:
    # Noise can only hurt once F is good at the task: J is larger at A than at 0.
    task = Regression(tied=False)
    noise_norm_after_training(task, 300)
    zero(task.noise)
    with torch.no_grad():
        calm = task.expected()
        for seed in range(20):
            step = torch.randn(WIDTH, ENCODER, generator=seeded(seed), dtype=torch.float64)
            task.noise.weight.copy_(0.1 * step)
            assert task.expected() > calm


def test_training_shrinks_a_free_matrix_to_nothing() -> None:
    norms = noise_norm_after_training(Regression(tied=False), 500)
    assert norms[-1] < 0.1


def test_training_keeps_a_tied_matrix() -> None:
    task = Regression(tied=True)
    before = float(task.expected().detach())
    norms = noise_norm_after_training(task, 500)
    assert min(norms) > 0.5
    assert float(task.expected().detach()) < before / 5  # and it did learn something


@pytest.mark.parametrize("useful", [True, False])
def test_zero_is_critical_for_a_tied_matrix_iff_it_is_without_noise(useful: bool) -> None:
    tied, without = Regression(tied=True, useful=useful), Regression(tied=True, useful=useful)
    a, b = zero(tied.context), zero(without.context)
    j_tied, j_det = gradient(tied.expected(), a), gradient(without.loss(), b)
    if useful:
        assert j_det.norm() > 0.1
        assert j_tied.norm() > 0.1
    else:  # a context that says nothing about the target
        assert j_det.norm() < 1e-12
        assert j_tied.norm() < 1e-12
    torch.testing.assert_close(j_tied, j_det, atol=1e-12, rtol=1e-12)


def test_a_tied_matrix_does_collapse_where_the_context_is_useless() -> None:
    # The other side of "only if the deterministic model does not use the context either".
    norms = noise_norm_after_training(Regression(tied=True, useful=False), 500)
    assert norms[-1] < 0.1


# ------------------------------------------------------------------------------ smoothing

LENGTH, NOISE_VARIANCE = 10.0, 0.25
N_PLACES, N_SAMPLES = 40 * 40, 400_000
PLACES = np.linspace(0.0, LENGTH, N_PLACES)
PRIORS = {
    "uniform": np.full(N_PLACES, 1.0 / N_PLACES),
    "falling": np.exp(-PLACES) / np.exp(-PLACES).sum(),
    "two hills": (q := np.exp(-2 * (PLACES - 3) ** 2) + np.exp(-2 * (PLACES - 6) ** 2)) / q.sum(),
}
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def clean(x: Array) -> Array:
    """E[Y | X = x], the predictor without noise."""
    return np.sin(2 * x) + 0.2 * x


def kernel(r: Array, x: Array) -> Array:
    """N(r; x, variance), (R, X)."""
    return np.exp(-((r[:, None] - x) ** 2) / (2 * NOISE_VARIANCE)) / math.sqrt(
        2 * math.pi * NOISE_VARIANCE
    )


def posterior_mean(r: Array, prior: Array) -> Array:
    """sum_x E[Y|x] p(x|r) with p(x|r) from Bayes' rule."""
    joint = kernel(r, PLACES) * prior
    return joint @ clean(PLACES) / joint.sum(axis=1)


def smoothed(r: Array) -> Array:
    """The formula of appendix B: the clean predictor convolved with a Gaussian."""
    x = np.linspace(-LENGTH, 2 * LENGTH, 6001)
    return kernel(r, x) @ clean(x) * (x[1] - x[0])


def observations(prior: Array) -> tuple[Array, Array]:
    """R = x_j + A n_j from the real module, on a line of places drawn from `prior`, and Y."""
    positions = StochasticPositions(40, 1, sigma=4.0, base="learned")
    project = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        positions.table.copy_(torch.from_numpy(PLACES).view(1, -1, 1))
        positions.mask_token.zero_()
        project.weight.fill_(math.sqrt(NOISE_VARIANCE / positions.sigma))
        weights = torch.from_numpy(prior)
        index = torch.multinomial(weights, N_SAMPLES, replacement=True, generator=seeded())
        r = positions(index, project, seeded(1))[:, 0].double().numpy()
    y = clean(PLACES[index.numpy()]) + 0.3 * np.random.default_rng(0).standard_normal(N_SAMPLES)
    return r, y


def worst_residual(r: Array, residual: Array) -> float:
    """Largest mean residual over slices of R, in standard errors: least squares leaves none."""
    order = np.argsort(r)
    scores = [
        abs(part.mean()) / (part.std() / math.sqrt(len(part)))
        for part in np.array_split(residual[order], 100)
    ]
    return float(max(scores))


@pytest.mark.parametrize("prior", PRIORS)
def test_the_optimal_predictor_is_the_posterior_mean_of_the_clean_one(prior: str) -> None:
    r, y = observations(PRIORS[prior])
    lattice = np.linspace(r.min(), r.max(), 2000)
    best = np.interp(r, lattice, posterior_mean(lattice, PRIORS[prior]))
    assert worst_residual(r, y - best) < 5
    # Predicting as if there were no noise is worse, so the noise matters here.
    assert worst_residual(r, y - clean(r)) > 20
    assert ((y - best) ** 2).mean() < ((y - clean(r)) ** 2).mean()


def test_for_a_uniform_prior_it_is_a_convolution_away_from_the_edges() -> None:
    inner, edge = np.linspace(3.0, 7.0, 81), np.array([0.0, LENGTH])
    difference = posterior_mean(inner, PRIORS["uniform"]) - smoothed(inner)
    assert np.abs(difference).max() < 1e-4
    assert np.abs(clean(inner) - smoothed(inner)).max() > 0.2  # the convolution does something
    at_edge = posterior_mean(edge, PRIORS["uniform"]) - smoothed(edge)
    assert np.abs(at_edge).min() > 0.05


@pytest.mark.parametrize("prior", ["falling", "two hills"])
def test_for_any_other_prior_it_is_not_a_convolution(prior: str) -> None:
    # Appendix B takes p(x|r) for a Gaussian around r, which holds for a flat prior alone.
    inner = np.linspace(3.0, 7.0, 81)
    assert np.abs(posterior_mean(inner, PRIORS[prior]) - smoothed(inner)).max() > 0.1
    r, y = observations(PRIORS[prior])
    lattice = np.linspace(r.min(), r.max(), 2000)
    assert worst_residual(r, y - np.interp(r, lattice, smoothed(lattice))) > 20


def test_the_smoothing_of_a_sine_is_the_known_one() -> None:
    # exp(-w^2 s / 2) sin(w x) for variance s: a check of `smoothed` itself.
    inner = np.linspace(3.0, 7.0, 81)
    want = math.exp(-2 * NOISE_VARIANCE) * np.sin(2 * inner) + 0.2 * inner
    np.testing.assert_allclose(smoothed(inner), want, atol=1e-6)
