"""Facts about images, found by reading each of them once: size, format, digest, thumbnail.

Of images that are not ordinary pictures also the ranges of their channels, empty planes and NaN.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial, reduce
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
_NO_THUMBNAIL = np.empty((0, SIDE, SIDE), np.uint8)


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


class Facts(NamedTuple):
    """Facts about the readable images of one split, a row each, and reasons for the others."""

    rows: np.ndarray  # (n,) ROW
    kinds: Counter[str]  # "JPEG RGB", ...
    bad: list[tuple[int, str]]  # image, reason
    thumbnails: np.ndarray  # (m, S, S) uint8
    channels: ChannelFacts | None  # of images that are not ordinary pictures
    every: int = 1  # one of so many rows has a thumbnail


def _joined(parts: Sequence[Facts], every: int = 1) -> Facts:
    channels = [part.channels for part in parts if part.channels]
    return Facts(
        np.concatenate([np.empty(0, ROW), *(part.rows for part in parts)]),
        sum((part.kinds for part in parts), Counter[str]()),
        [entry for part in parts for entry in part.bad],
        np.concatenate([_NO_THUMBNAIL, *(part.thumbnails for part in parts)]),
        reduce(ChannelFacts.joined, channels) if channels else None,
        every,
    )


def inspect_images(
    images: Images, numbers: Sequence[int], workers: int | None = None, timeout: float = 300.0
) -> Facts:
    """Facts about these images, read by `workers` processes; None: one per core."""
    watched, form = Watched(images, workers, timeout), common_form(images)
    chunks = [list(numbers[i : i + CHUNK]) for i in range(0, len(numbers), CHUNK)]
    every = max(1, -(-len(numbers) // SEARCHED))
    found, rows, done, begin = list[Facts](), 0, 0, time.monotonic()
    with Ticker("check", len(numbers)) as ticker:
        for facts in batches(partial(look_at, watched, form), chunks, watched):
            kept = facts.thumbnails[-rows % every :: every].copy()  # else all of them would stay
            rows += len(facts.rows)
            found.append(facts._replace(thumbnails=kept))
            done = min(done + CHUNK, len(numbers))
            ticker.update(done, f"{done / (time.monotonic() - begin):.0f} images/s")
    return _joined(found, every)


def look_at(watched: Watched, form: Form, numbers: list[int]) -> Facts:
    """Facts about these images, read in this process."""
    return _joined([_look(watched, form, number) for number in numbers])


def _look(watched: Watched, form: Form, number: int) -> Facts:
    with collect_files() as files:
        try:
            pixels = fitting(watched.read(number), form)
        except BadImageError as error:
            empty = np.empty(0, ROW)
            return Facts(empty, Counter(), [(number, str(error))], _NO_THUMBNAIL, None)
    row = (number, *pixels.shape[:2], _digest(files[-1] if files else pixels))
    kinds = Counter([format_of(files[-1]) if files else "pixels"])
    channels = None if form.is_rgb else ChannelFacts.of(pixels)
    return Facts(np.array([row], ROW), kinds, [], thumbnail(pixels)[None], channels)


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
    rows = (np.arange(len(f.thumbnails)) * f.every for f in splits)  # that have a thumbnail
    searched = np.concatenate([row + at for row, at in zip(rows, starts, strict=False)])
    thumbnails = np.concatenate([facts.thumbnails for facts in splits])
    _, first = np.unique(same[searched], return_index=True)  # one of each: a million copies are one
    near = join(same, searched[near_duplicates(thumbnails, first)])
    ends = starts[1:-1]
    return [Copies(*both) for both in zip(np.split(same, ends), np.split(near, ends), strict=True)]
