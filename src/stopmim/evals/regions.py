"""Masks of objects in videos: comparison, files and pictures.

The measures are those of DAVIS (davis2017-evaluation, metrics.py and utils.py). H x W pixels.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from stopmim.data.videos import PALETTE, Bytes, Video, write_mask

BOUNDARY = 0.008  # of the diagonal: distance within which two boundaries match
PICTURES, COLUMNS, WIDTH = 12, 4, 240  # per sheet, per row, and pixels of one
TINT = 0.4  # opacity of an object over the frame


def jaccard(mask: ArrayLike, truth: ArrayLike) -> float:
    """J: intersection over union of two masks (H, W), 1 if both are empty."""
    a, b = _pair(mask, truth)
    union = np.count_nonzero(a | b)
    return float(np.count_nonzero(a & b) / union) if union else 1.0


def boundary_f(mask: ArrayLike, truth: ArrayLike) -> float:
    """F: harmonic mean of precision and recall of the boundary of `mask`, both (H, W).

    A pixel of a boundary matches if the other boundary passes within 0.8 % of the diagonal. Two
    empty boundaries score 1, an empty one and another score 0.
    """
    a, b = map(_boundary, _pair(mask, truth))
    if not (a.any() and b.any()):
        return float(a.any() == b.any())
    radius = math.ceil(BOUNDARY * math.hypot(*a.shape))
    precision = np.count_nonzero(a & _dilate(b, radius)) / np.count_nonzero(a)
    recall = np.count_nonzero(b & _dilate(a, radius)) / np.count_nonzero(b)
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def _pair(mask: ArrayLike, truth: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    a, b = np.asarray(mask).astype(bool), np.asarray(truth).astype(bool)
    if a.ndim != 2 or a.shape != b.shape:
        raise ValueError(f"expected two masks (H, W) of equal size, got {a.shape} and {b.shape}")
    return a, b


def _boundary(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Pixels that differ from the one to the right, below, or diagonal; none along the frame."""
    found = np.zeros_like(mask)
    found[:, :-1] |= mask[:, :-1] ^ mask[:, 1:]
    found[:-1] |= mask[:-1] ^ mask[1:]
    found[:-1, :-1] |= mask[:-1, :-1] ^ mask[1:, 1:]
    return found


def _dilate(points: NDArray[np.bool_], radius: int) -> NDArray[np.bool_]:
    """All pixels within `radius` of one that is set: few are, so a disc is stamped on each."""
    offset = np.arange(-radius, radius + 1)
    dy, dx = np.nonzero(offset[:, None] ** 2 + offset**2 <= radius**2)  # from 0
    y, x = np.nonzero(points)
    found = np.zeros(np.add(points.shape, 2 * radius), bool)
    found[y[:, None] + dy, x[:, None] + dx] = True
    return found[radius:-radius, radius:-radius]


def summary(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean, recall (share above 0.5) and decay (first minus last quarter) over frames (T,)."""
    # Neighbouring quarters share a frame, and 0.5 rounds to even, as in the released code.
    edge = np.round(np.linspace(1, len(values), 5) + 1e-10).astype(int) - 1
    decay = values[: edge[1] + 1].mean() - values[edge[3] :].mean()
    return float(values.mean()), float((values > 0.5).mean()), float(decay)


def write_masks(folder: Path, video: Video, found: Sequence[Bytes]) -> None:
    """Writes the objects `found` in each frame as indexed PNGs, and a sheet of pictures."""
    (folder / video.name).mkdir(parents=True, exist_ok=True)
    for i, ids in enumerate(found):
        write_mask(ids, folder / video.name / f"{video.stem(i)}.png")
    (folder / "sheets").mkdir(exist_ok=True)
    sheet(video, found).save(folder / "sheets" / f"{video.name}.png")


def sheet(video: Video, found: Sequence[Bytes]) -> Image.Image:
    """Up to twelve evenly spaced frames of `video`, with the objects tinted and outlined."""
    numbers = np.unique(np.linspace(0, len(video) - 1, PICTURES).round().astype(int)).tolist()
    height = max(1, round(WIDTH * found[0].shape[0] / found[0].shape[1]))
    rows = math.ceil(len(numbers) / COLUMNS)
    whole = Image.new("RGB", (COLUMNS * WIDTH, rows * height), "white")
    bright = np.minimum(PALETTE.astype(int) * 2, 255)  # DAVIS's colours are dark
    for place, i in enumerate(numbers):
        frame = np.array(Image.fromarray(video.frame(i)).resize((WIDTH, height)))
        ids = np.array(Image.fromarray(found[i]).resize((WIDTH, height), Image.Resampling.NEAREST))
        tinted = np.where(ids[..., None] > 0, (1 - TINT) * frame + TINT * bright[ids], frame)
        for k in range(1, int(ids.max()) + 1):
            tinted[_boundary(ids == k)] = bright[k]
        row, column = divmod(place, COLUMNS)
        whole.paste(Image.fromarray(tinted.astype(np.uint8)), (column * WIDTH, row * height))
    return whole
