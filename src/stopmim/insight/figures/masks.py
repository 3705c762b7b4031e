"""Masks of a config: on images, and how often each patch is seen and predicted."""

import numpy as np
import torch
from matplotlib.figure import Figure

from stopmim.config.schema import Config
from stopmim.insight.figures import pictures
from stopmim.insight.figures.pictures import Preview, house_style
from stopmim.method.build import draw_masks

IMAGES = 64  # per step


def coverage(config: Config, steps: int = 50) -> np.ndarray:
    """Share of the images in which a patch is seen, and predicted in any block: (2, side, side).

    Over the first `steps` updates; a corner that is never used stands out.
    """
    n, side = min(IMAGES, config.optim.batch_size), config.side
    counts = np.zeros((2, side * side))
    for step in range(steps):
        (masks,) = draw_masks(config, step, [slice(0, n)], torch.device("cpu"))
        for count, index in zip(counts, (masks.context[None], masks.targets), strict=True):
            # (M, n, K) patches: one in several blocks of an image counts once.
            taken = torch.zeros(n, side * side).scatter_(1, torch.cat([*index[:, :n]], dim=1), 1)
            count += taken.sum(dim=0).numpy()
    return (counts / (n * steps)).reshape(2, side, side)


@house_style()
def figure(views: list[Preview], config: Config) -> Figure:
    """Draws images with their masks, and the two maps of `coverage` beside them."""
    columns = min(4, len(views))
    picture, grid = pictures.panels(2, columns + 1, (2 * (columns + 1) + 0.6, 4))
    pictures.style_images(grid[:, columns])
    for axes in grid[:, :columns].flat:
        axes.set_axis_off()
    for axes, view in zip(grid[:, :columns].flat, views, strict=False):
        pictures.draw_preview(axes, view)
    maps = zip(grid[:, columns], coverage(config), ("seen", "predicted"), strict=True)
    for axes, shares, title in maps:
        shown = axes.imshow(100 * shares, cmap="viridis", vmin=0)
        axes.set_title(f"how often {title}", size=9)
        pictures.colour_bar(picture, shown, axes, shrink=0.75, aspect=14, format="%.0f %%")
    if views[0].caption:
        picture.supxlabel(views[0].caption, size=8.5)
    return picture
