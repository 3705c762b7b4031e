"""Objects of the first frame, followed through a video by the similarity of frozen features.

The protocol is DINO's for DAVIS (dino eval_video_segmentation.py): every patch takes the labels of
the patches most like it in the first frame and in the last few, within a window. The metric is that
of DAVIS-2017 (davis2017-evaluation): region similarity J and boundary accuracy F of each object,
the first and the last frame left out.

Shapes: T frames, grids of h x w patches, D features, C channels (background, then the objects), M
frames that labels are taken from, H x W pixels.
"""

import csv
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from stopmim.base.console import Ticker
from stopmim.base.errors import DataError, NonFiniteError, UserError
from stopmim.base.random_keys import numpy_generator
from stopmim.data.crops import STD, normalise
from stopmim.data.videos import Bytes, Video
from stopmim.evals.features import evaluating
from stopmim.evals.regions import boundary_f, jaccard, summary, write
from stopmim.evals.results import Result
from stopmim.method.encoder import Encoder

__all__ = ["Scores", "Tracking", "boundary_f", "follow", "jaccard", "propagate", "track"]

TILE = 10  # edge of a square of patches that ask at once: the fastest, with windows of 25
UNIT = 64  # pixels; the longer side of a frame is a multiple of it (dino, read_frame)
RED = 0.228  # deviation of red in the released code; training divides by 0.229
RESAMPLES = 10_000  # of the bootstrap


@dataclass(frozen=True)
class Tracking:
    """All that can be set; the defaults are DINO's.

    With `compat` None a frame is resized to whole patches, so that a cell of the result lies where
    its patch is. With "released" it is not: the patches leave out a margin at the right and at the
    bottom, over which the result is then stretched. They differ for patch 14, not for 8 or 16.
    "released" also divides red by 0.228, where training does by 0.229.
    """

    size: int = 480  # pixels of the shorter side of a frame
    n_last_frames: int = 7  # that labels are taken from, besides the first one
    neighbourhood: int = 12  # patches in each direction that labels may come from; 0: any
    topk: int = 5  # patches that a patch takes its labels from
    temperature: float = 0.1  # of their softmax
    compat: Literal["released"] | None = None

    def __post_init__(self) -> None:
        least = {"size": 1, "n_last_frames": 0, "neighbourhood": 0, "topk": 1, "temperature": 1e-6}
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise UserError(
                    f"tracking: {name} must be {low} or more, got {getattr(self, name)}"
                )
        if self.compat not in (None, "released"):
            raise UserError(f'tracking: compat must be "released" or none, got {self.compat!r}')


class Scores(NamedTuple):
    """J and F of one object in every frame that counts, each (T - 2,)."""

    video: str
    number: int
    j: NDArray[np.float64]
    f: NDArray[np.float64]


# --------------------------------------------------------------------------------- propagation


def propagate(features: Iterable[Tensor], first: Tensor, options: Tracking | None = None) -> Tensor:
    """Soft labels (T - 1, C, h, w) of all frames but the first.

    Args:
        features: for each of T frames the features (h * w, D) of its patches, row by row.
        first: labels of the first frame, (C, h, w), one-hot.
    """
    found = list(spread(features, first, options or Tracking()))
    return torch.stack(found) if found else first.new_empty(0, *first.shape)


def spread(features: Iterable[Tensor], first: Tensor, options: Tracking) -> Iterator[Tensor]:
    """The same, one frame (C, h, w) after the other."""
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
        queue.append((here, found))  # soft, as they are: the next frames take them on
        yield found


