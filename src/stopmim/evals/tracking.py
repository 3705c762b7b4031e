"""Video object segmentation: masks of the first frame, propagated by frozen features.

The protocol is DINO's for DAVIS (dino eval_video_segmentation.py): every patch takes the labels of
the patches most similar to it in the first frame and in the last few, within a window. The metric
is DAVIS-2017's (davis2017-evaluation): region similarity J and boundary accuracy F of each object,
first and last frame excluded.

Shapes: T frames, grids of h x w patches, D features, C channels (background, then the objects), M
frames that labels are taken from, H x W pixels.
"""

import csv
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from stopmim.base.console import Ticker
from stopmim.base.errors import DataError, NonFiniteError, check_least
from stopmim.base.random_keys import numpy_generator
from stopmim.data.crops import STD, normalise
from stopmim.data.videos import Bytes, Video
from stopmim.evals.features import Device, evaluating
from stopmim.evals.recipes import Propagation
from stopmim.evals.regions import boundary_f, jaccard, summary, write_masks
from stopmim.evals.results import Result
from stopmim.method.encoder import Encoder

__all__ = ["Scores", "Tracking", "boundary_f", "follow", "jaccard", "propagate", "track"]

TILE = 10  # edge of a square of patches processed at once: the fastest, with windows of 25
UNIT = 64  # pixels; the longer side of a frame is a multiple of this (dino, read_frame)
RED = 0.228  # deviation of red in the released code; training divides by 0.229
RESAMPLES = 10_000  # of the bootstrap
HEADINGS = ("video", "object", "J", "J recall", "J decay", "F", "F recall", "F decay")


@dataclass(frozen=True)
class Tracking(Propagation):
    """All options of the protocol; the defaults are DINO's.

    With `compat` None a frame is resized to whole patches, so that a cell of the result lies where
    its patch is. With "released" it is not: the patches miss a margin at the right and at the
    bottom, and the result is stretched over it. The two differ for patch 14, not for 8 or 16.
    "released" also divides red by 0.228, where training divides by 0.229.
    """

    size: int = 480  # pixels of the shorter side of a frame

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, size=1)


class Scores(NamedTuple):
    """J and F of one object in every scored frame, each (T - 2,)."""

    video: str
    number: int
    j: NDArray[np.float64]
    f: NDArray[np.float64]


def propagate(
    features: Iterable[Tensor], first: Tensor, options: Propagation | None = None
) -> Tensor:
    """Soft labels (T - 1, C, h, w) of all frames but the first.

    Args:
        features: for each of T frames the features (h * w, D) of its patches, row by row.
        first: labels of the first frame, (C, h, w), one-hot.
    """
    found = list(propagate_each(features, first, options or Propagation()))
    return torch.stack(found) if found else first.new_empty(0, *first.shape)


def propagate_each(
    features: Iterable[Tensor], first: Tensor, options: Propagation
) -> Iterator[Tensor]:
    """Yields the same frame by frame, each (C, h, w)."""
    grid = tuple(first.shape[1:])
    queue: deque[tuple[Tensor, Tensor]] = deque(maxlen=options.n_last_frames)
    begin = None
    for tokens in features:
        here = F.normalize(tokens.float(), dim=-1).unflatten(0, grid)  # (h, w, D)
        if begin is None:
            begin = (here, first.to(here))
            continue
        # The first frame and the last ones together: a good match may be in any of them.
        sources, labels = (torch.stack(parts) for parts in zip(begin, *queue, strict=True))
        found = _attend(here, sources, labels, options)
        queue.append((here, found))  # still soft, as the next frames use them
        yield found


