"""Patch features as colours: what looks alike is alike to the encoder.

Shapes: n images, N = side * side patches, D width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from stopmim.insight.figures.pictures import Preview, house_style, panels, style_images
from stopmim.insight.figures.subject import Subject, features, pixels


class Maps(NamedTuple):
    name: str
    views: list[Preview]
    colours: np.ndarray  # (n, side, side, 3), 0 to 1
    explained: float  # share of the variance that the three components hold


def maps(subject: Subject) -> Maps:
    """The first three principal components of all patches of all images, as red, green, blue.

    First the mean over the images is removed at every position: otherwise the components would
    show the position embedding, which is the same in every image.
    """
    found = features(subject.model, pixels(subject.views)).double()  # (n, N, D)
    centred = (found - found.mean(dim=0)).flatten(0, 1)  # (n * N, D)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    shown = centred @ directions[:3].T  # (n * N, 3)
    # The sign of a component is arbitrary; a fixed choice makes runs comparable.
    shown = shown * torch.where(shown.pow(3).sum(dim=0) < 0, -1.0, 1.0)
    low, high = shown.quantile(0.02, dim=0), shown.quantile(0.98, dim=0)
    colours = ((shown - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    side = subject.views[0].side
    power = values.square()
    return Maps(
        subject.name,
        subject.views,
        colours.reshape(len(found), side, side, 3).numpy(),
        float(power[:3].sum() / power.sum().clamp(min=1e-12)),
    )


@house_style()
def figure(runs: Sequence[Maps], columns: int = 8) -> Figure:
    """Images, and below them their features, one row per run."""
    columns = min(columns, len(runs[0].views))
    picture, grid = panels(1 + len(runs), columns, (1.05 * columns, 1.15 * (1 + len(runs)) + 0.2))
    for c in range(columns):
        grid[0, c].imshow(runs[0].views[c].image)
        for r, run in enumerate(runs, 1):
            grid[r, c].imshow(run.colours[c], interpolation="nearest")
    style_images(grid)
    grid[0, 0].set_ylabel("image", size=8.5)
    for r, run in enumerate(runs, 1):
        grid[r, 0].set_ylabel(f"{run.name}\n{run.explained:.0%} of variance", size=8.5)
    return picture
