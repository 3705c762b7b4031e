"""Propagates labels from frame to frame by the similarity of features, as DINO does.

Every patch takes the labels of the patches most similar to it in the first frame and in the last
few, within a window (dino eval_video_segmentation.py). Nothing here waits for a GPU.

Shapes: T frames, grids of h x w patches, D features, C channels (background, then the objects), M
frames that labels are taken from; Q patches of a tile that ask, S of one frame near enough to give.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.evals.recipes import Propagation

# Edge of a square of patches processed at once: small tiles multiply least, large ones keep a GPU
# busy. These are the fastest with windows of 25.
TILE, GPU_TILE = 10, 32


class Tile(NamedTuple):
    """A square of patches, the part of a frame within reach of it, and pairs too far apart."""

    rows: slice
    cols: slice
    near_rows: slice
    near_cols: slice
    far: Tensor  # (Q, 1, S): pairs of patches too far apart, the same in all M frames


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
    grid = first.shape[-2], first.shape[-1]
    queue: deque[tuple[Tensor, Tensor]] = deque(maxlen=options.n_last_frames)
    begin, tiles = None, list[Tile]()
    for tokens in features:
        here = F.normalize(tokens.float(), dim=-1).unflatten(0, grid)  # (h, w, D)
        if begin is None:
            begin = (here, first.to(here))
            tiles = list(cut(grid, options.neighbourhood, here.device))
            continue
        # The first frame and the last ones together: a good match may be in any of them.
        sources, labels = (torch.stack(parts) for parts in zip(begin, *queue, strict=True))
        found = torch.empty_like(labels[0])
        for tile in tiles:
            query = here[tile.rows, tile.cols]  # (a, b, D), a * b = Q
            taken = attend(query.flatten(0, 1), sources, labels, tile, options)
            found[:, tile.rows, tile.cols] = taken.unflatten(1, query.shape[:2])
        queue.append((here, found))  # still soft, as the next frames use them
        yield found


def cut(grid: tuple[int, int], reach: int, device: torch.device) -> Iterator[Tile]:
    """Cuts a grid into tiles; all pairs of patches would take up to ten times the work of a CPU.

    Patches more than `reach` rows or columns apart are too far; 0: none is.
    """
    reach, edge = reach or max(grid), GPU_TILE if device.type == "cuda" else TILE

    def along(length: int) -> Iterator[tuple[slice, slice, Tensor]]:
        place = torch.arange(length, device=device)  # on the device: copying would wait for it
        for start in range(0, length, edge):
            part = slice(start, start + edge)
            near = slice(max(0, start - reach), start + edge + reach)
            yield part, near, (place[part, None] - place[near]).abs() > reach

    for down, across in product(along(grid[0]), along(grid[1])):
        far = down[2][:, None, :, None] | across[2][None, :, None, :]  # (a, b, c, d)
        far = far.flatten(2).flatten(0, 1)[:, None]
        yield Tile(down[0], across[0], down[1], across[1], far)


def attend(
    query: Tensor, sources: Tensor, labels: Tensor, tile: Tile, options: Propagation
) -> Tensor:
    """Labels (C, Q) for `query` (Q, D), from `sources` (M, h, w, D) with `labels` (M, C, h, w)."""
    source = sources[:, tile.near_rows, tile.near_cols].flatten(0, 2)  # (M S, D)
    given = labels[:, :, tile.near_rows, tile.near_cols].transpose(0, 1).flatten(1)  # (C, M S)
    like = query @ source.T  # (Q, M S)
    like.unflatten(1, (len(sources), -1)).masked_fill_(tile.far, -torch.inf)
    best = like.topk(min(options.topk, like.shape[1]), dim=1).values  # (Q, topk), falling
    take = take_dense if like.is_cuda else take_sparse
    return take(like, best, given, options.temperature)


# Both are softmax(like / temperature) over the best, times the labels they give. As in the released
# code, ties with the last of them count, so their number is not known in advance.


def take_dense(like: Tensor, best: Tensor, given: Tensor, temperature: float) -> Tensor:
    """(C, Q) by a product with weights that are mostly zero: a GPU need not wait for a count."""
    like = like.masked_fill_(like < best[:, -1:], -torch.inf)
    return given @ like.div_(temperature).softmax(dim=1).T


def take_sparse(like: Tensor, best: Tensor, given: Tensor, temperature: float) -> Tensor:
    """(C, Q) from the few weights that are not zero, in a fraction of the operations."""
    asks, gives = (like >= best[:, -1:]).nonzero(as_tuple=True)
    weight = ((like[asks, gives] - best[asks, 0]) / temperature).exp()
    total = like.new_zeros(len(like)).index_add_(0, asks, weight)
    taken = like.new_zeros(len(given), len(like))
    return taken.index_add_(1, asks, given[:, gives] * (weight / total[asks]))
