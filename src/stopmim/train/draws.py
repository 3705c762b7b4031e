"""Inputs of an update: images, masks and noise of its step, part by part.

Every random number of step `i` is keyed by (seed, i), so that a resumed run draws what an
uninterrupted one would have drawn, on any number of GPUs.

Shapes: B images of a part, M target blocks of K patches.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from stopmim.base.random_keys import torch_generator
from stopmim.config.schema import Config
from stopmim.data.crops import AUGMENT, normalise
from stopmim.data.loading import Loaded
from stopmim.data.pixels import stats_of
from stopmim.gpu.devices import choose_precision
from stopmim.method.build import build_sampler
from stopmim.method.masks import Masks
from stopmim.method.model import MaskedImageModel
from stopmim.method.predictor import Noise, Predictor
from stopmim.runs.logs import BadFiles
from stopmim.train.step import Part

NOISE_CHUNK = 64  # consecutive images of a batch whose noise has one key


class Draws:
    """The parts of the batch of a step on this rank, ready for `Step`.

    Args:
        batches: images, part by part, from the step the run starts at.
        parts: the images of this rank, as slices of the global batch.
        bad_files: ends the run where an image can neither be read nor replaced.
        beside: context in which images and masks are prepared: a CUDA stream of their own.
    """

    def __init__(
        self,
        model: MaskedImageModel,
        config: Config,
        batches: Iterator[Loaded],
        parts: list[slice],
        bad_files: BadFiles,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model, self.config, self.batches = model, config, batches
        self.parts, self.bad_files = parts, bad_files
        self.device = model.encoder.pos_embed.device
        # In which noise will be multiplied.
        self.dtype = choose_precision(config.runtime.precision, self.device) or torch.float32
        self.beside, self.sampler = beside, build_sampler(config)
        self.change = AUGMENT.get(config.data.augmentation or "crop")
        self.stats = stats_of(config)
        self.bad: list[tuple[str, str]] = []  # unreadable images met so far, with the reason

    def at(self, step: int) -> Iterator[Part]:
        """Yields batch and noise of every part, drawn when it is asked for."""
        config = self.config
        sizes = self.sampler.sizes(config.seed, step)
        with self.beside():
            total = config.optim.batch_size
            masks = self.sampler.at_step(config.seed, step, self.parts, total, self.device)
        for part, own in zip(self.parts, masks, strict=True):
            with self.beside():
                images = normalise(self._pixels(next(self.batches)), self.stats)
                batch = self.model.target.batch(images, own, sizes)
            # On the stream of the update: these few kernels fill the GPU and would delay others.
            noise = draw_noise(self.model.predictor, own, part, config, step, self.dtype)
            yield batch, noise

    def _pixels(self, loaded: Loaded) -> Tensor:
        """Augmented pixels (B, C, S, S) on the device, in stored units."""
        self.bad += loaded.bad
        if not loaded.images.numel():  # an image can neither be read nor replaced
            self.bad_files.add(self.bad, usable=False)
        pixels = loaded.images.to(self.device, non_blocking=True)
        if self.change:
            pixels = self.change(pixels, loaded.augmentation.to(self.device, non_blocking=True))
        return pixels


def draw_noise(
    predictor: Predictor, masks: Masks, part: slice, config: Config, step: int, dtype: torch.dtype
) -> Noise:
    """Noise of one part of the batch of `step`, in the dtype it will be multiplied in.

    Drawn in chunks of the global batch, so that it does not depend on how the batch is cut.
    """
    size, device = config.optim.batch_size, masks.targets.device
    of_masked: list[Tensor] = []
    of_context: list[Tensor] = []
    for chunk in range(part.start // NOISE_CHUNK, math.ceil(part.stop / NOISE_CHUNK)):
        first, last = chunk * NOISE_CHUNK, min((chunk + 1) * NOISE_CHUNK, size)
        generator = torch_generator("noise", config.seed, step, chunk, device=device)
        # Only shapes matter: a chunk is drawn whole even if another part has some of its images.
        context = masks.context[:1].expand(last - first, -1)
        targets = masks.targets[:, :1].expand(-1, last - first, -1)
        noise = predictor.draw(context, targets, generator, dtype)
        own = slice(max(first, part.start) - first, min(last, part.stop) - first)
        if noise.masked is not None:
            of_masked.append(noise.masked[:, own])
        if noise.context is not None:
            of_context.append(noise.context[own])
    # Concatenated first and then rounded, if at all: one kernel fewer per chunk.
    return Noise(
        torch.cat(of_masked, dim=1).to(dtype) if of_masked else None,
        torch.cat(of_context).to(dtype) if of_context else None,
    )
