"""Where predictions are wrong, and where they depend on the noise of the position.

Shapes: n images, N = side * side patches, R masks, S draws, M target blocks of K patches.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from stopmim.base.random_keys import torch_generator
from stopmim.insight.figures.pictures import RULE, Preview, house_style
from stopmim.insight.figures.subject import Subject, pixels, tokens
from stopmim.method.build import draw_masks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Uncertainty(NamedTuple):
    views: list[Preview]
    error: np.ndarray  # (n, side, side) mean squared error per component, over masks and draws
    spread: np.ndarray  # (n, side, side) variance of the prediction over the draws
    times: np.ndarray  # (n, side, side) how often the patch was hidden; both are nan where never


@torch.no_grad()
def uncertainty(subject: Subject, masks: int = 24, draws: int = 4) -> Uncertainty:
    """Error of the predictions, and how much they move with the noise, patch by patch."""
    model, views = subject.model.eval(), subject.views
    images, n, side = pixels(views), len(views), views[0].side
    found = tokens(model, images)  # (n, N, D)
    sums = torch.zeros(3, n, side * side)  # error, spread, count
    for r in range(masks):
        (drawn,) = draw_masks(subject.config, r, [slice(0, n)], torch.device("cpu"))
        context, targets = drawn.context[:n], drawn.targets[:, :n]
        generator = torch_generator("uncertainty", r)
        seen = model.encoder(images, context)  # (n, C, D): the noise comes after it
        noises = [model.predictor.draw(context, targets, generator) for _ in range(draws)]
        many = torch.stack([model.predictor(seen, context, targets, noise) for noise in noises])
        # (S, M, n, K, D)
        want = torch.stack([found[torch.arange(n)[:, None], block] for block in targets])
        error = (many - want).square().mean(dim=(0, -1))  # (M, n, K)
        spread = many.var(dim=0).mean(dim=-1)
        for total, values in zip(sums, (error, spread, torch.ones_like(error)), strict=True):
            for index, value in zip(targets, values, strict=True):  # (n, K) each
                total.scatter_add_(1, index, value)
    error, spread, count = (x.reshape(n, side, side).numpy() for x in sums)
    often = np.where(count > 0, count, np.nan)
    return Uncertainty(views, error / often, spread / often, count)


@house_style()
def figure(found: Uncertainty, rows: int = 4) -> "Figure":
    """A row per image: the image, the error, the spread over noise; one scale per column."""
    from matplotlib.figure import Figure

    rows = min(rows, len(found.views))
    picture = Figure(figsize=(5.6, 1.75 * rows + 0.5), layout="constrained")
    grid: Any = picture.subplots(rows, 3, squeeze=False)
    titles = ("image", "error of the prediction", "spread over noise draws")
    for c, maps in enumerate((None, found.error, found.spread)):
        for r in range(rows):
            if maps is None:
                grid[r, c].imshow(found.views[r].image)
            else:
                high = float(np.nanmax(maps[:rows])) or 1.0
                grid[r, c].set_facecolor(RULE)  # where a patch was never hidden
                shown = grid[r, c].imshow(maps[r], cmap="viridis", vmin=0, vmax=high)
        grid[0, c].set_title(titles[c], size=9)
        if maps is not None:
            bar = picture.colorbar(
                shown, ax=grid[:, c], location="bottom", shrink=0.8, aspect=24, pad=0.01
            )
            bar.set_ticks([0, high], labels=["0", f"{high:.2g}"])
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return picture
