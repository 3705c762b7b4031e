"""Every process sees its part of the same batches, and shards are read nearly in sequence."""

from typing import Any

import numpy as np
import pytest
import torch

from stopmim.base.random_keys import numpy_generator
from stopmim.config.schema import Config
from stopmim.data.order import batch_keys, nearly_sequential, permutation, shares
from stopmim.data.workers import Watched
from stopmim.data.workers import batches as read
from stopmim.method.build import configure
from tiny import NoiseImages, tiny

Key = tuple[int, int]
N, BATCH, PER_EPOCH, START = 200, 48, 4, 6  # resumed in the middle of the second epoch


class Shards(NoiseImages):
    """The same pictures as if they lay in five files."""

    chunks = np.array([0, 20, 90, 91, 140, N])
    window = 32


def batches(images: NoiseImages, start: int, rank: int, world: int, workers: int) -> list[Any]:
    """Per step the keys of one rank, its accumulation parts one after the other."""
    config = _config()
    parts = shares(BATCH, 2, rank, world)
    order = batch_keys(images, config, start, shares=parts, steps_per_epoch=PER_EPOCH)
    found: list[list[Key]] = list(read(list, order, Watched(images, workers, 0)))
    steps = [found[i : i + len(parts)] for i in range(0, len(found), len(parts))]
    return [[key for part in step for key in part] for step in steps]


def _config() -> Config:
    return configure(tiny(optim={"batch_size": BATCH, "epochs": 2}))


@pytest.mark.parametrize("kind", [NoiseImages, Shards])
@pytest.mark.parametrize(
    ("world", "workers"),
    [(1, 0), (1, 1), (1, 4), (2, 0), (2, 2), (3, 0), (3, 1), (4, 0), (4, 2), (6, 0), (8, 0)],
)
def test_ranks_workers_and_a_resume_leave_every_batch_as_it_is(
    kind: type[NoiseImages], world: int, workers: int
) -> None:
    images = kind(N)
    whole = batches(images, 0, rank=0, world=1, workers=0)
    assert len(whole) == 2 * PER_EPOCH
    ranks = [batches(images, START, rank, world, workers) for rank in range(world)]
    together = [[key for part in step for key in part] for step in zip(*ranks, strict=True)]
    assert together == whole[START:]


@pytest.mark.parametrize("kind", [NoiseImages, Shards])
def test_an_epoch_has_each_image_once_at_most_and_the_next_has_another_order(
    kind: type[NoiseImages],
) -> None:
    found = batches(kind(N), 0, rank=0, world=1, workers=0)
    first, second = ([n for step in found[i : i + 4] for _, n in step] for i in (0, 4))
    assert len(set(first)) == len(set(second)) == PER_EPOCH * BATCH
    assert first != second
    assert {epoch for step in found[:4] for epoch, _ in step} == {0}


def test_the_order_of_plain_images_is_still_that_of_earlier_releases() -> None:
    from stopmim.base.random_keys import torch_generator

    expected = torch.randperm(N, generator=torch_generator("order", 3, 1))
    assert torch.equal(permutation(NoiseImages(N), 3, 1), expected)


def test_a_resume_in_the_last_epoch_makes_only_that_permutation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def counted(images: NoiseImages, seed: int, epoch: int) -> torch.Tensor:
        made.append(epoch)
        return permutation(images, seed, epoch)

    monkeypatch.setattr("stopmim.data.order.permutation", counted)
    batches(NoiseImages(N), START, rank=0, world=1, workers=0)
    assert made == [1]


# --------------------------------------------------------------------- shards

CHUNKS = np.arange(0, 40_001, 1000)  # 40 shards of 1,000 images
WINDOW = 4096


def drawn(epoch: int, chunks: np.ndarray = CHUNKS, window: int = WINDOW) -> np.ndarray:
    return nearly_sequential(chunks, window, numpy_generator("order", 0, epoch))


def test_the_order_of_shards_is_a_permutation_that_the_key_alone_decides() -> None:
    assert np.array_equal(np.sort(drawn(0)), np.arange(40_000))
    assert np.array_equal(drawn(0), drawn(0))
    assert (drawn(0) == drawn(1)).mean() < 0.01
    for chunks in ([0, 1], [0, 0, 3, 3], [0, 5000, 5001]):
        found = drawn(0, np.array(chunks), 8)
        assert np.array_equal(np.sort(found), np.arange(chunks[-1]))


def test_at_any_time_only_the_shards_of_one_window_are_read() -> None:
    order = drawn(0) // 1000
    most = max(len(np.unique(order[i : i + 500])) for i in range(0, 40_000, 500))
    assert most <= (WINDOW + 500) // 1000 + 3
    # Each shard is done with soon after it was begun.
    spans = [np.ptp(np.flatnonzero(order == shard)) for shard in range(40)]
    assert max(spans) <= WINDOW + 2 * 1000


def test_no_image_moves_further_than_the_window() -> None:
    plain = nearly_sequential(CHUNKS, 0, numpy_generator("order", 0, 0))  # shards, not mixed
    assert np.array_equal(np.diff(plain[:1000]), np.ones(999))
    moved = np.argsort(drawn(0)) - np.argsort(plain)
    assert np.abs(moved).max() < WINDOW
    assert np.abs(moved).mean() > WINDOW / 8


def test_neighbours_in_a_shard_are_separated() -> None:
    place = np.argsort(drawn(0))
    apart = np.abs(np.diff(place.reshape(40, 1000), axis=1))
    assert np.median(apart) > WINDOW / 8
    assert (apart < 64).mean() < 0.05  # of two neighbours, seldom both in one batch


def test_few_images_are_mixed_freely() -> None:
    """Else the first of a small source would always come early."""
    first = [int(np.flatnonzero(drawn(e, np.array([0, 100]), 4096) == 0)[0]) for e in range(200)]
    assert 40 < np.mean(first) < 60
    assert min(first) < 10
    assert max(first) > 90
