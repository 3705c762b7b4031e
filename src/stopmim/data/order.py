"""The order of images: a function of (seed, epoch), independent of the number of processes."""

import math
from collections.abc import Iterator

import numpy as np
import torch

from stopmim.base.errors import UserError
from stopmim.base.random_keys import numpy_generator, torch_generator
from stopmim.config.schema import Config
from stopmim.data.images import Chunked, Images


def batch_keys(
    images: Images, config: Config, start: int, *, shares: list[slice], steps_per_epoch: int
) -> Iterator[list[tuple[int, int]]]:
    """Yields the (epoch, image number) of each micro-batch, from step `start` to the last.

    An epoch is a permutation keyed by (seed, epoch), without the images that do not fill a batch.
    If `data.crops_per_image` is n, an image comes n times in a row, and its crops are those that n
    epochs would have drawn: the keys count n times as many epochs.
    Only this process holds the order; workers are sent the numbers they need. `shares` are the
    positions in a batch that this rank computes, see the function of that name.
    """
    size, crops = config.optim.batch_size, config.data.crops_per_image
    current, order = -1, torch.empty(0, dtype=torch.long)
    for step in range(start, config.optim.epochs * steps_per_epoch):
        epoch, place = divmod(step, steps_per_epoch)
        if epoch != current:
            current, order = epoch, permutation(images, config.seed, epoch)
        places = torch.arange(place * size, (place + 1) * size)
        batch, crop = order[places // crops].tolist(), (places % crops).tolist()
        keys = [(epoch * crops + j, number) for j, number in zip(crop, batch, strict=True)]
        yield from (keys[share] for share in shares)


def shares(batch_size: int, accumulate: int, rank: int = 0, world: int = 1) -> list[slice]:
    """The micro-batches of `rank`, as positions in the batch.

    `accumulate` counts the parts of all ranks: one GPU with 8 and eight GPUs compute the same.
    """
    each = math.ceil(accumulate / world)
    part, rest = divmod(batch_size, world * each)
    if rest or not part:
        near = range(1, 2 * world)
        works = [n for n in near if not batch_size % (n * math.ceil(accumulate / n))]
        raise UserError(
            f"optim.batch_size: {batch_size} images cannot be shared by {world} GPUs in {each} "
            f"parts each; {', '.join(map(str, works))} GPUs work, or another --runtime.accumulate"
        )
    return [slice(i * part, (i + 1) * part) for i in range(rank * each, (rank + 1) * each)]


def permutation(images: Images, seed: int, epoch: int) -> torch.Tensor:
    """The order of an epoch, (n,) int64."""
    if isinstance(images, Chunked) and not getattr(images, "any_order", False):
        rng = numpy_generator("order", seed, epoch)
        return torch.from_numpy(nearly_sequential(images.chunks, images.window, rng))
    return torch.randperm(len(images), generator=torch_generator("order", seed, epoch))


def nearly_sequential(chunks: np.ndarray, window: int, rng: np.random.Generator) -> np.ndarray:
    """A permutation that reads a few chunks at a time, each from beginning to end.

    The chunks, (k + 1,) as in `images.Chunked`, are put in random order; then every image is
    delayed by a random part of `window` places, and all are sorted. This resembles a shuffle buffer
    of that size, but no image stays behind in it: none moves `window` places or more. Up to
    `window` images are permuted freely.
    """
    pieces = rng.permutation(len(chunks) - 1).tolist()
    sequence = np.concatenate([np.arange(chunks[c], chunks[c + 1]) for c in pieces])
    places = np.arange(len(sequence)) if len(sequence) > window else 0
    return sequence[np.argsort(places + window * rng.random(len(sequence)), kind="stable")]


def evenly_spaced(total: int, count: int) -> list[int]:
    """Up to `count` numbers below `total`, from the first to the last."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()
