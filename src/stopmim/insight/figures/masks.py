"""A preview of the masks of a config: on images, and how often each patch of the grid takes part.

Shapes: S steps, N = side * side patches.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from stopmim.config.schema import Config
from stopmim.insight.figures.pictures import Preview, draw, house_style
from stopmim.method.build import draw_masks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = 64  # per step


class Coverage(NamedTuple):
    seen: np.ndarray  # (side, side) share of the images in which the patch is seen
    hidden: np.ndarray  # (side, side) share in which it is to be predicted, in any block


def coverage(config: Config, steps: int = 50) -> Coverage:
    """Shares over the first `steps` updates; a corner that is never used shows at once."""
    n, side = min(IMAGES, config.optim.batch_size), config.side
    counts = np.zeros((2, side * side))
    for step in range(steps):
        (masks,) = draw_masks(config, step, [slice(0, n)], torch.device("cpu"))
        for count, index in zip(counts, (masks.context[None], masks.targets), strict=True):
            # (M, n, K) patches: one that is in several blocks of an image counts once.
            taken = torch.zeros(n, side * side).scatter_(1, torch.cat([*index[:, :n]], dim=1), 1)
            count += taken.sum(dim=0).numpy()
    seen, hidden = (counts / (n * steps)).reshape(2, side, side)
    return Coverage(seen, hidden)


@house_style()
def figure(views: list[Preview], found: Coverage) -> "Figure":
    """Images with their masks, and beside them the two maps."""
    from matplotlib.figure import Figure

    columns = min(4, len(views))
    picture = Figure(figsize=(2 * (columns + 1) + 0.6, 4), layout="constrained")
    grid: Any = picture.subplots(2, columns + 1, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, view in zip(grid[:, :columns].flat, views, strict=False):
        draw(axes, view)
    titles = ("seen", "to be predicted")
    for axes, shares, title in zip(grid[:, columns], found, titles, strict=True):
        axes.set_axis_on()
        shown = axes.imshow(100 * shares, cmap="viridis", vmin=0)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(f"how often {title}", size=9)
        bar = picture.colorbar(shown, ax=axes, shrink=0.75, aspect=14, format="%.0f %%")
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
    return picture
