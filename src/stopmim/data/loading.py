"""Turns a source of images into batches of random crops, replacing broken images.

Everything is a function of (seed, epoch, image number). Neither the number of workers nor the step
at which a run resumes changes a sample.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stopmim.base.console import is_first_rank, say
from stopmim.base.errors import DataError
from stopmim.base.random_keys import numpy_generator
from stopmim.config.schema import Config
from stopmim.data import resident
from stopmim.data.channels import Form, fitting
from stopmim.data.checks.facts import Facts, look_at
from stopmim.data.crops import (
    crop_box,
    crop_scale,
    draw_augmentation,
    resized,
    resized_crop,
    side_of_use,
)
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images, open_image, read_image
from stopmim.data.order import batch_keys, shares
from stopmim.data.pixels import RGB, stats_of
from stopmim.data.rasters.raster import Raster, bytes_of
from stopmim.data.rasters.windows import LARGE, read_view, read_whole
from stopmim.data.skip import Bad
from stopmim.data.workers import Watched, batches, cores_per_rank

REPLACEMENTS = 20  # other images tried in place of a broken one


class Sample(NamedTuple):
    image: Tensor | None  # (C, S, S), see crops.resized; None: all replacements are broken too
    augmentation: np.ndarray  # (3,) float32, see crops.draw_augmentation
    bad: Bad


class Loaded(NamedTuple):
    images: Tensor  # (B, C, S, S) uint8; or float32 in stored units
    augmentation: Tensor  # (B, 3) float32
    bad: Bad


class Crops:
    """Random crops of `images`, keyed by (epoch, image number)."""

    def __init__(self, images: Images, config: Config, watched: Watched | None = None) -> None:
        self.images, self.size, self.seed = images, config.image_size, config.seed
        self.data, self.stats = config.data, stats_of(config)
        self.enough = side_of_use(config.data, config.image_size)
        self.watched = watched or Watched(images, 0, 0)
        self.opened: tuple[int, np.ndarray | Raster | None] = -1, None  # the image read last

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        rng = numpy_generator("crop", self.seed, *key)
        bad: Bad = []
        for candidate in self._candidates(*key):
            try:
                with self.watched.reading_image(candidate):
                    crop = self._crop(candidate, rng)
            except BadImageError as error:
                bad.append((self.images.name(candidate), str(error)))
                continue
            return Sample(crop, draw_augmentation(rng), bad)
        return Sample(None, draw_augmentation(rng), bad)

    def _crop(self, number: int, rng: np.random.Generator) -> Tensor:
        image = self._open(number)
        height, width = image.shape[:2]
        box = crop_box(rng, height, width, crop_scale(self.data, height, width))
        if isinstance(image, np.ndarray):
            return resized_crop(image, box, self.size)
        pixels = fitting(read_view(image, box, self.size), self.stats)
        return resized(pixels, self.size, self.size)

    def _open(self, number: int) -> np.ndarray | Raster:
        """The pixels of an image, or a large one to read parts of; once for all its crops."""
        last, image = self.opened
        if number == last and image is not None:
            return image
        image = open_image(self.images, number)
        if image is None:
            image = fitting(read_image(self.images, number, self.enough), self.stats)
        elif bytes_of(image) <= LARGE:
            image = fitting(read_whole(image), self.stats)
        self.opened = number, image
        return image

    def _candidates(self, epoch: int, number: int) -> Iterator[int]:
        yield number
        # Keyed as well: a resumed run takes the same replacements.
        others = numpy_generator("replace", self.seed, epoch, number)
        yield from others.integers(len(self.images), size=REPLACEMENTS).tolist()

    def batch(self, keys: list[tuple[int, int]]) -> Loaded:
        samples = [self[key] for key in keys]
        self.opened = -1, None  # frees the memory of the last image
        bad = [entry for sample in samples for entry in sample.bad]
        images = [sample.image for sample in samples if sample.image is not None]
        whole = torch.empty(0)  # the caller stops at such a batch, with a message about `bad`
        if len(images) == len(samples):
            # Stacked in their memory order, which is H, W, C.
            whole = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
        augmentation = torch.from_numpy(np.stack([sample.augmentation for sample in samples]))
        return Loaded(whole, augmentation, bad)


class Reader:
    """Reads images in worker processes, which can be the same ones for all that a run reads."""

    def __init__(self, images: Images, config: Config) -> None:
        self.images = images
        self.watched = Watched(images, config.runtime.workers, config.runtime.worker_timeout)
        seen = Form(config.data.channels or RGB.channels, config.data.kind or RGB.kind)
        self._tasks: dict[str, Callable[[list[Any]], Any]] = {
            "crops": Crops(images, config, self.watched).batch,
            "facts": partial(look_at, self.watched, seen),
        }

    @contextlib.contextmanager
    def running(self) -> Iterator["Reader"]:
        """Starts the processes, and ends them on exit."""
        with self.watched.staying(self._make):
            yield self

    def crops(self, keys: Iterable[list[tuple[int, int]]]) -> Generator[Loaded, None, None]:
        """The training crops for lists of (epoch, image number)."""
        tasks = (("crops", part) for part in keys)
        yield from batches(self._make, tasks, self.watched, lambda task: _numbers(task[1]))

    def facts(self, numbers: Iterable[list[int]]) -> Iterator[Facts]:
        """Facts about lists of images."""
        tasks = (("facts", part) for part in numbers)
        return batches(self._make, tasks, self.watched, lambda task: task[1])

    def _make(self, task: tuple[str, list[Any]]) -> Any:
        name, keys = task
        return self._tasks[name](keys)


def loader(
    images: Images,
    config: Config,
    start: int,
    *,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
    reader: Reader | None = None,
) -> Generator[Loaded, None, None]:
    """Yields the micro-batches of this rank from step `start` on, read by worker processes.

    They are in CPU memory, pinned for a GPU; or on the GPU, for images that live there. The
    processes are those of `reader`, if there is one already.
    """
    parts = shares(config.optim.batch_size, config.runtime.accumulate, rank, world)
    steps = steps_per_epoch(images, config)
    order = batch_keys(images, config, start, shares=parts, steps_per_epoch=steps)
    if (pixels := resident.pixels_for(images, device)) is not None:
        workers = config.runtime.workers
        workers = min(4, max(1, cores_per_rank())) if workers is None else workers
        watched = Watched(images, workers, config.runtime.worker_timeout)
        plan = partial(resident.plan, config, pixels.shape[1:3])
        for plans in batches(plan, order, watched, _numbers):
            numbers, boxes, augmentation = (torch.from_numpy(x).pin_memory() for x in plans)
            numbers, boxes = (x.to(device, non_blocking=True) for x in (numbers, boxes))
            crops = resident.crops(pixels, numbers, boxes, config.image_size)
            yield Loaded(crops, augmentation, [])
        return
    _hint_at_pixels(images, config)
    for whole, augmentation, bad in (reader or Reader(images, config)).crops(order):
        if device.type == "cuda":
            whole, augmentation = whole.pin_memory(), augmentation.pin_memory()
        yield Loaded(whole, augmentation, bad)


def _hint_at_pixels(images: Images, config: Config) -> None:
    """Suggests `data.crop_pixels` where every crop reads most of a large image."""
    with contextlib.suppress(BadImageError):  # training will name it
        first = open_image(images, 0) if config.data.crop_pixels is None else None
        if first and bytes_of(first) > LARGE and not first.levels and is_first_rank():
            size = config.image_size
            say(
                f"{images.name(0)}: {first.shape[1]}x{first.shape[0]} pixels; a crop reads "
                f"{config.data.crop_scale[0]:.0%} or more of them; "
                f"--data.crop_pixels '[{size}, {4 * size}]' crops squares of so many instead"
            )


def _numbers(keys: list[tuple[int, int]]) -> list[int]:
    return [number for _, number in keys]


def steps_per_epoch(images: Sized, config: Config) -> int:
    crops = config.data.crops_per_image
    steps = len(images) * crops // config.optim.batch_size
    if not steps:
        each = f" with {crops} crops each" if crops > 1 else ""
        raise DataError(
            f"{len(images)} images{each} do not fill one batch of {config.optim.batch_size}; "
            f"use more images or a smaller --optim.batch_size"
        )
    return steps
