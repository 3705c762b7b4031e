"""Frozen features of a set of images, computed once and kept; and how many dimensions they fill.

Shapes: N images, D width of the encoder, L last blocks.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Literal

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
from stopmim.evals.views import TrainView, View
from stopmim.method.encoder import Encoder

EPS = 1e-7  # of RankMe (arXiv 2210.02885, equation 2)
LAYERS = 4  # last blocks that are kept: "last" and "last 4" then come from one extraction
VERSION = 1  # in the key of the cache: a change of what is computed needs a new one


@contextmanager
def evaluating(encoder: Encoder) -> Iterator[None]:
    """Inside of it `encoder` is in evaluation mode and nothing is differentiated."""
    modules = list(encoder.modules()) if isinstance(encoder, nn.Module) else []
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
    size: int,
    view: View | TrainView | None = None,
    draw: tuple[int, int] = (0, 0),
    layers: int = 1,
    pool: Literal["mean", "cls"] = "mean",
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    precision: torch.dtype | None = None,
) -> Tensor:
    """Features (N, layers * D) of all `images` in their order, float32 on the CPU.

    Args:
        size: edge of the middle square that is shown to the encoder.
        view: what else may be shown to it; its size counts.
        draw: seed and number of a random view.
        layers: that many of the last blocks, one after the other.
        batch_size: images at a time; changes the features by no more than rounding.
        device: where the encoder is.
        precision: dtype of autocast; None is float32 throughout.

    Raises:
        DataError: an image cannot be read. Without it the number would be of another test set.
        NonFiniteError: the encoder answers with NaN or infinity.
    """
    device, view = torch.device(device), view or View(size, size)
    features = torch.empty(len(images), layers * encoder.width)
    done, begin = 0, time.monotonic()

    def show(i: int) -> Tensor:
        if isinstance(view, View):  # nothing in it is random
            return view(read(images, i))
        return view(read(images, i), numpy_generator("view", *draw, i))

    order = (range(i, min(i + batch_size, len(images))) for i in range(0, len(images), batch_size))
    # `features` was made before inference mode, so that a caller may train on it.
    with evaluating(encoder), Ticker("features", len(images)) as ticker:
        for batch in batches(show, order):
            pixels = normalise(batch.to(device))  # (B, 3, S, S)
            with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
                found = encoder.features(pixels, layers, pool).float().cpu()
            if not found.isfinite().all():
                raise NonFiniteError(
                    f"the encoder gives no finite features for {images.name(done)} or one of "
                    f"the {len(batch) - 1} after it; was it saved after the loss blew up?"
                )
            features[done : done + len(batch)] = found
            done += len(batch)
            ticker.update(done, f"{done / (time.monotonic() - begin):.0f} images/s")
    return features


def read(images: Images, i: int) -> np.ndarray:
    """Image `i`, or a DataError that names it."""
    try:
        return images.read(i)
    except BadImageError as error:
        raise DataError(
            f"{images.name(i)}: {error}; no image is left out unasked: mend or remove it, or "
            f"leave it out with --skip FILE, see stopmim check --fix-list"
        ) from None


def batches(show: Callable[[int], Tensor], order: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """(B, 3, S, S) uint8, one batch read ahead while the encoder works on the one before."""
    threads = torch.get_num_threads()

    def part(numbers: Sequence[int]) -> Tensor:
        return torch.stack([show(i) for i in numbers])

    with ThreadPoolExecutor(threads) as pool:
        ahead: Iterator[Tensor] | None = None
        for numbers in order:
            # A task per thread, not per image: handing over a small image costs more than reading.
            size = -(-len(numbers) // threads)
            parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
            now, ahead = ahead, pool.map(part, parts)
            if now is not None:
                yield torch.cat(list(now))
        if ahead is not None:
            yield torch.cat(list(ahead))


# ------------------------------------------------------------------------------ kept on disk


def frozen(
    encoder: Encoder,
    images: Images,
    view: View | TrainView,
    *,
    draw: tuple[int, int] = (0, 0),
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    precision: torch.dtype | None = None,
) -> Tensor:
    """Features (N, L * D) of the last four blocks (or as many as there are), in half precision.

    What was computed before is read from the cache: same weights, same images, same view. A
    damaged file is computed again, and so are features of an encoder that is no `nn.Module`: it has
    no weights to be known by. The last block alone is ``[:, -D:]``.
    """
    layers = min(LAYERS, len(getattr(encoder, "blocks", range(LAYERS))))
    pool: Literal["mean", "cls"] = getattr(encoder, "pool", "mean")
    key = None
    if isinstance(encoder, nn.Module):
        options = (
            type(view).__name__,
            asdict(view),
            draw if isinstance(view, TrainView) else None,
            layers,
            pool,
            str(precision),
        )
        own = cache.of_encoder(encoder)
        code = VERSION, cache.of_code("data")  # which decodes, draws and crops
        key = cache.key(code, own, cache.of_images(images), *options)
        if kept := cache.load("features", key):
            return kept[0]["features"]
        encoder.to(device)
    found = extract(
        encoder,
        images,
        size=view.size,
        view=view,
        draw=draw,
        layers=layers,
        pool=pool,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
    # Behind a LayerNorm they are of size 1. Where the norm's weights are huge they stay float32.
    half = found.half()
    found = half if half.isfinite().all() else found
    if key is not None:
        cache.store("features", key, {"features": found})
    return found


# ------------------------------------------------------------------------------ effective rank


def rankme(features: Tensor) -> float:
    """Effective rank of `features` (N, D): exp of the entropy of their normalised singular values.

    Singular values, not eigenvalues of the covariance, and features as they are, not centred: both
    as in the paper, and both change the number. Between 1 and D.
    """
    n, d = features.shape
    if n <= d:
        raise ValueError(f"rankme needs more samples than features, got {n} x {d}")
    values = torch.linalg.svdvals(features.double())  # (D,)
    # Features that are all zero have no direction at all; they come out as 1, the worst.
    p = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny) + EPS
    return float(torch.exp(-(p * p.log()).sum()))
