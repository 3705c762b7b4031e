"""Predictions: patches that resemble them, their errors, and their dependence on the noise.

Heat maps are made as in the paper: the cosine of one prediction with all targets of the same image,
then a softmax. I-JEPA finds the right place, StoP also finds the same object elsewhere.

Shapes: n images, M target blocks of K patches, N = side * side patches, T numbers of a target,
R masks, S draws.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from stopmim.base.random_keys import torch_generator
from stopmim.config.schema import Config
from stopmim.health.measure import patch_targets
from stopmim.insight.figures import pictures
from stopmim.insight.figures.pictures import Preview, house_style
from stopmim.insight.figures.subject import Subject, indices, pixels
from stopmim.method.build import draw_masks
from stopmim.method.model import MaskedImageModel

ROWS = 4  # images of a figure
TEMPERATURE = 0.1  # of the softmax; the paper gives none, and with 1 every map is almost flat


@torch.no_grad()
def predict(model: MaskedImageModel, views: list[Preview], config: Config) -> np.ndarray:
    """Cosine of every prediction with every target of its image, without noise: (n, M * K, N).

    `config` is the model's: it says how images are normalised. The hidden patches are in the order
    of `view.targets`, block by block.
    """
    model.eval()
    images, (context, targets) = pixels(views, config), indices(views)
    noise = model.predictor.draw(context, targets, torch.Generator()).zeros()
    predicted = F.normalize(model.predict(images, context, targets, noise), dim=-1)  # (M, n, K, T)
    found = F.normalize(patch_targets(model, images), dim=-1)  # (n, N, T)
    return torch.einsum("mnkd,npd->nmkp", predicted, found).flatten(1, 2).numpy()


def heat(cosine: np.ndarray) -> np.ndarray:
    """Softmax over the patches, (..., N), scaled so that the hottest is 1."""
    hot = np.exp((cosine - cosine.max(axis=-1, keepdims=True)) / TEMPERATURE)
    return hot / hot.max(axis=-1, keepdims=True)


def near(patches: np.ndarray, side: int) -> np.ndarray:
    """Whether a patch of the grid is one of `patches` (H,) or beside it, diagonals too: (H, N)."""
    row, col = np.divmod(np.arange(side * side), side)
    rows, cols = np.divmod(patches[:, None], side)
    return np.maximum(np.abs(row - rows), np.abs(col - cols)) <= 1


def heat_nearby(cosines: np.ndarray, views: Sequence[Preview]) -> float:
    """Share of the softmax at the hidden patch and beside it, over all hidden patches of `views`.

    `cosines` (n, M * K, N) come from `predict`. If all are equal, it is the share of these patches.
    """
    hot = heat(cosines)
    hot /= hot.sum(axis=-1, keepdims=True)
    beside = np.stack([near(view.targets.ravel(), view.side) for view in views])  # (n, M * K, N)
    return float((hot * beside).sum(axis=-1).mean())


def central(patches: np.ndarray, side: int) -> int:
    """The row of the hidden patch nearest to the centre of all: an example for a figure."""
    places = np.stack(np.divmod(patches, side), axis=1).astype(float)
    return int(np.square(places - places.mean(axis=0)).sum(axis=1).argmin())


@house_style()
def heat_maps(subjects: Sequence[Subject]) -> Figure:
    """Draws one row per image: the visible part, then heat maps of one hidden patch per run.

    Titles have the share of the heat near the hidden patch, over all images of the subjects.
    """
    views, columns = subjects[0].views, len(subjects) + 1
    cosines = [predict(subject.model, views, subject.config) for subject in subjects]
    rows = min(ROWS, len(views))
    picture, grid = pictures.panels(rows, columns, (1.9 * columns + 0.8, 1.9 * rows + 0.3))
    pictures.style_images(grid)
    for r, view in enumerate(views[:rows]):
        side, patches = view.side, view.targets.ravel()
        row, extent = central(patches, side), (0, side, side, 0)
        grid[r, 0].imshow(pictures.faded(view.picture, view.context, side), extent=extent)
        for axes, cosine in zip(grid[r, 1:], cosines, strict=True):
            hot = heat(cosine[r, row]).reshape(side, side)
            axes.imshow(view.picture.mean(axis=2), cmap="gray", extent=extent)
            shown = axes.imshow(hot, cmap="magma", alpha=0.75, vmin=0, vmax=1, extent=extent)
        for axes in grid[r]:
            pictures.mark_patch(axes, int(patches[row]), side)
    chance = heat_nearby(np.zeros_like(cosines[0]), views)
    titles = [f"seen; hidden patch\n{100 * chance:.0f} % of the patches"]
    for subject, cosine in zip(subjects, cosines, strict=True):
        titles.append(f"{subject.name}\n{100 * heat_nearby(cosine, views):.0f} % of the heat")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, size=9)
    caption = ("percent: within one patch of the hidden one", views[0].caption)
    picture.supxlabel("; ".join(filter(None, caption)), size=8.5)
    bar = pictures.colour_bar(picture, shown, grid, shrink=0.5, aspect=24, pad=0.02, ticks=[0, 1])
    bar.ax.set_yticklabels(["least", "most"])
    bar.set_label("similar to the prediction", size=8.5)
    return picture


@torch.no_grad()
def uncertainty(
    subject: Subject, masks: int = 24, draws: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Error, variance and number of the predictions, patch by patch: (n, side, side) each.

    The error is the mean squared one per component, over masks and draws; the variance is that
    over draws. Both are nan where a patch was never predicted.
    """
    model, views = subject.model.eval(), subject.views
    images, n, side = pixels(views, subject.config), len(views), views[0].side
    found = patch_targets(model, images)  # (n, N, T)
    sums = torch.zeros(3, n, side * side)  # error, variance, count
    for r in range(masks):
        (drawn,) = draw_masks(subject.config, r, [slice(0, n)], torch.device("cpu"))
        context, targets = drawn.context[:n], drawn.targets[:, :n]
        generator = torch_generator("uncertainty", r)
        # (n, C, D), once for all draws: the noise enters after the encoder
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
def uncertainty_maps(subject: Subject) -> Figure:
    """Draws one row per image: image, error, variance over noise; one scale per column."""
    rows = min(ROWS, len(subject.views))
    picture, grid = pictures.panels(rows, 3, (5.6, 1.75 * rows + 0.5))
    pictures.style_images(grid)
    for axes, view in zip(grid[:, 0], subject.views, strict=False):
        axes.imshow(view.picture)
    *found, times = uncertainty(subject)
    for column, maps in zip(grid.T[1:], found, strict=True):
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
    grey = "grey: a patch that no mask asked for" if (times[:rows] == 0).any() else ""
    if caption := "; ".join(filter(None, (grey, subject.views[0].caption))):
        picture.supxlabel(caption, size=8.5)
    return picture
