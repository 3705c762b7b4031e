"""Facts about images, found by reading each of them once: size, format, digest, thumbnail.

Of images that are not ordinary pictures also the ranges of their channels, empty planes and NaN.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from stopmim.base.console import Ticker
from stopmim.config.data import Kind
from stopmim.data.channels import Form, fitting
from stopmim.data.checks.duplicates import SIDE, join, near_duplicates, thumbnail
from stopmim.data.decode import BadImageError, collect_files, format_of
from stopmim.data.images import Images
from stopmim.data.survey import common_form
from stopmim.data.workers import Watched, batches

CHUNK = 32  # images per answer of a worker
STRIP = 2**25  # bytes of pixels that are hashed at a time
SHOWN = 16  # channels that are listed
SEARCHED = 500_000  # images per split whose thumbnails are kept, 576 bytes each

ROW = np.dtype(
    [
        ("number", np.int64),  # of the image
        ("height", np.int32),
        ("width", np.int32),
        ("digest", "S16"),  # of the file, or of the pixels if there is no file
    ]
)


class ChannelFacts(NamedTuple):
    """Per channel, (C,) each, over all images."""

    images: int
    kind: Kind
    low: np.ndarray  # smallest finite value; infinity if there is none
    high: np.ndarray
    empty: np.ndarray  # images in which the channel is constant
    missing: np.ndarray  # images in which it has NaN or infinity

    @classmethod
    def of(cls, pixels: np.ndarray) -> "ChannelFacts":
        """The facts of one image (H, W, C)."""
        if pixels.dtype.kind == "f":
            known = np.isfinite(pixels)
            missing = ~known.all(axis=(0, 1))
            low = pixels.min(axis=(0, 1), where=known, initial=np.inf)
            high = pixels.max(axis=(0, 1), where=known, initial=-np.inf)
        else:
            low, high = pixels.min(axis=(0, 1)), pixels.max(axis=(0, 1))
            missing = np.zeros(len(low), bool)
        form, empty = Form.of(pixels), low == high
        return cls(1, form.kind, low.astype(float), high.astype(float), empty * 1, missing * 1)

    def joined(self, other: "ChannelFacts") -> "ChannelFacts":
        """The facts of both; the images must have the same channels."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        counts = (getattr(self, x) + getattr(other, x) for x in ("empty", "missing"))
        return ChannelFacts(self.images + other.images, self.kind, low, high, *counts)

    def rows(self, names: Sequence[str] | None) -> list[tuple[str, str]]:
        """Rows of the report of `check`: type, then a line per channel."""
        channels = len(self.low)
        rows = [("channels", str(Form(channels, self.kind)))]
        for c in range(min(channels, SHOWN)):
            name = names[c] if names and len(names) == channels else f"channel {c}"
            rows.append(("", f"{name}: {self._range(c)}{self._troubles(c)}"))
        if channels > SHOWN:
            low, high = self.low[SHOWN:].min(), self.high[SHOWN:].max()
            rows.append(("", f"and {channels - SHOWN} more, {low:g} to {high:g}"))
        return rows

    def _range(self, c: int) -> str:
        if self.low[c] > self.high[c]:
            return "no finite value"
        return f"{self.low[c]:g} to {self.high[c]:g}"

    def _troubles(self, c: int) -> str:
        text = ""
        for count, what in ((self.empty[c], "empty"), (self.missing[c], "with NaN or infinity")):
            if count:
                text += f", {what} in {'all' if count == self.images else f'{count:,}'} images"
        return text


def join_channel_facts(found: Sequence[ChannelFacts | None]) -> ChannelFacts | None:
    """All of them in one; None if there are none, as for ordinary pictures."""
    whole = None
    for one in found:
        if one is not None:
            whole = one if whole is None else whole.joined(one)
    return whole


class Facts(NamedTuple):
    """Facts about the readable images of one split, a row each, and reasons for the others."""

    rows: np.ndarray  # (n,) ROW
    kinds: Counter[str]  # "JPEG RGB", ...
    bad: list[tuple[int, str]]  # image, reason
    searched: np.ndarray  # (m,) rows that have a thumbnail: all, or every k-th
    thumbnails: np.ndarray  # (m, S, S) uint8
    channels: ChannelFacts | None = None  # of images that are not ordinary pictures


