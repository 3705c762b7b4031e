"""Finds near-duplicates: copies of an image that were resized, re-encoded or slightly cropped.

An image is described by the cosine coefficients of a small thumbnail, standardised over the data
set: what all images share, such as a background, is subtracted, and fine structure counts as much
as coarse. The coefficients of a crop are linear in the thumbnail as well, with one matrix per axis.
So each image is described as it is, and as it would be with its edges cut off.

Candidates come from locality-sensitive hashing: two images meet if one of them, or a crop of it,
has the same signs as the other in one of `TABLES` random selections of coefficients. The work grows
with the number of images, not with that of pairs. Candidates are then compared in all coefficients.

Shapes: N images, S = `SIDE`, K = `FREQUENCIES`, V crops (row crops times column crops), D
coefficients.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image

from stopmim.base.random_keys import numpy_generator
from stopmim.data.crops import finite

SIDE = 24  # of a thumbnail; (SIDE, SIDE) uint8 is all that is kept of an image
STRETCH = (1, 99)  # percentiles that become black and white in images that are not pictures
DENSE = 128  # pixels along the shorter side from which a thumbnail is averaged, or up to twice that
FREQUENCIES = 12  # of cosines along an axis
CUT = 0.1  # share of a side that a crop may lack, at one end or both together
SIMILAR = 0.94  # cosine similarity of near-duplicates
ROUGHLY = 0.85  # the same with coarser crops; a pair below it is dropped
FLAT = 3.0  # grey levels of standard deviation below which a thumbnail shows nothing
AVERAGE = 3.0  # grey levels of difference from the mean below which images are alike
PRIOR = 64  # weight of the prior of the statistics, in images
TABLES = 12
BITS = 64  # signs in a hash: those of the lowest frequencies
APART = 12  # most signs in which candidates differ
BUCKET = 32  # most images that a query takes from one table
NEAREST = 8  # most candidates of an image that are compared
BLOCK = 256  # images, or pairs, worked on at a time


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Averages an image (H, W, C) to (S, S) uint8, grey, whatever its aspect ratio."""
    step = max(1, min(pixels.shape[:2]) // DENSE)
    pixels = np.ascontiguousarray(pixels[::step, ::step])
    if pixels.dtype != np.uint8 or pixels.shape[2] != 3:
        pixels = _stretched(pixels)
    image = Image.fromarray(pixels).convert("L")
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))


def _stretched(pixels: np.ndarray) -> np.ndarray:
    """The mean (H, W) of all channels, each from its smallest to its largest value, uint8."""
    values = finite(pixels).astype(np.float64)
    low, high = np.percentile(values, STRETCH, axis=(0, 1))
    grey = ((values - low) / np.where(high > low, high - low, 1)).clip(0, 1)
    return (255 * grey.mean(axis=2) + 0.5).astype(np.uint8)


