"""Heat maps: which patches of an image resemble the prediction for a hidden patch.

As in the paper: the cosine of one prediction with all targets of the same image, then a softmax.
I-JEPA finds the right place, StoP also finds the same object elsewhere.

Shapes: n images, M target blocks of K patches, N = side * side patches, T numbers of a target.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from stopmim.insight.figures import pictures
from stopmim.insight.figures.pictures import Preview, house_style
from stopmim.insight.figures.subject import Subject, indices, pixels, tokens

TEMPERATURE = 0.1  # of the softmax; the paper gives none, and with 1 every map is almost flat


class Prediction(NamedTuple):
    name: str
    views: list[Preview]
    cosine: list[np.ndarray]  # per image (M * K, N): one row per hidden patch, block by block
    patches: list[np.ndarray]  # per image (M * K,): the patch number of each row


@torch.no_grad()
def predict(subject: Subject) -> Prediction:
    """Cosine of every prediction with every target of its image, without noise."""
    model, views = subject.model.eval(), subject.views
    images, (context, targets) = pixels(views), indices(views)
    noise = model.predictor.draw(context, targets, torch.Generator()).zeros()
    predicted = F.normalize(model.predict(images, context, targets, noise), dim=-1)  # (M, n, K, T)
    found = F.normalize(tokens(model, images), dim=-1)  # (n, N, T)
    cosine = torch.einsum("mnkd,npd->nmkp", predicted, found).flatten(1, 2)  # (n, M * K, N)
    order = targets.transpose(0, 1).flatten(1)  # (n, M * K)
    return Prediction(subject.name, views, list(cosine.numpy()), list(order.numpy()))


def heat(cosine: np.ndarray) -> np.ndarray:
    """Softmax over the patches, (..., N), scaled so that the hottest is 1."""
    hot = np.exp((cosine - cosine.max(axis=-1, keepdims=True)) / TEMPERATURE)
    return hot / hot.max(axis=-1, keepdims=True)


def central(patches: np.ndarray, side: int) -> int:
    """The row of the hidden patch nearest to the centre of all: an example for a figure."""
    places = np.stack(np.divmod(patches, side), axis=1).astype(float)
    return int(np.square(places - places.mean(axis=0)).sum(axis=1).argmin())


@house_style()
def figure(predictions: Sequence[Prediction], rows: int = 4) -> Figure:
    """One row per image: the visible part, then the heat map of one hidden patch for every run."""
    rows, columns = min(rows, len(predictions[0].views)), len(predictions)
    size = 1.9 * (columns + 1) + 0.8, 1.9 * rows + 0.3
    picture, grid = pictures.panels(rows, columns + 1, size)
    pictures.style_images(grid)
    for r in range(rows):
        view, patches = predictions[0].views[r], predictions[0].patches[r]
        side, row = view.side, central(patches, view.side)
        extent = (0, side, side, 0)
        grid[r, 0].imshow(pictures.faded(view.image, view.context, side), extent=extent)
        for c, prediction in enumerate(predictions, 1):
            hot = heat(prediction.cosine[r][row]).reshape(side, side)
            grid[r, c].imshow(view.image.mean(axis=2), cmap="gray", extent=extent)
            shown = grid[r, c].imshow(hot, cmap="magma", alpha=0.75, vmin=0, vmax=1, extent=extent)
            if r == 0:
                grid[r, c].set_title(prediction.name, size=9)
        for axes in grid[r]:
            pictures.mark_patch(axes, int(patches[row]), side)
    grid[0, 0].set_title("seen; hidden patch", size=9)
    bar = pictures.colour_bar(picture, shown, grid, shrink=0.5, aspect=24, pad=0.02, ticks=[0, 1])
    bar.ax.set_yticklabels(["least", "most"])
    bar.set_label("similar to the prediction", size=8.5)
    return picture
