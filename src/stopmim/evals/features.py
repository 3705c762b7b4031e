"""Frozen features of a set of images, computed once and cached, and their effective rank.

Shapes: N images, D width of the encoder, L last blocks.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from stopmim.base.console import Ticker
from stopmim.base.errors import DataError, NonFiniteError
from stopmim.data.crops import normalise
from stopmim.data.images import Images
from stopmim.data.pixels import RGB, PixelStats
from stopmim.evals import cache
from stopmim.evals.showing import Kept, Showing
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


def stats_for(encoder: object) -> PixelStats:
    """The statistics that `encoder` was trained with; ImageNet's if it does not say.

    Raises DataError if it does not say, and takes other channels than red, green and blue.
    """
    channels = getattr(encoder, "channels", RGB.channels)
    stats = getattr(getattr(encoder, "transform", None), "stats", None)
    if stats is None and channels != RGB.channels:
        what = f"its file does not say how its {channels} channels are normalised"
        raise DataError(f"no image can be shown to the encoder: {what}")
    return stats or RGB


def extract(
    encoder: Encoder,
    images: Images,
    *,
    size: int | Iterable[Tensor],
    layers: int = 1,
    pool: Pool = "mean",
    batch_size: int | None = None,
    device: Device = "cpu",
    precision: torch.dtype | None = None,
) -> Tensor:
    """Features (N, layers * D) of all `images` in their order, float32 on the CPU.

    Args:
        size: edge of the usual view, see `views.middle`; or batches (B, C, S, S) of what the
            encoder sees, in stored units, on `device`.
        layers: number of last blocks, concatenated.
        batch_size: affects the features by no more than rounding; see `Showing.batches`.
        device: where the encoder is.
        precision: dtype of autocast; None is float32 throughout.

    Raises:
        DataError: an image cannot be read (without it, this would be another test set), or the
            encoder takes images of other channels.
        NonFiniteError: the encoder returns NaN or infinity.
    """
    device, n = torch.device(device), len(images)
    if isinstance(size, int):
        size = Showing(images, middle(encoder, images, size)).batches(device, batch_size)
    features_of = partial(encoder.features, layers=layers, pool=pool)
    answer = partial(_answer, features_of, stats_for(encoder), precision)
    # Allocated outside inference mode, so that a caller may train on it.
    features, done, begin = torch.empty(n, layers * encoder.width), 0, time.monotonic()
    kept = features.numpy()
    with evaluating(encoder), Ticker("features", n) as ticker:
        for found in _one_behind(map(answer, size), device):
            # By numpy: torch would start threads, which wait for cores that are busy decoding.
            if not np.isfinite(found.numpy()).all():
                raise NonFiniteError(
                    f"the encoder gives no finite features for {images.name(done)} or one of "
                    f"the {len(found) - 1} after it; was it saved after the loss diverged?"
                )
            kept[done : done + len(found)] = found.numpy()
            done += len(found)
            ticker.update(done, f"{done / (time.monotonic() - begin):.0f} images/s")
    if done != n:
        raise ValueError(f"views of {done} images, expected {n}")
    return features


def _answer(
    features: Callable[[Tensor], Tensor],
    stats: PixelStats,
    precision: torch.dtype | None,
    batch: Tensor,
) -> Tensor:
    """Features (B, layers * D) of a batch, float32; a GPU may still be computing them."""
    if batch.shape[1] != stats.channels:
        got = f"these images have {batch.shape[1]}"
        raise DataError(f"the encoder takes images of {stats.channels} channels; {got}")
    with torch.autocast(batch.device.type, dtype=precision, enabled=precision is not None):
        return features(normalise(batch, stats)).float().to("cpu", non_blocking=True)


def _one_behind(found: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yields each tensor once it has arrived, after the GPU was given the work for the next one."""
    if device.type == "cpu":
        yield from found
        return
    before: tuple[Tensor, torch.cuda.Event] | None = None
    for tensor in found:
        after = tensor, torch.cuda.current_stream(device).record_event()
        if before is not None:
            before[1].synchronize()
            yield before[0]
        before = after
    if before is not None:
        before[1].synchronize()
        yield before[0]


def frozen(
    encoder: Encoder,
    images: Images,
    view: View | TrainView,
    draw: tuple[int, int] = (0, 0),
    device: Device = "cpu",
    precision: torch.dtype | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Features (N, L * D) of up to four last blocks, in half precision; the last is ``[:, -D:]``.

    Read from the cache if weights, images, view and code are the same, and `cache.covers` the
    encoder. `draw`: seed and number of a random view. `kept`: views made for other encoders.
    """
    layers = min(LAYERS, len(getattr(encoder, "blocks", range(LAYERS))))
    pool: Pool = getattr(encoder, "pool", "mean")
    device, key = torch.device(device), None
    if isinstance(encoder, nn.Module):
        encoder.to(device)
    number = draw if isinstance(view, TrainView) else None
    seen = cache.key(cache.of_images(images), type(view).__name__, asdict(view), number)
    if cache.covers(encoder):
        code, own = cache.of_code(*cache.FEATURES), cache.of_encoder(encoder)
        key = cache.key(code, own, seen, layers, pool, str(precision))
        if cached := cache.load("features", key):
            return cached[0]["features"]
    showing, kept = Showing(images, view, draw), kept or Kept()
    found = extract(
        encoder,
        images,
        size=kept.batches(seen, showing, device),
        layers=layers,
        pool=pool,
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
