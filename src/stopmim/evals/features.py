"""Frozen features of a set of images, and how many dimensions they fill.

Shapes: N images, D width of the encoder.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor, nn

from stopmim.console import Ticker
from stopmim.data import Images
from stopmim.data.decode import BadImageError
from stopmim.data.transforms import center_crop, normalise
from stopmim.errors import DataError, NonFiniteError
from stopmim.vit import Encoder

EPS = 1e-7  # of RankMe (arXiv 2210.02885, equation 2)


def extract(
    encoder: Encoder,
    images: Images,
    *,
    size: int,
    layers: int = 1,
    pool: Literal["mean", "cls"] = "mean",
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    precision: torch.dtype | None = None,
) -> Tensor:
    """Features (N, layers * D) of all `images` in their order, float32 on the CPU.

    Args:
        size: edge of the middle square that is shown to the encoder.
        layers: that many of the last blocks, one after the other.
        batch_size: images at a time; changes the features by no more than rounding.
        device: where the encoder is.
        precision: dtype of autocast; None is float32 throughout.

    Raises:
        DataError: an image cannot be read. Without it the number would be of another test set.
        NonFiniteError: the encoder answers with NaN or infinity.
    """
    device = torch.device(device)
    features = torch.empty(len(images), layers * encoder.width)
    modules = list(encoder.modules()) if isinstance(encoder, nn.Module) else []
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    done, begin = 0, time.monotonic()
    try:
        # `features` was made before inference mode, so that a caller may train on it.
        with torch.inference_mode(), Ticker("features", len(images)) as ticker:
            for batch in _batches(images, size, batch_size):
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
    finally:
        for module in training:
            module.training = True
    return features


def _batches(images: Images, size: int, batch_size: int) -> Iterator[Tensor]:
    """(B, 3, S, S) uint8, one batch read ahead while the encoder works on the one before."""

    def crop(i: int) -> Tensor:
        try:
            return center_crop(images.read(i), size, None)
        except BadImageError as error:
            raise DataError(
                f"{images.name(i)}: {error}; an evaluation leaves no image out: mend or remove it"
            ) from None

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        ahead = pool.map(crop, range(min(batch_size, len(images))))
        for start in range(batch_size, len(images) + batch_size, batch_size):
            batch = torch.stack(list(ahead))
            ahead = pool.map(crop, range(start, min(start + batch_size, len(images))))
            yield batch


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