def _attend(here: Tensor, sources: Tensor, labels: Tensor, options: Tracking) -> Tensor:
    """Labels (C, h, w) for `here` (h, w, D), from `sources` (M, h, w, D) with (M, C, h, w).

    A square of patches at a time, against the part of the sources that their windows cover: all
    against all would take up to ten times the work, and memory in the square of the patches.
    """
    height, width, _ = here.shape
    reach = options.neighbourhood or max(height, width)
    found = torch.empty_like(labels[0])
    for top, left in product(range(0, height, TILE), range(0, width, TILE)):
        rows, cols = _span(top, height, TILE, 0), _span(left, width, TILE, 0)
        near_rows, near_cols = _span(top, height, TILE, reach), _span(left, width, TILE, reach)
        query = here[rows, cols]  # (a, b, D), against (M, c, d, D)
        source = sources[:, near_rows, near_cols]
        given = labels[:, :, near_rows, near_cols].transpose(0, 1).flatten(1)  # (C, M c d)
        like = query.flatten(0, 1) @ source.flatten(0, 2).T  # (a b, M c d)
        # (a, b, c, d): who is too far from whom, in whichever frame
        far_down, far_right = _far(rows, near_rows, reach), _far(cols, near_cols, reach)
        far = (far_down[:, None, :, None] | far_right[None, :, None, :]).flatten(2).flatten(0, 1)
        like.unflatten(1, (len(sources), -1)).masked_fill_(far[:, None].to(like.device), -torch.inf)
        best = like.topk(min(options.topk, like.shape[1]), dim=1).values
        # All that equal the last of the best count, as in the released code; few do, so sparsely.
        asks, gives = (like >= best[:, -1:]).nonzero(as_tuple=True)
        weight = ((like[asks, gives] - best[asks, 0]) / options.temperature).exp()
        total = like.new_zeros(len(like)).index_add_(0, asks, weight)
        taken = like.new_zeros(len(given), len(like))
        taken.index_add_(1, asks, given[:, gives] * (weight / total[asks]))
        found[:, rows, cols] = taken.view(-1, *query.shape[:2])
    return found


def _span(start: int, end: int, length: int, reach: int) -> slice:
    """From `start`, `length` and `reach` more either way, but not beyond 0 and `end`."""
    return slice(max(0, start - reach), min(end, start + length + reach))


def _far(some: slice, others: slice, reach: int) -> Tensor:
    """Which of the `others` are more than `reach` away from which of `some`, (some, others)."""
    a, b = (torch.arange(span.start, span.stop) for span in (some, others))
    return (a[:, None] - b).abs() > reach


def labels_of(soft: Tensor, patch: int, shape: tuple[int, ...]) -> Bytes:
    """The object of every pixel of `shape` (H, W), from soft labels (C, h, w) of patches."""
    soft = F.interpolate(soft[None].float(), scale_factor=patch, mode="bilinear")[0]
    low, high = soft.amin(dim=(1, 2), keepdim=True), soft.amax(dim=(1, 2), keepdim=True)
    # Each channel from 0 to 1, the background too: an object that fades is not swallowed by it.
    soft = torch.where(high > low, (soft - low) / (high - low), soft)
    ids = soft.argmax(dim=0).to(torch.uint8)
    return _resize_ids(ids.cpu().numpy(), shape)


def _resize_ids(ids: Bytes, shape: tuple[int, ...]) -> Bytes:
    height, width = shape
    return np.array(Image.fromarray(ids).resize((width, height), Image.Resampling.NEAREST))


# ------------------------------------------------------------------------------------- results


def score(video: Video, found: Sequence[Bytes]) -> list[Scores]:
    """J and F of every object of the first frame, given the objects found in all T frames."""
    truth = [video.mask(i) for i in range(1, len(video) - 1)]
    objects = range(1, int(video.mask(0).max()) + 1)
    pairs = list(zip(found[1:-1], truth, strict=True))
    return [
        Scores(
            video.name,
            k,
            np.array([jaccard(a == k, b == k) for a, b in pairs]),
            np.array([boundary_f(a == k, b == k) for a, b in pairs]),
        )
        for k in objects
    ]


def results(scores: Sequence[Scores]) -> list[Result]:
    """Means over all objects of all videos, each with its interval over objects."""
    j = np.array([summary(s.j) for s in scores])  # (n, 3): mean, recall, decay
    f = np.array([summary(s.f) for s in scores])
    columns = {"J&F": (j[:, 0] + f[:, 0]) / 2, "J": j[:, 0], "F": f[:, 0]}
    for i, what in ((1, "recall"), (2, "decay")):
        columns |= {f"J {what}": j[:, i], f"F {what}": f[:, i]}
    return [
        Result(
            name=name,
            protocol="tracking",
            label="objects",
            value=float(values.mean()),
            interval=bootstrap_interval(values),
            n=len(values),
            selection="none",
            seed=0,
        )
        for name, values in columns.items()
    ]