def near_duplicates(thumbnails: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """Pairs (P, 2) of near-duplicates among `thumbnails` (N, S, S) uint8, each pair once.

    `among` limits the search to some of them. Images that show nothing, such as a white page, are
    like no other.
    """
    among = np.arange(len(thumbnails)) if among is None else among
    parts = [block[thumbnails[block].std(axis=(1, 2)) >= FLAT] for block in _blocks(among)]
    shown = np.concatenate([np.empty(0, np.int64), *parts])
    found = [np.empty((0, 2), np.int64)]
    if len(shown) > 1:
        found.append(_average(thumbnails, shown))
        standard = _standard(thumbnails, shown)
        tables = _tables(thumbnails, shown, standard)
        for block in _blocks(shown):
            pairs, similarity = _candidates(thumbnails, block, standard, tables)
            found.append(pairs[similarity >= SIMILAR])
            for batch in _blocks(pairs[similarity < SIMILAR], BLOCK // 8):
                crops = _describe(thumbnails[batch[:, 0]], _FINE, standard)
                alike = _similarity(crops, thumbnails[batch[:, 1]], standard) >= SIMILAR
                found.append(batch[alike])
    return np.unique(np.sort(np.concatenate(found), axis=1), axis=0)


def _average(thumbnails: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Pairs (P, 2) of images that all look like the mean of the data set.

    If the camera does not move, only noise is left once the mean is subtracted.
    """
    mean = thumbnails.mean(axis=0)
    apart = [np.square(thumbnails[block] - mean).mean(axis=(1, 2)) for block in _blocks(shown)]
    like = shown[np.concatenate(apart) < AVERAGE**2]
    return np.stack([np.broadcast_to(like[:1], like[1:].shape), like[1:]], axis=1)


def join(labels: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Joins groups, given as one label (N,) per image, that a chain of `pairs` (P, 2) connects."""
    root = np.arange(labels.max(initial=-1) + 1)

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]  # halves the way for the next search
        return i

    for a, b in labels[pairs].tolist():
        a, b = sorted((find(a), find(b)))
        root[b] = a
    return np.array([find(i) for i in range(len(root))], np.int64)[labels]


def groups(labels: np.ndarray) -> list[list[int]]:
    """The images of each label that occurs more than once, by their first image."""
    order = np.argsort(labels, kind="stable")
    found = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return sorted(group.tolist() for group in found if len(group) > 1)


# --------------------------------------------------------------------------------- description


def _cosines(step: float) -> np.ndarray:
    """Matrices (V, K, S) from a side of a thumbnail to the cosines of crops of it.

    Crops lack multiples of `step` at either end, up to `CUT` in all; the first lacks nothing.
    """
    ticks = np.arange(0, CUT + step / 2, step)
    cuts = [(a, b) for a in ticks for b in ticks if a + b < CUT + step / 2]
    k = np.arange(1, FREQUENCIES)[:, None]
    matrices = []
    for before, after in cuts:
        # Integrals of cos(pi k x), where x goes from 0 to 1 over the crop, between pixel edges.
        x = ((np.linspace(0, 1, SIDE + 1) - before) / (1 - before - after)).clip(0, 1)
        integral = np.concatenate([x[None], np.sqrt(2) * np.sin(np.pi * k * x) / (np.pi * k)])
        matrices.append(np.diff(integral, axis=1))
    return np.stack(matrices).astype(np.float32)


_COARSE, _FINE = _cosines(CUT / 2), _cosines(CUT / 4)
_RADIUS = np.add.outer(np.arange(FREQUENCIES) ** 2, np.arange(FREQUENCIES) ** 2).ravel()
_ORDER = np.argsort(_RADIUS, kind="stable")
_KEPT = _ORDER[(_RADIUS[_ORDER] > 0) & (_RADIUS[_ORDER] < FREQUENCIES**2)]  # (D,) lowest first


class Standard(NamedTuple):
    """Mean and standard deviation (D,) of coefficients over the data set."""

    mean: np.ndarray
    std: np.ndarray


def _describe(images: np.ndarray, cosines: np.ndarray, standard: Standard | None) -> np.ndarray:
    """Coefficients (N, V * V, D) of all crops of `images` (N, S, S), standardised if asked."""
    n, v = len(images), len(cosines)
    flat = cosines.reshape(v * FREQUENCIES, SIDE)
    both = flat @ images.astype(np.float32) @ flat.T
    both = both.reshape(n, v, FREQUENCIES, v, FREQUENCIES).transpose(0, 1, 3, 2, 4)
    found = both.reshape(n, v * v, FREQUENCIES**2)[:, :, _KEPT]
    return found if standard is None else (found - standard.mean) / standard.std


def _standard(thumbnails: np.ndarray, shown: np.ndarray) -> Standard:
    """Statistics of whole images; of few images mostly the prior, of photographs: 1 / frequency."""
    total, squares = np.zeros((2, len(_KEPT)))
    for block in _blocks(shown):
        found = _describe(thumbnails[block], _COARSE[:1], None)[:, 0].astype(np.float64)
        total += found.sum(axis=0)
        squares += (found**2).sum(axis=0)
    n = len(shown) + PRIOR
    mean = total / n
    variance = (squares + PRIOR * 225 / _RADIUS[_KEPT]) / n - mean**2
    return Standard(mean.astype(np.float32), np.sqrt(variance).astype(np.float32))


def _similarity(crops: np.ndarray, images: np.ndarray, standard: Standard) -> np.ndarray:
    """Cosine similarity (N,) of `images` (N, S, S) and the best of their `crops` (N, V, D)."""
    whole = _describe(images, _COARSE[:1], standard)  # (N, 1, D)
    lengths = np.linalg.norm(crops, axis=2) * np.linalg.norm(whole, axis=2)
    return (np.vecdot(crops, whole) / lengths.clip(min=1e-6)).max(axis=1)


# --------------------------------------------------------------------------------- candidates


class HashTables(NamedTuple):
    """Images by their hashes, in `TABLES` tables with 2**b buckets each."""

    images: np.ndarray  # (N,) numbers of those indexed
    hashes: np.ndarray  # (N,) uint64: signs of the lowest coefficients
    select: np.ndarray  # (BITS, TABLES) float32: powers of two at the b signs of a key, else 0
    order: np.ndarray  # (TABLES, N) positions in `images`, sorted by key
    start: np.ndarray  # (TABLES, 2**b + 1) where in `order` each bucket begins


def _signs(described: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signs (..., BITS) as 0 and 1, float32, and the same as one uint64 each."""
    signs = np.ascontiguousarray(described[..., :BITS] > 0)
    return signs.astype(np.float32), np.packbits(signs, axis=-1).view(np.uint64)[..., 0]


def _tables(thumbnails: np.ndarray, shown: np.ndarray, standard: Standard) -> HashTables:
    # About as many buckets as images. Keys must be exact in float32.
    bits = int(np.clip(np.log2(len(shown)).round(), 8, 20))
    rng = numpy_generator("near-duplicates", 0)
    select = np.zeros((BITS, TABLES), np.float32)
    for table in range(TABLES):
        select[rng.choice(BITS, bits, replace=False), table] = 2.0 ** np.arange(bits)
    keys, hashes = np.empty((TABLES, len(shown)), np.int32), np.empty(len(shown), np.uint64)
    for at in range(0, len(shown), BLOCK):
        block = slice(at, at + BLOCK)
        whole = _describe(thumbnails[shown[block]], _COARSE[:1], standard)[:, 0]
        signs, hashes[block] = _signs(whole)
        keys[:, block] = (signs @ select).T
    order = np.argsort(keys, axis=1, kind="stable").astype(np.int32)
    buckets = np.arange(2**bits + 1)
    start = [np.searchsorted(key[o], buckets) for key, o in zip(keys, order, strict=True)]
    return HashTables(shown, hashes, select, order, np.stack(start).astype(np.int32))


def _candidates(
    thumbnails: np.ndarray, block: np.ndarray, standard: Standard, tables: HashTables
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (P, 2) of an image of `block` and one that may be a copy or a crop of it.

    Also returns their similarities (P,), at least `ROUGHLY`, by a coarse choice of crops.
    """
    crops = _describe(thumbnails[block], _COARSE, standard).reshape(-1, len(_KEPT))
    apart, query, other = _meet(*_signs(crops), tables)
    image = block[query // len(_COARSE) ** 2]
    # Each pair once, with its most similar crop; then the nearest of each image.
    order = np.lexsort((apart, other, image))
    order = order[_first(image[order], other[order]) & (image != other)[order]]
    order = order[np.lexsort((apart[order], image[order]))]
    begin = np.searchsorted(image[order], image[order])
    order = order[np.arange(len(order)) - begin < NEAREST]
    similarity = [np.empty(0, np.float32)]
    for batch in _blocks(order):
        rows = crops.reshape(len(block), -1, len(_KEPT))[query[batch] // len(_COARSE) ** 2]
        similarity.append(_similarity(rows, thumbnails[other[batch]], standard))
    rough = np.concatenate(similarity)
    return np.stack([image, other], axis=1)[order[rough >= ROUGHLY]], rough[rough >= ROUGHLY]


def _meet(signs: np.ndarray, hashes: np.ndarray, tables: HashTables) -> np.ndarray:
    """Looks up signs (Q, BITS) and their hashes (Q,) in all tables.

    Returns (3, P): the number of signs in which they differ, the query, and the image it met.
    """
    found = []
    keys = (signs @ tables.select).T
    for key, order, start in zip(keys, tables.order, tables.start, strict=True):
        bucket = key.astype(np.int32)
        begin, counts = start[bucket], np.minimum(start[bucket + 1] - start[bucket], BUCKET)
        query = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        other = order[begin[query] + within]
        apart = np.bitwise_count(hashes[query] ^ tables.hashes[other])
        near = apart <= APART
        found.append(np.stack([apart[near], query[near], tables.images[other[near]]]))
    return np.concatenate(found, axis=1)


def _first(*columns: np.ndarray) -> np.ndarray:
    """Marks (N,) the first of each run of equal rows."""
    changes = [np.diff(column, prepend=-1) != 0 for column in columns]
    return np.logical_or.reduce(changes)


def _blocks(items: np.ndarray, size: int = BLOCK) -> list[np.ndarray]:
    return [items[i : i + size] for i in range(0, len(items), size)]
