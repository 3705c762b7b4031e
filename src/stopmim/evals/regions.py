"""Object masks in videos: comparison, files and pictures.

The measures are those of DAVIS (davis2017-evaluation, metrics.py and utils.py). H x W pixels.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from stopmim.base.files import own_folder, replaced
from stopmim.data.videos import PALETTE, Bytes, Video, write_mask

BOUNDARY = 0.008  # of the diagonal: distance within which two boundaries match
PICTURES, COLUMNS, WIDTH = 12, 4, 240  # pictures per sheet and per row, and pixels of each
TINT = 0.4  # opacity of an object over the frame


def jaccard(mask: ArrayLike, truth: ArrayLike) -> float:
    """J: intersection over union of two masks (H, W), 1 if both are empty."""
    return float(region_similarity(*_pair(mask, truth)))


def boundary_f(mask: ArrayLike, truth: ArrayLike) -> float:
    """F: harmonic mean of precision and recall of the boundary of `mask`, both (H, W).

    A pixel of a boundary matches if the other boundary passes within 0.8 % of the diagonal. Two
    empty boundaries score 1, an empty one and another score 0.
    """
    return float(boundary_accuracy(*_pair(mask, truth)))


def _pair(mask: ArrayLike, truth: ArrayLike) -> tuple[Tensor, Tensor]:
    a, b = (torch.from_numpy(np.asarray(x).astype(bool)) for x in (mask, truth))
    if a.ndim != 2 or a.shape != b.shape:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"expected two masks (H, W) of equal size, got {shapes}")
    return a, b


def region_similarity(found: Tensor, truth: Tensor) -> Tensor:
    """J of every mask of `found` (..., H, W), bool, on its device and in float64, (...,)."""
    both, either = _count(found & truth), _count(found | truth)
    return torch.where(either > 0, both / either, 1.0)


def boundary_accuracy(found: Tensor, truth: Tensor) -> Tensor:
    """F of every mask, as `region_similarity`."""
    a, b = _boundary(found), _boundary(truth)
    radius = math.ceil(BOUNDARY * math.hypot(*a.shape[-2:]))
    some_a, some_b = _count(a), _count(b)
    precision = _count(a & _dilate(b, radius)) / some_a  # NaN without a boundary
    recall = _count(b & _dilate(a, radius)) / some_b
    f = torch.where(precision + recall > 0, 2 * precision * recall / (precision + recall), 0.0)
    equally_empty = ((some_a > 0) == (some_b > 0)).double()
    return torch.where((some_a > 0) & (some_b > 0), f, equally_empty)


def _count(points: Tensor) -> Tensor:
    """Pixels that are set, in float64: their ratios are then those of Python's integers."""
    return points.sum(dim=(-2, -1)).double()


def _boundary(mask: Tensor) -> Tensor:
    """Pixels that differ from the one to the right, below, or diagonal; none along the frame."""
    found = torch.zeros_like(mask)
    found[..., :-1] |= mask[..., :-1] ^ mask[..., 1:]
    found[..., :-1, :] |= mask[..., :-1, :] ^ mask[..., 1:, :]
    found[..., :-1, :-1] |= mask[..., :-1, :-1] ^ mask[..., 1:, 1:]
    return found


def _dilate(points: Tensor, radius: int) -> Tensor:
    """All pixels within `radius` of one that is set.

    A disc is a stack of rows: `wide` grows from the short top row to the middle one, and each is
    added above and below.
    """
    wide, found, reach = points.clone(), torch.zeros_like(points), 0
    for dy in range(radius, -1, -1):
        for dx in range(reach + 1, (reach := math.isqrt(radius**2 - dy**2)) + 1):
            wide[..., dx:] |= points[..., :-dx]
            wide[..., :-dx] |= points[..., dx:]
        rows = max(0, wide.shape[-2] - dy)  # a strip may be less high than the disc
        found[..., dy:, :] |= wide[..., :rows, :]
        found[..., :rows, :] |= wide[..., dy:, :]
    return found


def summary(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean, recall (share above 0.5) and decay (first minus last quarter) over frames (T,)."""
    # Neighbouring quarters share a frame, and 0.5 rounds to even, as in the released code.
    edge = np.round(np.linspace(1, len(values), 5) + 1e-10).astype(int) - 1
    decay = values[: edge[1] + 1].mean() - values[edge[3] :].mean()
    return float(values.mean()), float((values > 0.5).mean()), float(decay)


def write_masks(folder: Path, video: Video, found: Sequence[Bytes]) -> None:
    """Writes the objects `found` in each frame as indexed PNGs, and a sheet of pictures."""
    own_folder(folder / video.name)
    for i, ids in enumerate(found):
        write_mask(ids, folder / video.name / f"{video.stem(i)}.png")
    with replaced(own_folder(folder / "sheets") / f"{video.name}.png") as temporary:
        sheet(video, found).save(temporary, "PNG")


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
            tinted[_boundary(torch.from_numpy(ids == k)).numpy()] = bright[k]
        row, column = divmod(place, COLUMNS)
        whole.paste(Image.fromarray(tinted.astype(np.uint8)), (column * WIDTH, row * height))
    return whole