def bootstrap_interval(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """95 % of the means of `values` (n,) drawn again with replacement; None for a single one."""
    if len(values) < 2:
        return None
    drawn = numpy_generator("bootstrap").integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


# ------------------------------------------------------------------------------------- videos


def track(
    encoder: Encoder,
    videos: Sequence[Video],
    options: Tracking | None = None,
    *,
    device: torch.device | str = "cpu",
    out: Path | str | None = None,
    batch_size: int = 4,
) -> list[Result]:
    """J&F, J, F, their recall and decay (fractions, over all objects) of `encoder` on `videos`.

    Args:
        device: where the encoder is.
        out: folder for what was found: ``<video>/00000.png`` as the DAVIS evaluation reads them, a
            picture of each video under ``sheets/``, and ``objects.csv``.
        batch_size: frames at a time; changes the features by no more than rounding.

    Raises:
        DataError: nothing to follow, or nothing to compare with and no `out` for what was found.
        NonFiniteError: the encoder answers with NaN or infinity.
    """
    options, folder, scores = options or Tracking(), None if out is None else Path(out), []
    total, done = sum(map(len, videos)), 0
    with evaluating(encoder), Ticker("tracking", total) as ticker:
        for video in videos:
            _check(video, folder)
            found = []
            for ids in follow(encoder, video, options, device=device, batch_size=batch_size):
                found.append(ids)
                done += 1
                ticker.update(done, video.name)
            if folder is not None:
                write(folder, video, found)
            scores += score(video, found) if video.annotated else []
    if folder is not None and scores:
        _write_table(folder / "objects.csv", scores)
    return results(scores) if scores else []


def _check(video: Video, folder: Path | None) -> None:
    if len(video) < 3:
        raise DataError(f"{video.name}: {len(video)} frames, and the first and last do not count")
    if not video.mask(0).any():
        raise DataError(f"{video.name}: no object in the first frame to follow")
    if not video.annotated and folder is None:
        raise DataError(f"{video.name}: only its first frame is annotated, nothing to score by")


def follow(
    encoder: Encoder,
    video: Video,
    options: Tracking,
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 4,
) -> Iterator[Bytes]:
    """For every frame of `video` the object of each pixel, of the size of the first mask."""
    mask, patch = video.mask(0), encoder.patch
    size = frame_size(video.frame(0).shape, options, patch)
    grid = size[0] // patch, size[1] // patch
    # A channel for every object, even one that falls through the grid: it is found nowhere.
    cells = torch.from_numpy(_resize_ids(mask, grid)).long()
    first = F.one_hot(cells, int(mask.max()) + 1).permute(2, 0, 1).float()  # (C, h, w)

    def features() -> Iterator[Tensor]:
        for start in range(0, len(video), batch_size):
            numbers = range(start, min(start + batch_size, len(video)))
            frames = [resize_frame(video.frame(i), size) for i in numbers]
            pixels = normalise(torch.stack(frames)[..., : grid[0] * patch, : grid[1] * patch])
            if options.compat == "released":
                pixels[:, 0] *= STD[0] / RED
            tokens = encoder(pixels.to(device))
            if not tokens.isfinite().all():
                raise NonFiniteError(
                    f"the encoder gives no finite features for {video.name}; "
                    "was it saved after the loss blew up?"
                )
            yield from tokens[:, class_tokens(tokens.shape[1], grid) :]

    yield mask
    for soft in spread(features(), first, options):
        yield labels_of(soft, patch, mask.shape)


def frame_size(shape: tuple[int, ...], options: Tracking, patch: int) -> tuple[int, int]:
    """Pixels (height, width) of a frame of `shape` (H, W, ...) as the encoder sees it.

    The shorter side as asked for, the longer one rounded down to a multiple of 64, as DINO has it;
    then, unless `released`, both to the nearest multiple of the patch.
    """
    height, width = shape[:2]
    longer = options.size * max(height, width) // min(height, width)
    longer = max(options.size, longer // UNIT * UNIT)
    sides = (longer, options.size) if height > width else (options.size, longer)
    if options.compat == "released":
        return sides
    tall, wide = (max(1, round(side / patch)) * patch for side in sides)
    return tall, wide


def resize_frame(frame: Bytes, size: tuple[int, int]) -> Tensor:
    """(3, *size) float32: bilinear without antialiasing, whole numbers, as cv2.resize has them."""
    pixels = torch.from_numpy(frame).permute(2, 0, 1)[None].float()
    return F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)[0].round()


def class_tokens(length: int, grid: tuple[int, int]) -> int:
    """How many of `length` tokens come before those of the grid: a class token, or none."""
    extra = length - grid[0] * grid[1]
    if extra not in (0, 1):
        raise ValueError(f"{length} tokens for a grid of {grid[0]} x {grid[1]} patches")
    return extra


def _write_table(path: Path, scores: Sequence[Scores]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["video", "object", "J", "J recall", "J decay", "F", "F recall", "F decay"])
        for s in scores:
            table.writerow([s.video, s.number, *summary(s.j), *summary(s.f)])
