"""The subject of an analysis: the model of a run, and a few of its images with their masks.

Shapes: n images, C context patches, M target blocks of K patches, N patches, D width, T numbers of
a target.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stopmim.base.errors import DataError
from stopmim.config.schema import Config
from stopmim.data.crops import normalise
from stopmim.data.images import Images
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


def load(path: str | Path, images: Images | None, count: int, step: int = 0) -> Subject:
    """The newest model of the run at `path`, and the first images of the batch of `step`.

    Without `images`, those the run was trained on.
    """
    run = Run(Path(path))
    shown = views(run, images, count, step)
    return Subject(run.path.resolve().name, run.config, run.model(), shown)


def views(run: Run, images: Images | None, count: int, step: int = 0) -> list[Preview]:
    """The first images of the batch of `step`, with their masks."""
    found = previews(images or images_of(run), run.config, step, count)
    if not found:
        raise DataError(f"{run.path}: none of its first images can be read")
    return found


def images_of(run: Run) -> Images:
    """The images a run was trained on, from where run.json says they are."""
    data = run.about.get("data")
    named = data.get("source") if isinstance(data, dict) else None
    if not isinstance(named, str) or not named:
        raise DataError(f"{run.path}: run.json does not say where its images are; give --data")
    return without_skipped(open_images(named), run.config.data.skip)


def pixels(views: list[Preview]) -> Tensor:
    """The input of the encoder, (n, 3, S, S)."""
    stacked = np.stack([view.image for view in views])
    return normalise(torch.from_numpy(stacked).permute(0, 3, 1, 2))


def indices(views: list[Preview]) -> tuple[Tensor, Tensor]:
    """The masks of `views`: context (n, C) and targets (M, n, K)."""
    context = torch.from_numpy(np.stack([view.context for view in views]))
    targets = torch.from_numpy(np.stack([view.targets for view in views], axis=1))
    return context, targets


@torch.no_grad()
def tokens(model: MaskedImageModel, images: Tensor) -> Tensor:
    """Targets at every patch, (n, N, T)."""
    every = torch.arange(model.encoder.side**2)
    return model.targets(images, every.expand(1, len(images), -1))[0]


@torch.no_grad()
def features(model: MaskedImageModel, images: Tensor) -> Tensor:
    """Learned features of every patch, (n, N, D): the targets, unless those are fixed."""
    return tokens(model, images) if model.target.learned else model.encoder(images)