def inspect_images(
    images: Images, numbers: Sequence[int], workers: int | None = None, timeout: float = 300.0
) -> Facts:
    """Facts about these images, read by `workers` processes; None: one per core."""
    watched, form = Watched(images, workers, timeout), common_form(images)
    chunks = [list(numbers[i : i + CHUNK]) for i in range(0, len(numbers), CHUNK)]
    every = max(1, -(-len(numbers) // SEARCHED))
    rows, bad, kinds = [np.empty(0, ROW)], list[tuple[int, str]](), Counter[str]()
    small, done, begin = [np.empty((0, SIDE, SIDE), np.uint8)], 0, time.monotonic()
    channels = list[ChannelFacts | None]()
    with Ticker("check", len(numbers)) as ticker:
        for found in batches(partial(look_at, watched, form), chunks, watched):
            before = sum(kinds.values())
            rows.append(found.rows)
            small.append(found.thumbnails[-before % every :: every].copy())
            kinds.update(found.kinds)
            bad += found.bad
            channels.append(found.channels)
            done += CHUNK
            rate = min(done, len(numbers)) / (time.monotonic() - begin)
            ticker.update(min(done, len(numbers)), f"{rate:.0f} images/s")
    thumbnails = np.concatenate(small)
    searched = np.arange(len(thumbnails)) * every
    return Facts(
        np.concatenate(rows), kinds, bad, searched, thumbnails, join_channel_facts(channels)
    )


def look_at(watched: Watched, form: Form, numbers: list[int]) -> Facts:
    """Facts about these images, read in this process."""
    channels = list[ChannelFacts | None]()
    rows, bad, kinds, small = [], [], Counter[str](), [np.empty((0, SIDE, SIDE), np.uint8)]
    for number in numbers:
        with collect_files() as files:
            try:
                pixels = fitting(watched.read(number), form)
            except BadImageError as error:
                bad.append((number, str(error)))
                continue
        kinds[format_of(files[-1]) if files else "pixels"] += 1
        rows.append((number, *pixels.shape[:2], _digest(files[-1] if files else pixels)))
        small.append(thumbnail(pixels)[None])
        channels.append(None if form.is_rgb else ChannelFacts.of(pixels))
        del pixels  # before the next ones are read
    thumbnails = np.concatenate(small)
    every, whole = np.arange(len(thumbnails)), join_channel_facts(channels)
    return Facts(np.array(rows, ROW), kinds, bad, every, thumbnails, whole)


def _digest(data: bytes | np.ndarray) -> bytes:
    """The start of the sha256 of a file, or of the pixels of an array in the order H, W, C."""
    digest = hashlib.sha256()
    if isinstance(data, bytes):
        digest.update(data)
    else:
        rows = max(1, STRIP // max(1, data[:1].nbytes))  # planes are copied to be in that order
        for top in range(0, len(data), rows):
            digest.update(np.ascontiguousarray(data[top : top + rows]).data.cast("B"))
    return digest.digest()[:16]


class Copies(NamedTuple):
    """Groups of images of one split, as a label per row; equal labels also across splits."""

    same: np.ndarray  # (n,) the same file, or the same pixels
    near: np.ndarray  # (n,) the same, resized, re-encoded or slightly cropped


def find_copies(splits: Sequence[Facts]) -> list[Copies]:
    """Finds copies within and across splits."""
    lengths = [len(facts.rows) for facts in splits]
    starts = np.cumsum([0, *lengths])
    digests = np.concatenate([facts.rows["digest"] for facts in splits])
    _, same = np.unique(digests, return_inverse=True)
    searched = np.concatenate([f.searched + at for f, at in zip(splits, starts, strict=False)])
    thumbnails = np.concatenate([facts.thumbnails for facts in splits])
    _, first = np.unique(same[searched], return_index=True)  # one of each: a million copies are one
    near = join(same, searched[near_duplicates(thumbnails, first)])
    ends = starts[1:-1]
    return [Copies(*both) for both in zip(np.split(same, ends), np.split(near, ends), strict=True)]
