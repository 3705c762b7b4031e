"""Estimates of the time and memory that a run takes on this machine, before it starts.

Memory follows from the shapes of the network. Time is measured: an update or two on random images,
and a few images read from the data set.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stopmim.base.random_keys import numpy_generator, torch_generator
from stopmim.config.architectures import parse_arch
from stopmim.config.schema import Config, override
from stopmim.data import survey
from stopmim.data.channels import Form
from stopmim.data.crops import side_of_use
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images, open_image, read_image
from stopmim.data.rasters.raster import MOST, bytes_of
from stopmim.data.rasters.windows import read_sample
from stopmim.data.remote.ahead import in_reach
from stopmim.data.workers import cores, default_workers
from stopmim.gpu.devices import choose_precision, memory_of
from stopmim.method.build import build, build_sampler, build_target, draw_masks
from stopmim.method.masks import Masks
from stopmim.train.draws import draw_noise
from stopmim.train.optimizer import adamw
from stopmim.train.rates import rates
from stopmim.train.step import Part, build_step, is_recorded, recorded

SAMPLE = 16  # images that are read to see their size and how long reading takes
TRIAL_FLOPS = {"cpu": 5e10, "cuda": 1e14}  # of a trial update: about a second
ROUNDS = 3  # timed updates; the fastest counts, since others may have been disturbed
# Numbers that autograd keeps per token, channel and block; counted for every preset: 15 to 20.
KEPT = 20
PROCESS = 400 * 2**20  # bytes of Python with torch, on a CPU


# ------------------------------------------------------------------------------ the images


@dataclass(frozen=True)
class Facts:
    """A few facts about a data set, from a sample of its images."""

    count: int
    side: int  # median of the shorter sides, in pixels; 0 if none of the sample can be read
    read_seconds: float  # to read one image on one core
    reduced_seconds: float  # the same, if a JPEG is reduced while it is decoded
    workers: int  # processes that would read them
    seen: Form = Form()  # noqa: RUF009 - a tuple; channels and their type
    varied: bool = False  # whether the shorter sides differ, so that `side` is an estimate

    def reading(self, config: Config) -> float:
        """Seconds to read an image as a run with this config does."""
        enough = side_of_use(config.data, config.image_size)
        is_reduced = enough is not None and self.side >= 2 * enough
        return min(self.read_seconds, self.reduced_seconds) if is_reduced else self.read_seconds


def look(images: Images, seen: Form | None = None) -> Facts:
    """Reads SAMPLE images, evenly spaced; `seen` are their channels, if they are known."""
    numbers = np.linspace(0, len(images) - 1, min(SAMPLE, len(images))).round().astype(int)
    found = list[tuple[int, float, float]]()
    for number in in_reach(images, numbers.tolist(), lambda number: [number], 0):
        with contextlib.suppress(BadImageError):
            found.append(_timed(images, number))
    sides, whole, reduced = zip(*found, strict=True) if found else ((0,), (0.0,), (0.0,))
    return Facts(
        count=len(images),
        side=int(np.median(sides)),
        read_seconds=float(np.mean(whole)),
        reduced_seconds=float(np.mean(reduced)),
        workers=default_workers(images),
        seen=seen or survey.common_form(images),
        varied=len(set(sides)) > 1,
    )


def _timed(images: Images, number: int) -> tuple[int, float, float]:
    """The shorter side of an image, and the seconds to read it whole and reduced."""
    begin = time.perf_counter()
    raster = open_image(images, number)
    if raster is None:
        side, whole = min(images.read(number).shape[:2]), time.perf_counter()
        read_image(images, number, 1)
        return side, whole - begin, time.perf_counter() - whole
    if bytes_of(raster) <= MOST:
        images.read(number)
    else:  # beyond memory: parts are read
        read_sample(raster, numpy_generator("parts", number))
    seconds = time.perf_counter() - begin
    return min(raster.shape[:2]), seconds, seconds


# ------------------------------------------------------------------------------ the network


class Work(NamedTuple):
    """Operations and memory of an update, by the shapes of its network."""

    flops: float  # of matrix products, per image
    state: float  # bytes of weights, gradients and moments
    kept: float  # bytes kept for the backward pass, per image


def work(config: Config, device: torch.device) -> Work:
    """Computes the work of a config without building its network."""
    size, patch = parse_arch(config.arch)
    sampler, n = build_sampler(config), config.side**2
    sizes = sampler.sizes(config.seed, likeliest_step(config))
    masks = sampler.draw(1, torch_generator("shapes"), sizes)  # only their shapes matter
    (targets, _, k), c = masks.targets.shape, masks.context.shape[1]
    read = targets * (c + k)  # tokens of the predictor, which sees each target separately
    width, depth = config.predictor.width, config.predictor.depth or size.predictor_depth
    encoder = size.depth * (4 + 2 * size.mlp_ratio) * size.width**2  # parameters
    # The patches of a picture are a hundredth of that, and not counted; those of many channels are.
    encoder += ((config.data.channels or 3) - 3) * patch**2 * size.width
    predictor = depth * 12 * width**2
    follows = build_target(config).follows
    # Two operations per weight and token forward, four backward; the teacher sees all, forward.
    flops = encoder * (6 * c + (2 * n if follows else 0)) + 6 * predictor * read
    state = 16 * (encoder + predictor) + (4 * encoder if follows else 0)
    bytes_each = 4 if choose_precision(config.runtime.precision, device) is None else 2
    kept = KEPT * bytes_each * (c * size.width * size.depth + read * width * depth)
    return Work(flops, state, kept / 3 if config.runtime.recompute == "on" else kept)


def memory(config: Config, device: torch.device) -> float:
    """Bytes at the peak of an update of one process: on the GPU, or of the process on a CPU."""
    needed, part = work(config, device), config.optim.batch_size / config.runtime.accumulate
    return needed.state + part * needed.kept + (PROCESS if device.type == "cpu" else 0)


def free_memory(device: torch.device) -> float:
    """Bytes that an update may use."""
    memory = memory_of(device)
    return memory.free if memory else math.inf


# ------------------------------------------------------------------------------ the time


@functools.cache
def seconds_per_update(config: Config, facts: Facts, device: torch.device) -> float:
    """Measures an update on `device` and adds the time to read its images.

    Nothing is compiled, which would take longer than the measurement: a GPU will be faster.
    """
    batch = config.optim.batch_size
    most = max(1, int(TRIAL_FLOPS[device.type] / work(config, device).flops))
    n = min(batch // config.runtime.accumulate, most)
    fewer = {"optim.batch_size": n, "runtime.accumulate": 1, "runtime.compile": "off"}
    small, threads = override(config, fewer), torch.get_num_threads()
    parts = [slice(0, n)]
    torch.set_num_threads(config.runtime.threads or threads)
    try:
        masks = draw_masks(small, likeliest_step(small), parts, device)
        update = trial_update(small, parts, masks, device)
        update()  # allocates AdamW's moments
        computing = min(_seconds(update, device) for _ in range(ROUNDS)) * batch / n
        computes = torch.get_num_threads()
        del update  # and its network
    finally:
        torch.set_num_threads(threads)
    if device.type == "cuda":  # the run logs a peak of its own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    reading, readers = batch * facts.reading(config), max(1, facts.workers)
    if device.type == "cuda":
        return max(computing, reading / readers)
    if not facts.workers:
        return computing + reading
    # Both compete for the same cores.
    return max(computing, reading / readers, (computing * computes + reading) / cores())


def _seconds(update: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    update()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def trial_update(
    config: Config, parts: list[slice], masks: list[Masks], device: torch.device
) -> Callable[[], None]:
    """A function that makes one update, always with these masks and the same random images.

    `parts` are the slices of the batch, as from `shares`, whose gradients are added up.
    """
    amp, now = choose_precision(config.runtime.precision, device), rates(config.optim, 0, 1000)
    model, step = build(config).to(device).train(), likeliest_step(config)
    make = build_step(model, adamw(model, config.optim), config, device, n_parts=len(parts))
    graphs = recorded(make, device) if is_recorded(config, device) else None
    generator = torch_generator("bench", device=device)
    shape = (parts[0].stop, model.encoder.channels, config.image_size, config.image_size)
    images = torch.randn(shape, generator=generator, device=device)
    sizes = build_sampler(config).sizes(config.seed, step)

    def prepared() -> Iterator[Part]:
        for m, part in zip(masks, parts, strict=True):
            noise = draw_noise(model.predictor, m, part, config, step, amp or torch.float32)
            yield model.target.batch(images, m, sizes), noise

    def update() -> None:
        make(prepared(), now, graphs)

    return update


def likeliest_step(config: Config) -> int:
    """A step whose target blocks have the likeliest size, so that one shape is compiled."""
    sampler = build_sampler(config)
    blocks = sampler.blocks()
    likeliest = max(blocks, key=lambda block: blocks[block], default=None)
    for step in range(10_000):
        drawn = sampler.sizes(config.seed, step)
        if drawn is None or drawn.target == likeliest:
            return step
    raise ValueError(f"no step draws blocks of {likeliest}")
