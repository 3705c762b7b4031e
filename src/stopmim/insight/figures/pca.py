"""Patch features as colours: patches that look alike are alike to the encoder.

Shapes: n images, N = side * side patches, D width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure

from stopmim.health.measure import patch_features
from stopmim.insight.figures.pictures import house_style, panels, style_images
from stopmim.insight.figures.subject import Subject, pixels

CAPTION = (
    "Red, green and blue are the first three principal components of the patch features:\n"
    "patches of a row in the same colour have similar features. Colours of two rows do not compare."
)


def maps(subject: Subject) -> tuple[np.ndarray, float]:
    """The first three principal components of all patches of all images, as red, green, blue.

    The mean over the images is removed first, at every position: otherwise the components would
    show the position embedding, which is the same in every image. Returns colours
    (n, side, side, 3), 0 to 1, and the share of the variance that the components explain.
    """
    images = pixels(subject.views, subject.config)
    found = patch_features(subject.model, images).double()  # (n, N, D)
    centred = (found - found.mean(dim=0)).flatten(0, 1)  # (n * N, D)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    shown = centred @ directions[:3].T  # (n * N, 3)
    # The sign of a component is arbitrary; a fixed choice makes runs comparable.
    shown = shown * torch.where(shown.pow(3).sum(dim=0) < 0, -1.0, 1.0)
    low, high = shown.quantile(0.02, dim=0), shown.quantile(0.98, dim=0)
    colours = ((shown - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    side, power = subject.views[0].side, values.square()
    explained = float(power[:3].sum() / power.sum().clamp(min=1e-12))
    return colours.reshape(len(found), side, side, 3).numpy(), explained


@house_style()
def figure(subjects: Sequence[Subject]) -> Figure:
    """Draws images, and below them their features, one row per run."""
    views, rows = subjects[0].views[:8], 1 + len(subjects)
    picture, grid = panels(rows, len(views), (1.05 * len(views), 1.15 * rows + 0.55))
    style_images(grid)
    for axes, view in zip(grid[0], views, strict=True):
        axes.imshow(view.picture)
    grid[0, 0].set_ylabel("image", size=8.5)
    for row, subject in zip(grid[1:], subjects, strict=True):
        colours, explained = maps(subject)
        for axes, colour in zip(row, colours, strict=False):
            axes.imshow(colour, interpolation="nearest")
        row[0].set_ylabel(f"{subject.name}\n{explained:.0%} of variance", size=8.5)
    picture.supxlabel("\n".join(filter(None, (CAPTION, views[0].caption))), size=8.5)
    return picture
