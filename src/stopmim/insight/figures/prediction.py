"""Where in an image the features are that the predictor expects at a hidden patch: the heat maps.

The paper: cosine of one predicted feature with all target features of the same image, then a
softmax. I-JEPA is right about the place, StoP finds the same object elsewhere too.

Shapes: n images, Q hidden patches asked for, N = side * side patches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from stopmim.insight.figures.pictures import Preview, faded, house_style, mark_patch
from stopmim.insight.figures.subject import Subject, indices, pixels, tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPERATURE = 0.1  # of the softmax; the paper names none, and with 1 every map is almost flat


class Prediction(NamedTuple):
    name: str
    views: list[Preview]
    cosine: list[np.ndarray]  # per image (M * K, N): one row per hidden patch, block by block
    patches: list[np.ndarray]  # per image (M * K,): the patch number of each row


@torch.no_grad()
def predict(subject: Subject) -> Prediction:
    """Cosine of every predicted feature with every target feature of its image, without noise."""
    model, views = subject.model.eval(), subject.views
    images, (context, targets) = pixels(views), indices(views)
    predictor = model.predictor
    drawn = predictor.draw(context, targets, torch.Generator())
    still = drawn._replace(
        masked=None if drawn.masked is None else torch.zeros_like(drawn.masked),
        context=None if drawn.context is None else torch.zeros_like(drawn.context),
    )
    predicted = F.normalize(model.predict(images, context, targets, still), dim=-1)  # (M, n, K, D)
    found = F.normalize(tokens(model, images), dim=-1)  # (n, N, D)
    cosine = torch.einsum("mnkd,npd->nmkp", predicted, found).flatten(1, 2)  # (n, M * K, N)
    order = targets.transpose(0, 1).flatten(1)  # (n, M * K)
    return Prediction(subject.name, views, list(cosine.numpy()), list(order.numpy()))


def heat(cosine: np.ndarray) -> np.ndarray:
    """Softmax over the patches, (..., N), scaled so that the hottest is 1."""
    hot = np.exp((cosine - cosine.max(axis=-1, keepdims=True)) / TEMPERATURE)
    return hot / hot.max(axis=-1, keepdims=True)


def central(patches: np.ndarray, side: int) -> int:
    """The row of the patch nearest the middle of all that are hidden: an example for a figure."""
    places = np.stack(np.divmod(patches, side), axis=1).astype(float)
    return int(np.square(places - places.mean(axis=0)).sum(axis=1).argmin())


@house_style()
def figure(predictions: Sequence[Prediction], rows: int = 4) -> "Figure":
    """A row per image: what is seen, then the heat map of one hidden patch for every run."""
    from matplotlib.figure import Figure

    rows, columns = min(rows, len(predictions[0].views)), len(predictions)
    picture = Figure(figsize=(1.9 * (columns + 1) + 0.8, 1.9 * rows + 0.3), layout="constrained")
    grid: Any = picture.subplots(rows, columns + 1, squeeze=False)
    for r in range(rows):
        view, patches = predictions[0].views[r], predictions[0].patches[r]
        side, row = view.side, central(patches, view.side)
        extent = (0, side, side, 0)
        grid[r, 0].imshow(faded(view.image, view.context, side), extent=extent)
        for c, prediction in enumerate(predictions, 1):
            hot = heat(prediction.cosine[r][row]).reshape(side, side)
            grey = view.image.mean(axis=2)
            grid[r, c].imshow(grey, cmap="gray", extent=extent)
            shown = grid[r, c].imshow(hot, cmap="magma", alpha=0.75, vmin=0, vmax=1, extent=extent)
            if r == 0:
                grid[r, c].set_title(prediction.name, size=9)
        for axes in grid[r]:
            mark_patch(axes, int(patches[row]), side)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    grid[0, 0].set_title("seen, patch asked for", size=9)
    bar = picture.colorbar(shown, ax=grid, shrink=0.5, aspect=24, pad=0.02, ticks=[0, 1])
    bar.ax.set_yticklabels(["least", "most"])
    bar.set_label("similar to the prediction", size=8.5)
    bar.outline.set_visible(False)
    return picture
