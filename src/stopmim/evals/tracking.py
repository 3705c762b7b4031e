"""Video object segmentation: masks of the first frame, propagated by frozen features.

The protocol is DINO's for DAVIS (dino eval_video_segmentation.py), with propagation.py. The metric
is DAVIS-2017's (davis2017-evaluation): region similarity J and boundary accuracy F of each object,
first and last frame excluded.

Threads read frames and masks ahead; everything else is done on the device, from resizing frames to
J and F. A GPU is waited for once per video.

Shapes: T frames, B of them at a time, grids of h x w patches, C channels (background, then the
objects), H x W pixels.
"""

import csv
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
from stopmim.base.files import replaced
from stopmim.base.random_keys import numpy_generator
from stopmim.data.crops import normalise
from stopmim.data.pixels import STD
from stopmim.data.videos import Video, read_ahead
from stopmim.data.workers import cores
from stopmim.evals.features import Device, evaluating, stats_for
from stopmim.evals.propagation import propagate, propagate_each
from stopmim.evals.recipes import Propagation
from stopmim.evals.regions import (
    boundary_accuracy,
    boundary_f,
    jaccard,
    region_similarity,
    summary,
    write_masks,
)
from stopmim.evals.results import Result
from stopmim.evals.showing import upload
from stopmim.method.encoder import Encoder

__all__ = ["Scores", "Tracking", "boundary_f", "follow", "jaccard", "propagate", "track"]

UNIT = 64  # pixels; the longer side of a frame is a multiple of this (dino, read_frame)
RED = 0.228  # deviation of red in the released code; training divides by 0.229
SCORED = 8  # frames scored at a time: more do not fit the cache of a CPU
LONGEST = 16  # highest ratio of the sides of a frame
MOST_MASKS = 2**27  # most pixels of the masks of all objects of a frame, 64 in 1080p
CHANNELS = 64  # over all frames that become masks at the same time on a CPU
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


def labels_of(soft: Tensor, patch: int, shape: tuple[int, ...]) -> Tensor:
    """Object of every pixel, (B, H, W) uint8, from soft labels (B, C, h, w) of patches."""
    soft = F.interpolate(soft.float(), scale_factor=patch, mode="bilinear")
    low, high = soft.amin(dim=(2, 3), keepdim=True), soft.amax(dim=(2, 3), keepdim=True)
    # Every channel scaled to 0 to 1, background included, so that fading objects are kept.
    soft = torch.where(high > low, (soft - low) / (high - low), soft)
    # The index of `max` is that of argmax, ten times as fast on a CPU.
    return resize_ids(soft.max(dim=1).indices.byte(), shape)


def resize_ids(ids: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Resizes object numbers (..., H, W) to the nearest ones, exactly as Pillow does."""
    for dim, (old, new) in enumerate(zip(ids.shape[-2:], shape, strict=True), -2):
        places = Image.fromarray(np.arange(old, dtype=np.int32)[None])
        nearest = np.array(places.resize((new, 1), Image.Resampling.NEAREST))[0]
        ids = ids.index_select(dim, _upload(nearest, ids.device))
    return ids


def _upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` on the device; a GPU is not waited for."""
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return upload(tensor, device) if device.type == "cuda" else tensor


def score(video: Video, found: Tensor) -> list[Scores]:
    """J and F of every object of the first frame, given the masks found in all frames (T, H, W)."""
    objects, parts = range(1, int(video.mask(0).max()) + 1), []
    for start in range(1, len(video) - 1, SCORED):
        part = slice(start, min(start + SCORED, len(video) - 1))
        masks = {i: video.mask(i) for i in range(part.start, part.stop)}
        if odd := [i for i, mask in masks.items() if mask.shape != found.shape[1:]]:
            size = " x ".join(map(str, masks[odd[0]].shape))
            raise DataError(f"{video.name}: the mask of frame {odd[0]} is of another size, {size}")
        truth = np.stack(list(masks.values()))
        pair = found[part], _upload(truth, found.device)
        for k in objects:
            both = [ids == k for ids in pair]
            parts += [region_similarity(*both), boundary_accuracy(*both)]
    # Every n-th part is of the same object and measure.
    n = 2 * len(objects)
    values = torch.stack([torch.cat(parts[i::n]) for i in range(n)]).cpu().numpy()
    return [Scores(video.name, k, *values[2 * k - 2 : 2 * k]) for k in objects]


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
    precision: torch.dtype | None = None,
    out: Path | str | None = None,
    batch_size: int | None = None,
) -> list[Result]:
    """J&F, J, F, their recall and decay (fractions, over all objects) of `encoder` on `videos`.

    The folder `out` gets the masks found: ``<video>/00000.png`` as the DAVIS evaluation reads them,
    one picture per video under ``sheets/``, and ``objects.csv``.

    Args:
        precision: dtype of autocast, of the encoder only; None is float32, to which tracking also
            falls back once features are beyond the range of `precision`.
        batch_size: frames at a time, 16 on a GPU and 4 elsewhere; affects the features by no more
            than rounding.

    Raises:
        DataError: no object to track, or no annotation to score by and no `out` for the masks.
        NonFiniteError: the encoder returns NaN or infinity.
    """
    options, folder, scores = options or Tracking(), None if out is None else Path(out), []
    for video in videos:
        check(video, scored=folder is None)
    if isinstance(encoder, nn.Module):
        encoder.to(device)
    find = partial(follow, encoder, options=options, device=device, batch_size=batch_size)
    writing = list[Future[None]]()
    with (
        evaluating(encoder),
        ThreadPoolExecutor(cores()) as pool,
        Ticker("tracking", sum(map(len, videos))) as ticker,
    ):
        for video in read_ahead(videos, pool):
            begin = ticker.done
            try:
                found = _gather(find(video, precision=precision), ticker, video.name)
            except NonFiniteError:
                if precision is None:
                    raise
                precision, ticker.done = None, begin
                found = _gather(find(video), ticker, video.name)
            if folder is not None:
                masks = list(found.cpu().numpy())
                writing.append(pool.submit(write_masks, folder, video.video, masks))
            scores += score(video, found) if video.annotated else []
        for task in writing:
            task.result()  # raises an error of the thread
    if folder is not None and scores:
        write_table(folder, scores)
    return results(scores) if scores else []


