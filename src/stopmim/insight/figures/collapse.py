"""Why A is tied: a matrix that carries only noise shrinks to zero.

The regression task of the paper's proposition, small enough to take the expectation over the noise
exactly: F(A n + psi_j + m~, B x_i) is fitted to y_ij, with A = B (tied) or a free A.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from stopmim.config.schema import resolve
from stopmim.insight.figures import curves
from stopmim.insight.figures.pictures import BLOCKS, SERIES, house_style, panels, style_plot
from stopmim.method.build import build_positions
from stopmim.method.positions import StochasticPositions
from stopmim.runs.run import Run

SIGMA, SIDE, WIDTH, ENCODER, IMAGES = 0.25, 3, 4, 2, 6


class Shrinkage(NamedTuple):
    name: str
    step: np.ndarray  # (b,)
    norm: np.ndarray  # (b,) of A, relative to its start


def toy(*, tied: bool, steps: int = 400, seed: int = 1) -> Shrinkage:
    """Norm of A during gradient descent on the expected loss of the regression task."""
    g = torch.Generator().manual_seed(seed)

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
    for _ in range(steps):
        norms.append(float(noise.weight.detach().norm()))
        same = draws[:, None].expand(-1, SIDE * SIDE, -1)
        m, c = positions(index, noise, noise=same), context(x)
        shape = (len(m), len(c), m.shape[1], WIDTH)  # (Q, I, J, P)
        pairs = torch.cat([m[:, None].expand(shape), c[None, :, None].expand(shape)], dim=-1)
        loss = weight @ (f(pairs) - y).square().sum(-1).mean(dim=(1, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    relative = np.array(norms) / norms[0]
    return Shrinkage("tied, A = B" if tied else "free A", np.arange(steps), relative)


def of_run(run: Run) -> Shrinkage:
    """The norm of the matrix that carries the noise of a run, over its steps."""
    c = curves.curve(run.metrics, "norm_A")
    name = f"{run.path.resolve().name}\n{build_positions(resolve(run.config)).describe()}"
    return Shrinkage(name, c.step, c.mean / (c.mean[0] if len(c.mean) else 1.0))


@house_style()
def figure(toys: Sequence[Shrinkage], runs: Sequence[Shrinkage]) -> Figure:
    """The toy task on the left; the runs, if there are any, on the right."""
    shown = [("the proposition's regression task", toys)]
    shown += [("norm of A in training", runs)] if runs else []
    picture, grid = panels(1, len(shown), (3.3 * len(shown), 2.5))
    for axes, (title, lines) in zip(grid[0], shown, strict=True):
        for colour, line in zip((*SERIES, *BLOCKS), lines, strict=False):
            axes.plot(line.step, line.norm, color=colour, linewidth=1.8, label=line.name)
        style_plot(axes, title, "step")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="best", fontsize=7 if lines is runs else None)
    grid[0, 0].set_ylabel("norm of A, relative to its start")
    return picture