def _attend(here: Tensor, sources: Tensor, labels: Tensor, options: Propagation) -> Tensor:
    """Labels (C, h, w) for `here` (h, w, D), from `sources` (M, h, w, D) with (M, C, h, w)."""
    # By squares of patches, each against the part of the sources that its windows cover: all pairs
    # would take up to ten times the work, and memory quadratic in the patches.
    height, width, _ = here.shape
    reach = options.neighbourhood or max(height, width)
    found = torch.empty_like(labels[0])
    for down, across in product(_tiles(height, reach), _tiles(width, reach)):
        (rows, near_rows, far_down), (cols, near_cols, far_right) = down, across
        query = here[rows, cols]  # (a, b, D), against (M, c, d, D)
        source = sources[:, near_rows, near_cols]
        given = labels[:, :, near_rows, near_cols].transpose(0, 1).flatten(1)  # (C, M c d)
        like = query.flatten(0, 1) @ source.flatten(0, 2).T  # (a b, M c d)
        # (a, b, c, d): pairs too far apart, the same in every frame
        far = (far_down[:, None, :, None] | far_right[None, :, None, :]).flatten(2).flatten(0, 1)
        like.unflatten(1, (len(sources), -1)).masked_fill_(far[:, None].to(like.device), -torch.inf)
        best = like.topk(min(options.topk, like.shape[1]), dim=1).values
        # Ties with the k-th count, as in the released code. Few do: a sparse sum is faster.
        asks, gives = (like >= best[:, -1:]).nonzero(as_tuple=True)
        weight = ((like[asks, gives] - best[asks, 0]) / options.temperature).exp()
        total = like.new_zeros(len(like)).index_add_(0, asks, weight)
        taken = like.new_zeros(len(given), len(like))
        taken.index_add_(1, asks, given[:, gives] * (weight / total[asks]))
        found[:, rows, cols] = taken.view(-1, *query.shape[:2])
    return found


