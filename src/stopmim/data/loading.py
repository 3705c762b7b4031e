"""Turns a source of images into batches of random crops, replacing broken images.

Everything is a function of (seed, epoch, image number). Neither the number of workers nor the step
at which a run resumes changes a sample.
"""

from collections.abc import Iterable, Iterator, Sized
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stopmim.base.errors import DataError
from stopmim.base.random_keys import numpy_generator
from stopmim.config.schema import Config
from stopmim.data import resident
from stopmim.data.crops import crop_box, draw_augmentation, resized_crop
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images
from stopmim.data.order import batch_keys, shares
from stopmim.data.workers import Watched, batches, cores_per_rank

REPLACEMENTS = 20  # other images tried in place of a broken one

Bad = list[tuple[str, str]]  # names of broken images met on the way, and the reasons


class Sample(NamedTuple):
    image: Tensor | None  # (3, S, S) uint8; None: neither the image nor its replacements work
    augmentation: np.ndarray  # (3,) float32, see crops.draw_augmentation
    bad: Bad


class Loaded(NamedTuple):
    images: Tensor  # (B, 3, S, S) uint8; or float32 of 0 to 255, already on the GPU
    augmentation: Tensor  # (B, 3) float32
    bad: Bad


class Crops:
    """Random crops of `images`, keyed by (epoch, image number)."""

    def __init__(self, images: Images, config: Config, watched: Watched | None = None) -> None:
        self.images, self.size, self.seed = images, config.image_size, config.seed
        self.scale = config.data.crop_scale
        self.watched = watched or images

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        rng = numpy_generator("crop", self.seed, *key)
        bad: Bad = []
        for candidate in self._candidates(*key):
            try:
                image = self.watched.read(candidate)
            except BadImageError as error:
                bad.append((self.images.name(candidate), str(error)))
                continue
            box = crop_box(rng, image.shape[0], image.shape[1], self.scale)
            return Sample(resized_crop(image, box, self.size), draw_augmentation(rng), bad)
        return Sample(None, draw_augmentation(rng), bad)

    def _candidates(self, epoch: int, number: int) -> Iterator[int]:
        yield number
        # Keyed as well: a resumed run takes the same replacements.
        others = numpy_generator("replace", self.seed, epoch, number)
        yield from others.integers(len(self.images), size=REPLACEMENTS).tolist()

    def batch(self, keys: list[tuple[int, int]]) -> Loaded:
        samples = [self[key] for key in keys]
        bad = [entry for sample in samples for entry in sample.bad]
        images = [sample.image for sample in samples if sample.image is not None]
        whole = torch.empty(0)  # the caller stops at such a batch, with a message about `bad`
        if len(images) == len(samples):
            # Stacked in their memory order, which is H, W, 3.
            whole = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
        augmentation = torch.from_numpy(np.stack([sample.augmentation for sample in samples]))
        return Loaded(whole, augmentation, bad)


def loader(
    images: Images,
    config: Config,
    start: int,
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Loaded]:
    """Yields the micro-batches of this rank from step `start` on, read by worker processes.

    They are in CPU memory, pinned for a GPU; or on the GPU, for images that live there.
    """
    parts = shares(config.optim.batch_size, config.runtime.accumulate, rank, world)
    steps = steps_per_epoch(images, config)
    order = batch_keys(images, config, start, shares=parts, steps_per_epoch=steps)
    if (pixels := resident.pixels_for(images, device)) is not None:
        workers = config.runtime.workers
        workers = min(4, max(1, cores_per_rank())) if workers is None else workers
        watched = Watched(images, workers, config.runtime.worker_timeout)
        plan = partial(resident.plan, config, pixels.shape[1:3])
        for plans in batches(plan, order, watched):
            numbers, boxes, augmentation = (torch.from_numpy(x).pin_memory() for x in plans)
            numbers, boxes = (x.to(device, non_blocking=True) for x in (numbers, boxes))
            crops = resident.crops(pixels, numbers, boxes, config.image_size)
            yield Loaded(crops, augmentation, [])
        return
    for whole, augmentation, bad in read_crops(images, config, order):
        if device.type == "cuda":
            whole, augmentation = whole.pin_memory(), augmentation.pin_memory()
        yield Loaded(whole, augmentation, bad)


def read_crops(
    images: Images, config: Config, keys: Iterable[list[tuple[int, int]]]
) -> Iterator[Loaded]:
    """Yields the training crops for lists of (epoch, image number), read by worker processes."""
    watched = Watched(images, config.runtime.workers, config.runtime.worker_timeout)
    return batches(Crops(images, config, watched).batch, keys, watched)


def steps_per_epoch(images: Sized, config: Config) -> int:
    steps = len(images) // config.optim.batch_size
    if not steps:
        raise DataError(
            f"{len(images)} images do not fill one batch of {config.optim.batch_size}; "
            f"use more images or a smaller --optim.batch_size"
        )
    return steps
