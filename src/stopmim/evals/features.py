"""Frozen features of a set of images, computed once and cached, and their effective rank.

Shapes: N images, D width of the encoder, L last blocks.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from stopmim.base.console import Ticker
from stopmim.base.errors import DataError, NonFiniteError
from stopmim.base.random_keys import numpy_generator
from stopmim.data.crops import normalise
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images
from stopmim.evals import cache
from stopmim.evals.views import TrainView, View, middle
from stopmim.health.measure import effective_rank
from stopmim.method.encoder import Encoder, Pool

Device = torch.device | str
LAYERS = 4  # last blocks that are cached, so that "last" and "last 4" share one extraction


@contextmanager
def evaluating(encoder: Encoder | nn.Module) -> Iterator[None]:
    """Puts `encoder` in evaluation mode without gradients; restores the mode of every module."""
    modules = encoder.modules() if isinstance(encoder, nn.Module) else ()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def extract(
    encoder: Encoder,
    images: Images,
    *,
    size: int | Callable[[int], Tensor],
    layers: int = 1,
    pool: Pool = "mean",
    batch_size: int = 256,
    device: Device = "cpu",
    precision: torch.dtype | None = None,
) -> Tensor:
    """Features (N, layers * D) of all `images` in their order, float32 on the CPU.

    Args:
        size: edge of the usual view, see `views.middle`; or a function that returns what the
            encoder sees of image i, (3, S, S) uint8.
        layers: number of last blocks, concatenated.
        batch_size: affects the features by no more than rounding.
        device: where the encoder is.
        precision: dtype of autocast; None is float32 throughout.

    Raises:
        DataError: an image cannot be read. Without it, this would be another test set.
        NonFiniteError: the encoder returns NaN or infinity.
    """
    device = torch.device(device)
    show = size
    if isinstance(show, int):
        show = partial(_show, images, middle(encoder, images, show), (0, 0))
    features = torch.empty(len(images), layers * encoder.width)
    done, begin = 0, time.monotonic()
    order = (range(i, min(i + batch_size, len(images))) for i in range(0, len(images), batch_size))
    # `features` is allocated outside inference mode, so that a caller may train on it.
    with evaluating(encoder), Ticker("features", len(images)) as ticker:
        for batch in batches(show, order):
            pixels = normalise(batch.to(device))  # (B, 3, S, S)
            with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
                found = encoder.features(pixels, layers, pool).float().cpu()
            if not found.isfinite().all():
                raise NonFiniteError(
                    f"the encoder gives no finite features for {images.name(done)} or one of "
                    f"the {len(batch) - 1} after it; was it saved after the loss diverged?"
                )
            features[done : done + len(batch)] = found
            done += len(batch)
            ticker.update(done, f"{done / (time.monotonic() - begin):.0f} images/s")
    return features


def read(images: Images, i: int) -> np.ndarray:
    """Reads image `i`, or raises a DataError that names it."""
    try:
        return images.read(i)
    except BadImageError as error:
        raise DataError(
            f"{images.name(i)}: {error}; no image is left out unasked: fix or remove it, or "
            f"leave it out with --skip FILE, see stopmim check --fix-list"
        ) from None


def _show(images: Images, view: View | TrainView, draw: tuple[int, int], i: int) -> Tensor:
    if isinstance(view, View):
        return view(read(images, i))
    return view(read(images, i), numpy_generator("view", *draw, i))


def batches(show: Callable[[int], Tensor], order: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """Yields batches (B, 3, S, S) uint8, prefetching one while the encoder works."""
    threads = torch.get_num_threads()

    def part(numbers: Sequence[int]) -> Tensor:
        return torch.stack([show(i) for i in numbers])

    with ThreadPoolExecutor(threads) as pool:
        ahead: Iterator[Tensor] | None = None
        for numbers in order:
            # One task per thread, not per image: submitting a small image costs more than reading.
            size = -(-len(numbers) // threads)
            parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
            now, ahead = ahead, pool.map(part, parts)
            if now is not None:
                yield torch.cat(list(now))
        if ahead is not None:
            yield torch.cat(list(ahead))


def frozen(
    encoder: Encoder,
    images: Images,
    view: View | TrainView,
    draw: tuple[int, int] = (0, 0),
    device: Device = "cpu",
    precision: torch.dtype | None = None,
    batch_size: int = 256,
) -> Tensor:
    """Features (N, L * D) of up to four last blocks, in half precision; the last is ``[:, -D:]``.

    Read from the cache if weights, images, view and code are the same, and `cache.covers` the
    encoder. `draw`: seed and number of a view.
    """
    layers = min(LAYERS, len(getattr(encoder, "blocks", range(LAYERS))))
    pool: Pool = getattr(encoder, "pool", "mean")
    key = None
    if isinstance(encoder, nn.Module):
        encoder.to(device)
    if cache.covers(encoder):
        seen = type(view).__name__, asdict(view), draw if isinstance(view, TrainView) else None
        code, own = cache.of_code(*cache.FEATURES), cache.of_encoder(encoder)
        key = cache.key(code, own, cache.of_images(images), *seen, layers, pool, str(precision))
        if cached := cache.load("features", key):
            return cached[0]["features"]
    found = extract(
        encoder,
        images,
        size=partial(_show, images, view, draw),
        layers=layers,
        pool=pool,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
    # After a LayerNorm, features are of order 1. Where its weights are huge they stay float32.
    found = half if (half := found.half()).isfinite().all() else found
    if key is not None:
        cache.store("features", key, {"features": found})
    return found


def rankme(features: Tensor) -> float:
    """RankMe (arXiv 2210.02885) of `features` (N, D): from 1 to D; not centred, as published."""
    n, d = features.shape
    if n <= d:
        raise ValueError(f"rankme needs more samples than features, got {n} x {d}")
    return effective_rank(features)
