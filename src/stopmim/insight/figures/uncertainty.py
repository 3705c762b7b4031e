"""Where predictions are wrong, and where they depend on the noise of the positions.

Shapes: n images, N = side * side patches, R masks, S draws, M target blocks of K patches.
"""

import numpy as np
import torch
from matplotlib.figure import Figure

from stopmim.base.random_keys import torch_generator
from stopmim.health.measure import patch_targets
from stopmim.insight.figures import pictures
from stopmim.insight.figures.pictures import house_style
from stopmim.insight.figures.subject import Subject, pixels
from stopmim.method.build import draw_masks


@torch.no_grad()
def uncertainty(
    subject: Subject, masks: int = 24, draws: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Error, variance and number of the predictions, patch by patch: (n, side, side) each.

    The error is the mean squared one per component, over masks and draws; the variance is that
    over draws. Both are nan where a patch was never predicted.
    """
    model, views = subject.model.eval(), subject.views
    images, n, side = pixels(views), len(views), views[0].side
    found = patch_targets(model, images)  # (n, N, T)
    sums = torch.zeros(3, n, side * side)  # error, variance, count
    for r in range(masks):
        (drawn,) = draw_masks(subject.config, r, [slice(0, n)], torch.device("cpu"))
        context, targets = drawn.context[:n], drawn.targets[:, :n]
        generator = torch_generator("uncertainty", r)
        # (n, C, D), once for all draws: the noise enters behind the encoder
        seen = model.encoder(images, context, all_tokens=model.target.class_token_seen)
        noises = [model.predictor.draw(context, targets, generator) for _ in range(draws)]
        many = torch.stack([model.predictor(seen, context, targets, noise) for noise in noises])
        # (S, M, n, K, T)
        want = torch.stack([found[torch.arange(n)[:, None], block] for block in targets])
        error = (many - want).square().mean(dim=(0, -1))  # (M, n, K)
        variance = many.var(dim=0).mean(dim=-1)
        for total, values in zip(sums, (error, variance, torch.ones_like(error)), strict=True):
            for index, value in zip(targets, values, strict=True):  # (n, K) each
                total.scatter_add_(1, index, value)
    error, variance, count = (x.reshape(n, side, side).numpy() for x in sums)
    often = np.where(count > 0, count, np.nan)
    return error / often, variance / often, count


@house_style()
def figure(subject: Subject, rows: int = 4) -> Figure:
    """One row per image: the image, the error, the variance over noise; one scale per column."""
    rows = min(rows, len(subject.views))
    picture, grid = pictures.panels(rows, 3, (5.6, 1.75 * rows + 0.5))
    pictures.style_images(grid)
    for axes, view in zip(grid[:, 0], subject.views, strict=False):
        axes.imshow(view.image)
    for column, maps in zip(grid.T[1:], uncertainty(subject)[:2], strict=True):
        high = float(np.nanmax(maps[:rows])) or 1.0
        for axes, values in zip(column, maps, strict=False):
            axes.set_facecolor(pictures.RULE)  # seen where a patch was never predicted
            shown = axes.imshow(values, cmap="viridis", vmin=0, vmax=high)
        options = {"location": "bottom", "shrink": 0.8, "aspect": 24, "pad": 0.01}
        bar = pictures.colour_bar(picture, shown, column, **options)
        bar.set_ticks([0, high], labels=["0", f"{high:.2g}"])
    titles = ("image", "error of the prediction", "variance over noise draws")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, size=9)
    return picture
