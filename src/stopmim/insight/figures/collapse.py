"""Why A is tied: a matrix that carries noise and nothing else shrinks to nothing.

The regression task of the paper's proposition, small enough to take the expectation over the noise
exactly: F(A n + psi_j + m~, B x_i) is to be y_ij, with A = B (tied) or A on its own.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stopmim.insight.figures import curves
from stopmim.insight.figures.pictures import BLOCKS, SERIES, house_style
from stopmim.method.positions import StochasticPositions
from stopmim.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGMA, SIDE, WIDTH, ENCODER, IMAGES = 0.25, 3, 4, 2, 6


class Shrinkage(NamedTuple):
    name: str
    step: np.ndarray  # (b,)
    norm: np.ndarray  # (b,) of A, relative to its start


def toy(*, tied: bool, steps: int = 400, seed: int = 1) -> Shrinkage:
    """Gradient descent on the expected loss of the proposition's regression task."""
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
    return Shrinkage("tied, A = B" if tied else "A on its own", np.arange(steps), relative)


def of_run(run: Run) -> Shrinkage:
    """The norm of the matrix that carries the noise of a run, over its steps."""
    c = curves.curve(run.metrics, "norm_A")
    covariance = run.config.positions.covariance
    start = c.mean[0] if len(c.mean) else 1.0
    return Shrinkage(f"{run.path.resolve().name} ({covariance})", c.step, c.mean / start)


@house_style()
def figure(toys: Sequence[Shrinkage], runs: Sequence[Shrinkage]) -> "Figure":
    """The toy on the left; the runs, if there are any, on the right."""
    from matplotlib.figure import Figure

    panels = [("the proposition's regression task", toys)]
    panels += [("norm of A in training", runs)] if runs else []
    picture = Figure(figsize=(3.3 * len(panels), 2.5), layout="constrained")
    grid: Any = picture.subplots(1, len(panels), squeeze=False)
    for axes, (title, lines) in zip(grid[0], panels, strict=True):
        for colour, line in zip((*SERIES, *BLOCKS), lines, strict=False):
            axes.plot(line.step, line.norm, color=colour, linewidth=1.8, label=line.name)
        axes.set_title(title, size=9)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="best")
        axes.grid(axis="y", linewidth=0.7)
        axes.tick_params(length=0)
        axes.spines[["top", "left", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("norm of A, relative to its start")
    return picture