def _tiles(length: int, reach: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields each tile, the span its windows cover, and a mask of pairs more than `reach` apart."""
    place = torch.arange(length)
    for start in range(0, length, TILE):
        tile, near = slice(start, start + TILE), slice(max(0, start - reach), start + TILE + reach)
        yield tile, near, (place[tile, None] - place[near]).abs() > reach


def labels_of(soft: Tensor, patch: int, shape: tuple[int, ...]) -> Bytes:
    """Object of every pixel of `shape` (H, W), from soft labels (C, h, w) of patches."""
    soft = F.interpolate(soft[None].float(), scale_factor=patch, mode="bilinear")[0]
    low, high = soft.amin(dim=(1, 2), keepdim=True), soft.amax(dim=(1, 2), keepdim=True)
    # Every channel scaled to 0 to 1, background included, so that fading objects are kept.
    soft = torch.where(high > low, (soft - low) / (high - low), soft)
    return _resize_ids(soft.argmax(dim=0).byte().cpu().numpy(), shape)


def _resize_ids(ids: Bytes, shape: tuple[int, ...]) -> Bytes:
    height, width = shape
    return np.array(Image.fromarray(ids).resize((width, height), Image.Resampling.NEAREST))


def score(video: Video, found: Sequence[Bytes]) -> list[Scores]:
    """J and F of every object of the first frame, given the masks found in all T frames."""
    pairs = [(found[i], video.mask(i)) for i in range(1, len(video) - 1)]
    scores = []
    for k in range(1, int(video.mask(0).max()) + 1):
        j, f = (np.array([f(a == k, b == k) for a, b in pairs]) for f in (jaccard, boundary_f))
        scores.append(Scores(video.name, k, j, f))
    return scores


def results(scores: Sequence[Scores]) -> list[Result]:
    """Means over all objects of all videos, each with its interval over objects."""
    j = np.array([summary(s.j) for s in scores]).T  # (3, n): mean, recall, decay
    f = np.array([summary(s.f) for s in scores]).T
    columns = {"J&F": (j[0] + f[0]) / 2, "J": j[0], "F": f[0]}
    columns |= {"J recall": j[1], "F recall": f[1], "J decay": j[2], "F decay": f[2]}
    found = []
    for name, values in columns.items():
        mean, interval = float(values.mean()), bootstrap_interval(values)
        found.append(Result(name, "tracking", "objects", mean, interval, len(values), "none", 0))
    return found


def bootstrap_interval(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """95 % bootstrap interval of the mean of `values` (n,); None for a single value."""
    if len(values) < 2:
        return None
    drawn = numpy_generator("bootstrap").integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def track(
    encoder: Encoder,
    videos: Sequence[Video],
    options: Tracking | None = None,
    *,
    device: Device = "cpu",
    out: Path | str | None = None,
    batch_size: int = 4,
) -> list[Result]:
    """J&F, J, F, their recall and decay (fractions, over all objects) of `encoder` on `videos`.

    The folder `out` gets the masks found: ``<video>/00000.png`` as the DAVIS evaluation reads them,
    one picture per video under ``sheets/``, and ``objects.csv``. `batch_size` frames at a time
    affect the features by no more than rounding.

    Raises:
        DataError: no object to track, or no annotation to score by and no `out` for the masks.
        NonFiniteError: the encoder returns NaN or infinity.
    """
    options, folder, scores = options or Tracking(), None if out is None else Path(out), []
    if isinstance(encoder, nn.Module):
        encoder.to(device)
    total, done = sum(map(len, videos)), 0
    with evaluating(encoder), Ticker("tracking", total) as ticker:
        for video in videos:
            if len(video) < 3:
                raise DataError(f"{video.name}: {len(video)} frames; first and last are not scored")
            if not video.mask(0).any():
                raise DataError(f"{video.name}: no object to track in the first frame")
            if not video.annotated and folder is None:
                raise DataError(
                    f"{video.name}: only its first frame is annotated, so there is nothing to "
                    "score; use --pictures FOLDER to write the masks found"
                )
            found = []
            for ids in follow(encoder, video, options, device, batch_size):
                found.append(ids)
                ticker.update(done := done + 1, video.name)
            if folder is not None:
                write_masks(folder, video, found)
            scores += score(video, found) if video.annotated else []
    if folder is not None and scores:
        with (folder / "objects.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(HEADINGS)
            table.writerows([s.video, s.number, *summary(s.j), *summary(s.f)] for s in scores)
    return results(scores) if scores else []


def follow(
    encoder: Encoder, video: Video, options: Tracking, device: Device = "cpu", batch_size: int = 4
) -> Iterator[Bytes]:
    """Yields, for every frame of `video`, the object of each pixel, at the size of its mask."""
    mask, patch = video.mask(0), encoder.patch
    size = frame_size(video.frame(0).shape, options, patch)
    grid = size[0] // patch, size[1] // patch
    # A channel for every object, even if it is too small for the grid and thus never found.
    cells = torch.from_numpy(_resize_ids(mask, grid)).long()
    first = F.one_hot(cells, int(mask.max()) + 1).permute(2, 0, 1).float()  # (C, h, w)

    def features() -> Iterator[Tensor]:
        for start in range(0, len(video), batch_size):
            numbers = range(start, min(start + batch_size, len(video)))
            frames = [torch.from_numpy(video.frame(i)).permute(2, 0, 1)[None] for i in numbers]
            # Not antialiased, and rounded, as cv2.resize does.
            frames = [F.interpolate(f.float(), size, mode="bilinear").round() for f in frames]
            pixels = normalise(torch.cat(frames)[..., : grid[0] * patch, : grid[1] * patch])
            if options.compat == "released":
                pixels[:, 0] *= STD[0] / RED
            tokens = encoder(pixels.to(device))
            if not tokens.isfinite().all():
                raise NonFiniteError(
                    f"the encoder gives no finite features for {video.name}; "
                    "was it saved after the loss diverged?"
                )
            extra = tokens.shape[1] - grid[0] * grid[1]  # a class token, which comes first
            if extra not in (0, 1):
                raise ValueError(f"{tokens.shape[1]} tokens for a grid of {grid[0]} x {grid[1]}")
            yield from tokens[:, extra:]

    yield mask
    for soft in propagate_each(features(), first, options):
        yield labels_of(soft, patch, mask.shape)


def frame_size(shape: tuple[int, ...], options: Tracking, patch: int) -> tuple[int, int]:
    """Height and width at which the encoder sees a frame of `shape` (H, W, ...).

    The shorter side is `options.size`, the longer one is rounded down to a multiple of 64, as in
    DINO; then, unless `released`, both are rounded to a multiple of the patch.
    """
    height, width = shape[:2]
    longer = options.size * max(height, width) // min(height, width)
    longer = max(options.size, longer // UNIT * UNIT)
    sides = (longer, options.size) if height > width else (options.size, longer)
    if options.compat == "released":
        return sides
    tall, wide = (max(1, round(side / patch)) * patch for side in sides)
    return tall, wide
