"""The two propositions of the paper, in small: why A is tied, and why predictions get smoother.

The regression task of the first is small enough to take the expectation over the noise exactly:
F(A n + psi_j + m~, B x_i) is fitted to y_ij, with A = B (tied) or a free A. A matrix that carries
only noise shrinks to zero.

The second is drawn in one dimension: Y depends on the position X, and only R = X + noise is known.
The best prediction E[Y | R = r] is the mean of E[Y | X = x] over all x that r may stand for: a
convolution with a Gaussian, if all positions are equally likely.
"""

import functools
import math
from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from stopmim.config.schema import resolve
from stopmim.insight.figures import curves
from stopmim.insight.figures.pictures import BLOCKS, INK, SERIES, house_style, panels, style_plot
from stopmim.method.build import build_positions
from stopmim.method.positions import Positions, StochasticPositions
from stopmim.runs.run import Run

SIGMA, SIDE, WIDTH, ENCODER, IMAGES, STEPS = 0.25, 3, 4, 2, 6, 400
LENGTH = 10.0
PLACES = np.linspace(0.0, LENGTH, 800)
# E[Y | X = place], the function to predict: fine detail on the left, an edge on the right.
EDGE = np.where(PLACES < 0.75 * LENGTH, -1.0, 1.0)
CLEAN = np.where(PLACES < LENGTH / 2, np.sin(3 * PLACES), EDGE)
VARIANCES = {0.05: (SERIES[0], "-"), 0.25: (SERIES[1], "-"), 1.0: ("#009e73", "--")}


@functools.cache
def toy(*, tied: bool) -> np.ndarray:
    """Norm of A (STEPS,), relative to its start, in gradient descent on the expected loss."""
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    positions = StochasticPositions(SIDE, WIDTH, SIGMA)
    context = nn.Linear(ENCODER, WIDTH, bias=False)
    noise = context if tied else nn.Linear(ENCODER, WIDTH, bias=False)
    f = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.Tanh(), nn.Linear(16, IMAGES))
    model = nn.ModuleList([positions, context, noise, f]).double()
    with torch.no_grad():
        for parameter in (positions.mask_token, *f.parameters()):
            parameter.copy_(0.4 * normal(*parameter.shape))
        start = 0.5 * normal(WIDTH, ENCODER)
        context.weight.copy_(start)
        noise.weight.copy_(start)
    x = normal(IMAGES, ENCODER)
    x -= x.mean(dim=0)
    place = positions.table[0].double() @ normal(WIDTH, IMAGES)  # (J, 6)
    gain, mixed = x @ normal(ENCODER, IMAGES), x @ normal(ENCODER, IMAGES)
    y = place + gain[:, None] + mixed[:, None] * place.sin()  # (I, J, 6)

    # Gauss-Hermite nodes integrate over the noise without sampling.
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(5))
    draws = torch.cartesian_prod(*[math.sqrt(SIGMA) * nodes] * ENCODER)  # (Q, D)
    weight = torch.cartesian_prod(*[weights / weights.sum()] * ENCODER).prod(dim=1)  # (Q,)
    index = torch.arange(SIDE * SIDE).expand(len(draws), -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.012)
    norms = []
    for _ in range(STEPS):
        norms.append(float(noise.weight.detach().norm()))
        same = draws[:, None].expand(-1, SIDE * SIDE, -1)
        m, c = positions(index, noise, noise=same), context(x)
        shape = (len(m), len(c), m.shape[1], WIDTH)  # (Q, I, J, P)
        pairs = torch.cat([m[:, None].expand(shape), c[None, :, None].expand(shape)], dim=-1)
        loss = weight @ (f(pairs) - y).square().sum(-1).mean(dim=(1, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return np.array(norms) / norms[0]


def _carried(positions: Positions) -> str:
    """Tokens that pass through the matrix whose norm is logged, in words."""
    if isinstance(positions, StochasticPositions) and positions.covariance != "fixed":
        return "noise only" if positions.untied else "context and noise"
    return "context only"


@house_style()
def collapse(runs: Sequence[Run]) -> Figure:
    """Draws the toy task on the left and, if there are runs, the norm of their A on the right."""
    columns = 2 if runs else 1
    picture, (grid,) = panels(1, columns, (3.3 * columns, 2.5))
    for colour, name, tied in zip(SERIES, ("tied, A = B", "free A"), (True, False), strict=True):
        grid[0].plot(toy(tied=tied), color=colour, linewidth=1.8, label=name)
    for colour, run in zip(cycle(BLOCKS), runs, strict=False):  # other colours than on the left
        c = curves.curve(run.metrics, "norm_A")
        positions = build_positions(resolve(run.config))
        name = f"{run.path.resolve().name}: A carries {_carried(positions)}\n{positions.describe()}"
        relative = c.mean / (c.mean[0] if len(c.mean) else 1.0)
        grid[1].plot(c.step, relative, color=colour, linewidth=1.8, label=name)
    titles = ("the proposition's regression task", "norm of A in training")
    for axes, title, size in zip(grid, titles, (None, 7), strict=False):
        style_plot(axes, title, "step")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="best", fontsize=size)
    grid[0].set_ylabel("norm of A, relative to its start")
    return picture


def posterior_mean(r: np.ndarray, x: np.ndarray, y: np.ndarray, variance: float) -> np.ndarray:
    """E[Y | R = r] by Bayes' rule, for equally likely positions `x`."""
    joint = np.exp(-np.square(r[:, None] - x) / (2 * variance))  # (r, x)
    return joint @ y / joint.sum(axis=1)


@house_style()
def smoothing() -> Figure:
    """Draws the function to predict, and its best predictions under more and more noise."""
    picture, ((axes,),) = panels(1, 1, (6.4, 2.6))
    axes.plot(PLACES, CLEAN, color=INK, linewidth=1.0, label="exact position")
    for variance, (colour, dash) in VARIANCES.items():
        best = posterior_mean(PLACES, PLACES, CLEAN, variance)
        label = f"noise of std {math.sqrt(variance):.2g}"
        axes.plot(PLACES, best, color=colour, linewidth=1.8, linestyle=dash, label=label)
    style_plot(axes, x="position")
    axes.set_ylabel("best prediction")
    axes.margins(x=0)
    picture.legend(frameon=False, ncols=4, loc="outside upper center")
    return picture
