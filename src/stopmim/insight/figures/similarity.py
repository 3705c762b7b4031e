"""Similarity of a stochastic position to its neighbours: the paper's similarity figure.

Shapes: Q query patches, S draws, N = side * side patches, P predictor width.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from stopmim.base.random_keys import torch_generator
from stopmim.insight.figures import pictures
from stopmim.insight.figures.pictures import house_style
from stopmim.insight.figures.subject import Subject, indices, pixels
from stopmim.method.model import MaskedImageModel
from stopmim.method.positions import Positions

DRAWS = 64  # of every position
OFF = 0.99  # share of draws nearest to their own position above which the noise changes nothing
COLUMNS = ("deterministic", "one draw", "mean of {draws} draws")


class Similarity(NamedTuple):
    queries: np.ndarray  # (Q,) int64 patch numbers
    maps: np.ndarray  # (Q, 3, side, side) cosine to every fixed position, in the order of COLUMNS
    found: np.ndarray  # (Q,) share of the draws whose most similar fixed position is the query
    strength: float  # root mean square length of A n, over that of psi_q
    draws: int

    @property
    def practically_off(self) -> bool:
        """Whether hardly any draw could be mistaken for another position."""
        return bool(self.found.mean() >= OFF)

    @property
    def caption(self) -> str:
        """The strength of the noise in words."""
        noise = f"noise of {100 * self.strength:.0f} % of the length of a position"
        return f"{noise}, {100 * self.found.mean():.0f} % of draws nearest to their own"


def default_queries(side: int) -> Tensor:
    """Three patches (Q,): near a corner, at the centre, near an edge."""
    places = ((side // 8, side // 8), (side // 2, side // 2), (3 * side // 4, side // 4))
    return torch.tensor([row * side + col for row, col in places])


def of_model(
    model: MaskedImageModel, seed: int, queries: Tensor | None = None, context: Tensor | None = None
) -> Similarity:
    """The similarity of some positions of a model, three by default; see `similarity`."""
    positions, project = model.predictor.positions, model.predictor.noise_layer
    queries = default_queries(positions.side) if queries is None else queries
    return similarity(positions, project, queries, DRAWS, torch_generator("report", seed), context)


@torch.no_grad()
def seen(subject: Subject) -> Tensor:
    """The context tokens (C, D) of the first image, for noise that is made from them."""
    context, _ = indices(subject.views[:1])
    return subject.model.encoder(pixels(subject.views[:1], subject.config), context)[0]


@torch.no_grad()
def similarity(
    positions: Positions,
    project: nn.Linear,
    queries: Tensor,
    draws: int,
    generator: torch.Generator,
    context: Tensor | None = None,
) -> Similarity:
    """Cosine to every psi_j of psi_q, of one draw psi_q + A n, and its mean over draws.

    The paper names neither the similarity of its figure nor the number of draws. The mean is taken
    over cosines: the cosine of the mean embedding would be the deterministic one again.

    `project` is A, the predictor's `noise_layer`; `queries` are patch numbers (Q,); `context` are
    tokens (C, D) of an image, for noise that is made from them. Without noise the maps are equal.
    """
    psi = positions.table[0].double()  # (N, P)
    query = psi[queries]  # (Q, P)
    drawn = query.expand(draws, *query.shape)  # (S, Q, P)
    index = queries.expand(draws, -1)  # (S, Q)
    count = 0 if context is None else len(context)
    noise = positions.draw(index, project, generator, seen=count)
    if noise is not None:
        # A n alone: the difference has neither m~ nor, in `released` mode, the bias of A.
        noisy, still = (
            positions(index, project, noise=n, tokens="context", context=context)
            for n in (noise, torch.zeros_like(noise))
        )
        drawn = drawn + (noisy - still)
    table = F.normalize(psi, dim=-1).T  # (P, N)
    certain = F.normalize(query, dim=-1) @ table  # (Q, N)
    uncertain = F.normalize(drawn, dim=-1) @ table  # (S, Q, N)
    maps = torch.stack([certain, uncertain[0], uncertain.mean(dim=0)], dim=1)  # (Q, 3, N)
    found = (uncertain.argmax(dim=-1) == queries).double().mean(dim=0)
    return Similarity(
        queries.numpy(),
        maps.unflatten(-1, (positions.side, positions.side)).numpy(),
        found.numpy(),
        float((drawn - query).square().mean().sqrt() / query.square().mean().sqrt()),
        draws,
    )


@house_style()
def figure(similarity: Similarity) -> Figure:
    """Draws one row per query, one column per kind of position; the query is framed."""
    rows, columns, side, _ = similarity.maps.shape
    picture, grid = pictures.panels(rows, columns, (5.6, 1.72 * rows))
    pictures.style_images(grid)
    low, high = float(similarity.maps.min()), float(similarity.maps.max())
    for r, c in np.ndindex(rows, columns):
        shown = grid[r, c].imshow(
            similarity.maps[r, c], cmap="viridis", vmin=low, vmax=high, extent=(0, side, side, 0)
        )
        pictures.mark_patch(grid[r, c], int(similarity.queries[r]), side)
    for axes, title in zip(grid[0], COLUMNS, strict=True):
        axes.set_title(title.format(draws=similarity.draws), size=9)
    for axes, query in zip(grid[:, 0], similarity.queries, strict=True):
        row, col = divmod(int(query), side)
        axes.set_ylabel(f"row {row + 1}, column {col + 1}", size=8.5)
    bar = pictures.colour_bar(picture, shown, grid, shrink=0.5, aspect=24, pad=0.02)
    bar.set_label("cosine similarity", color=pictures.INK, size=8.5)
    return picture