def _gather(parts: Iterator[Tensor], ticker: Ticker, name: str) -> Tensor:
    """All `parts` in one, (T, H, W)."""
    found = []
    for part in parts:
        found.append(part)
        ticker.update(ticker.done + len(part), name)
    return torch.cat(found)


def check(video: Video, scored: bool) -> None:
    """Raises DataError if `video` cannot be tracked, or cannot be scored and has to be."""
    if len(video) < 3:
        raise DataError(f"{video.name}: {len(video)} frames; first and last are not scored")
    first = video.mask(0)
    if not first.any():
        raise DataError(f"{video.name}: no object to track in the first frame")
    height, width = video.frame(0).shape[:2]
    if max(height, width) > LONGEST * min(height, width):  # it would be resized to a huge one
        raise DataError(f"{video.name}: frames of {width}x{height} are too long to be shown")
    objects = int(first.max())
    if objects * max(height * width, first.size) > MOST_MASKS:
        what = f"masks of {objects} objects in {width}x{height} pixels"
        raise DataError(f"{video.name}: {what} take too long to be compared; use smaller frames")
    if scored and not video.annotated:
        raise DataError(
            f"{video.name}: only its first frame is annotated, so there is nothing to "
            "score; use --pictures FOLDER to write the masks found"
        )


def write_table(folder: Path, scores: Sequence[Scores]) -> None:
    """Writes ``objects.csv``, a line for every object."""
    with (
        replaced(folder / "objects.csv") as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        table = csv.writer(file)
        table.writerow(HEADINGS)
        table.writerows([s.video, s.number, *summary(s.j), *summary(s.f)] for s in scores)


def follow(
    encoder: Encoder,
    video: Video,
    options: Tracking,
    device: Device = "cpu",
    precision: torch.dtype | None = None,
    batch_size: int | None = None,
) -> Iterator[Tensor]:
    """Yields the object of each pixel of all frames, some frames at a time: (B, H, W) uint8.

    They are on the device and of the size of the masks; the first mask is the given one. Arguments
    and errors are those of `track`.
    """
    device = torch.device(device)
    batch_size = batch_size or (16 if device.type == "cuda" else 4)
    mask, patch = _upload(video.mask(0), device), encoder.patch
    size = frame_size(video.frame(0).shape, options, patch)
    grid = size[0] // patch, size[1] // patch
    # A channel for every object, even if it is too small for the grid and thus never found.
    cells, channels = resize_ids(mask, grid).long(), int(video.mask(0).max()) + 1
    first = F.one_hot(cells, channels).permute(2, 0, 1).float()  # (C, h, w)
    finite: list[Tensor] = []  # read once, at the end, on a GPU: reading waits for it

    def features() -> Iterator[Tensor]:
        for start in range(0, len(video), batch_size):
            numbers = range(start, min(start + batch_size, len(video)))
            frames = [_upload(video.frame(i), device).permute(2, 0, 1)[None] for i in numbers]
            # Not antialiased, and rounded, as cv2.resize does.
            frames = [F.interpolate(f.float(), size, mode="bilinear").round() for f in frames]
            whole = torch.cat(frames)[..., : grid[0] * patch, : grid[1] * patch]
            pixels = normalise(whole, stats_for(encoder))
            if options.compat == "released":
                pixels[:, 0] *= STD[0] / RED
            with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
                tokens = encoder(pixels)
            finite.append(tokens.isfinite().all())
            if device.type == "cpu":
                _check_finite(finite, video.name)
            extra = tokens.shape[1] - grid[0] * grid[1]  # a class token, which comes first
            if extra not in (0, 1):
                raise ValueError(f"{tokens.shape[1]} tokens for a grid of {grid[0]} x {grid[1]}")
            yield from tokens[:, extra:]

    yield mask[None]
    labels = propagate_each(features(), first, options)
    # Every channel has the pixels of a frame; a GPU has the memory.
    at_once = batch_size if device.type == "cuda" else max(1, min(batch_size, CHANNELS // channels))
    while part := list(islice(labels, at_once)):
        yield labels_of(torch.stack(part), patch, tuple(mask.shape))
    _check_finite(finite, video.name)


def _check_finite(flags: Sequence[Tensor], name: str) -> None:
    if not torch.stack(list(flags)).all():
        raise NonFiniteError(
            f"the encoder gives no finite features for {name}; "
            "was it saved after the loss diverged?"
        )


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
