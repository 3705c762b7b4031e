"""Rendered scenes: embedded data with exact labels and no download."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np

from stopmim.base.errors import UserError
from stopmim.data.render import render_all
from stopmim.data.scene import LABELS, labels_of, sample
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.source import Source, Split

VERSION = 1  # in the fingerprint: increase it with any change of a pixel or label
PIXELS = 2**19  # rendered at once: enough to keep threads from waiting, but few enough for caches
BATCH = 2048  # scenes sampled at once
DEFAULT = (8192, 64, 0)  # count, size and seed


class Scenes(Arrays):
    """`n` rendered scenes in memory, with the labels of `labels_of`."""

    in_process = True  # faster than worker processes

    def __init__(self, n: int, size: int = 64, seed: int = 0, threads: int | None = None) -> None:
        pixels = np.empty((n, size, size, 3), np.uint8)
        labels = {name: np.empty(n, np.int64) for name in LABELS}
        # After this is freed, glibc keeps what is freed later. Otherwise a fifth of the time goes
        # into requesting the same pages from the system again and again.
        np.empty(4_000_000)
        done, step = 0, max(1, PIXELS // (size * size))
        with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
            for start in range(0, n, BATCH):
                # Sampled before rendering: pure Python would block the threads that render.
                scenes = [sample(seed, i) for i in range(start, min(start + BATCH, n))]
                for i, scene in enumerate(scenes, start):
                    for name, value in labels_of(scene).items():
                        labels[name][i] = value
                chunks = [scenes[i : i + step] for i in range(0, len(scenes), step)]
                for images, _ in pool.map(render_all, chunks, repeat(size)):
                    pixels[done : done + len(images)] = images
                    done += len(images)
        self.source = f"scenes:{n}:{size}:{seed}"
        super().__init__(pixels, labels, [], "scene", f"scenes-v{VERSION}-{n}-{size}-{seed}")

    def __str__(self) -> str:
        return self.source

    def name(self, i: int) -> str:
        return f"scene {i:08d}"


def parse_scenes(text: str, default: tuple[int, int, int] = DEFAULT) -> tuple[int, int, int]:
    """Count, size and seed of ``scenes[:count[:size[:seed]]]``, without rendering."""
    _, *numbers = text.split(":")
    if not all(map(str.isdecimal, numbers)) or 0 in map(int, numbers[:2]) or len(numbers) > 3:
        raise UserError(f"{text}: expected scenes[:count[:size[:seed]]], as scenes:{default[0]}:64")
    count, size, seed = (*map(int, numbers), *default[len(numbers) :])
    return count, size, seed


def _open(text: str, split: Split | None) -> Scenes:
    """The test split uses the next seed."""
    count, size, seed = parse_scenes(text if text == "scenes" else f"scenes:{text}")
    return Scenes(count, size, seed + (split == "test"))


SCENES = Source("scenes", _open, recognise=lambda text: text == "scenes", generated=True)
