"""The subject of an analysis: the model of a run, and a few of its images with their masks.

Shapes: n images, C context patches, M target blocks of K patches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stopmim.base.errors import DataError, UserError
from stopmim.config.schema import Config
from stopmim.data.crops import normalise
from stopmim.data.images import Images
from stopmim.data.pixels import stats_of
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import open_images
from stopmim.insight.figures.pictures import Preview, previews
from stopmim.method.model import MaskedImageModel
from stopmim.runs.run import Run


class Subject(NamedTuple):
    name: str
    config: Config
    model: MaskedImageModel
    views: list[Preview]


def load(
    runs: Sequence[Run], images: Images | None, count: int, show: Sequence[str] = ()
) -> list[Subject]:
    """The newest models of the runs, all with the first images and masks of the first run.

    By default with the images that it was trained on. `show` are the channels for pictures.
    """
    refuse_unlike(runs)
    shown = views(runs[0], images, count, show)
    return [Subject(run.path.resolve().name, run.config, run.model(), shown) for run in runs]


def refuse_unlike(runs: Sequence[Run]) -> None:
    """Raises UserError if the runs cannot be compared on the same images."""
    first, *others = [stats_of(run.config) for run in runs]
    for run, stats in zip(runs[1:], others, strict=True):
        if (stats.channels, stats.kind) != (first.channels, first.kind):
            what = f"trained on {stats.describe()}, {runs[0].path} on {first.describe()}"
            raise UserError(f"{run.path}: {what}: no image can be shown to both")


def views(run: Run, images: Images | None, count: int, show: Sequence[str] = ()) -> list[Preview]:
    """The first images of the first batch, with their masks."""
    found = previews(images or images_of(run), run.config, 0, count, show)
    if not found:
        raise DataError(f"{run.path}: none of its first images can be read")
    return found


def images_of(run: Run) -> Images:
    """The images a run was trained on, opened from the source in run.json."""
    data = run.about.get("data")
    named = data.get("source") if isinstance(data, dict) else None
    if not isinstance(named, str) or not named:
        raise DataError(f"{run.path}: run.json does not say where its images are; give --data")
    return without_skipped(open_images(named), run.config.data.skip)


def pixels(views: list[Preview], config: Config) -> Tensor:
    """The input of the encoder of a run, (n, Ch, S, S), normalised as its config says."""
    stacked = np.stack([view.image for view in views])
    return normalise(torch.from_numpy(stacked).permute(0, 3, 1, 2), stats_of(config))


def indices(views: list[Preview]) -> tuple[Tensor, Tensor]:
    """The masks of `views`: context (n, C) and targets (M, n, K)."""
    context = torch.from_numpy(np.stack([view.context for view in views]))
    targets = torch.from_numpy(np.stack([view.targets for view in views], axis=1))
    return context, targets
