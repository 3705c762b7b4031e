"""Rendered scenes: embedded data with exact labels and no download, as pictures or in 12 bands."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np

from stopmim.base.errors import UserError
from stopmim.base.random_keys import seed_of
from stopmim.data.rendering.render import BANDS, render_all, render_bands
from stopmim.data.rendering.scene import LABELS, Scene, labels_of, sample
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.source import Source, Split

VERSION = 1  # in the fingerprint: increase it with any change of a pixel or label
PIXELS = 2**19  # rendered at once: enough to keep threads from waiting, but few enough for caches
BATCH = 2048  # scenes sampled at once
DEFAULT = (8192, 64, 0)  # count, size and seed
# Stored value of each of BANDS: offset + scale * value, with noise of this standard deviation.
# Colours are as noisy as at night; what the other bands show is clear.
COLOUR, NORMAL = (200.0, 10_000.0, 2500.0), (20_000.0, 15_000.0, 3000.0)
CODES = np.array(
    [
        *(COLOUR, COLOUR, COLOUR, (500.0, 4000.0, 600.0)),  # lamp
        *((0.0, 1000.0, 400.0), (100.0, 40_000.0, 200.0)),  # depth in millimetres, disparity
        *(NORMAL, NORMAL, NORMAL, (300.0, 5000.0, 400.0)),  # height
        *((100.0, 3000.0, 600.0), (50.0, 8000.0, 1200.0)),  # metal, shadow
    ]
)


class Scenes(Arrays):
    """`n` rendered scenes in memory, with the labels of `labels_of`."""

    in_process = True  # faster than worker processes
    prefix = "scenes"
    shape: tuple[int, ...] = (3,)
    dtype: type[np.integer] = np.uint8
    names: tuple[str, ...] = ()

    def __init__(self, n: int, size: int = 64, seed: int = 0, threads: int | None = None) -> None:
        pixels = np.empty((n, size, size, *self.shape), self.dtype)
        labels = {name: np.empty(n, np.int64) for name in LABELS}
        # After this is freed, glibc keeps what is freed later. Otherwise a fifth of the time goes
        # into requesting the same pages from the system again and again.
        np.empty(4_000_000)
        done, step = 0, max(1, 3 * PIXELS // (size * size * self.shape[0]))
        with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
            for start in range(0, n, BATCH):
                # Sampled before rendering: pure Python would block the threads that render.
                scenes = [sample(seed, i) for i in range(start, min(start + BATCH, n))]
                for i, scene in enumerate(scenes, start):
                    for name, value in labels_of(scene).items():
                        labels[name][i] = value
                chunks = [scenes[i : i + step] for i in range(0, len(scenes), step)]
                firsts = range(start, n, step)
                more = repeat(size), repeat(seed), firsts
                for images in pool.map(self.rendered, chunks, *more):
                    pixels[done : done + len(images)] = images
                    done += len(images)
        self.source = f"{self.prefix}:{n}:{size}:{seed}"
        fingerprint = f"{self.prefix}-v{VERSION}-{n}-{size}-{seed}"
        super().__init__(pixels, labels, [], "scene", fingerprint, self.names)

    @staticmethod
    def rendered(scenes: list[Scene], size: int, seed: int, first: int) -> np.ndarray:
        """Images (B, size, size, C) of `scenes`, of which the first has the number `first`."""
        return render_all(scenes, size)[0]

    def __str__(self) -> str:
        return self.source

    def name(self, i: int) -> str:
        return f"scene {i:08d}"


class Bands(Scenes):
    """The same scenes in 12 bands of 16 bits, with noise: colours, depth, normals and others.

    The three noisy colours say less about the labels than all bands do.
    """

    prefix, shape, dtype, names = "bands", (len(BANDS),), np.uint16, BANDS

    @staticmethod
    def rendered(scenes: list[Scene], size: int, seed: int, first: int) -> np.ndarray:
        offset, scale, deviation = CODES.T
        clean = render_bands(scenes, size)
        clean[..., :3] = np.sqrt(clean[..., :3])  # as in pictures
        keys = (seed_of("bands", seed, i) for i in range(first, first + len(scenes)))
        noise = np.stack([_noise(key, clean[0].size) for key in keys]).reshape(clean.shape)
        values = offset + scale * clean + deviation * noise + 0.5
        return np.minimum(np.maximum(values, 0.0), 65_535.0).astype(np.uint16)


def _noise(key: int, n: int) -> np.ndarray:
    """(n,) of mean 0 and variance 1, nearly Gaussian, equal to the last bit on every machine."""
    four = np.random.Philox(key=key).random_raw(n).view(np.uint16).reshape(n, 4)
    total = four.sum(axis=1, dtype=np.int32)
    return (total - 131_070) / 37_837.2  # 65,536 times the square root of 4 / 12


def parse_scenes(text: str, default: tuple[int, int, int] = DEFAULT) -> tuple[int, int, int]:
    """Count, size and seed of ``scenes[:count[:size[:seed]]]``, without rendering."""
    kind, *numbers = text.split(":")
    plain = all(re.fullmatch(r"\d{1,15}", number) for number in numbers)
    if not plain or 0 in map(int, numbers[:2]) or len(numbers) > 3:
        raise UserError(f"{text}: expected {kind}[:count[:size[:seed]]], as {kind}:{default[0]}:64")
    count, size, seed = (*map(int, numbers), *default[len(numbers) :])
    return count, size, seed


def _source(kind: type[Scenes]) -> Source:
    """The source of scenes of this kind; its test split uses the next seed."""
    name = kind.prefix

    def open_scenes(text: str, split: Split | None) -> Scenes:
        count, size, seed = parse_scenes(text if text == name else f"{name}:{text}")
        return kind(count, size, seed + (split == "test"))

    return Source(name, open_scenes, recognise=lambda text: text == name, generated=True)


SCENES, BAND_SCENES = _source(Scenes), _source(Bands)
