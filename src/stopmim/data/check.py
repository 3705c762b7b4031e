"""Reads every image of a data set before hours are spent on training, and reports problems."""

import hashlib
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stopmim.base.console import Ticker, duration
from stopmim.base.errors import DataError, UserError
from stopmim.config.schema import Config
from stopmim.data.decode import BadImageError, collect_files, format_of
from stopmim.data.images import Images
from stopmim.data.skip import both_without_skipped, check_writable, without_skipped, write_list
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.sources.source import printable
from stopmim.data.workers import Watched, batches
from stopmim.method.build import configure

SHOWN = 20  # broken images that are listed
GROUPS = 5  # groups of equal images that are listed
WIDTH = 80
CHUNK = 32  # images per answer of a worker

Row = tuple[str, str]  # left and right column of the report


class ImageFacts(NamedTuple):
    """Result of reading one image."""

    reason: str | None  # why it cannot be used
    height: int = 0
    width: int = 0
    kind: str = ""  # "JPEG RGB", ...
    digest: bytes = b""  # of the file, or of the pixels if there is no file


@dataclass(frozen=True)
class Report:
    """Findings of `check`; `text` is for people, `problem` is None if the images are usable."""

    source: str
    config: Config
    images: int  # in the data set
    seconds: float
    scanned: int
    bad: list[tuple[str, str]]  # name, reason
    sides: list[int]  # shorter side of every readable image
    kinds: Counter[str]
    copies: list[list[str]]  # names of equal images
    classes: dict[str, list[int]]  # label -> images per class
    test: "Report | None" = None  # of the test split, if there is one
    refused: str | None = None  # why a test split cannot be opened

    @property
    def problem(self) -> str | None:
        """Why these images cannot be used for training or evaluation as they are."""
        return self._unreadable or self.refused or (self.test.problem if self.test else None)

    @property
    def _unreadable(self) -> str | None:
        share, limit = len(self.bad) / max(1, self.scanned), self.config.data.max_bad
        if not self.sides:
            return f"{self.source}: none of the {self.scanned} images scanned can be read"
        if share > limit:
            return (
                f"{self.source}: {len(self.bad)} of {self.scanned} images cannot be read, more "
                f"than the share of {limit:g} that data.max_bad allows; fix or remove them, or "
                f"leave them out: stopmim check --fix-list FILE, then pretrain --data.skip FILE "
                f"and eval --skip FILE"
            )
        return None

    @property
    def verdict(self) -> str:
        batch = self.config.optim.batch_size
        if self._unreadable:
            return "not usable: " + ("too many are broken" if self.sides else "none can be read")
        if self.refused:
            return "fit for training, but not for evaluation: the test part cannot be used"
        if self.test and self.test.problem:
            return f"fit for training, but not for evaluation: test part {self.test.verdict}"
        if self.images < batch:
            return f"readable, but too few for one batch of {batch}: set --optim.batch_size lower"
        if self.bad or (self.test and self.test.bad):
            return (
                "usable: training replaces broken images by others, chosen by the seed; "
                "evaluation needs eval --skip FILE to leave them out"
            )
        return "usable" if self.scanned == self.images else "usable, as far as scanned"

    def text(self) -> str:
        """Formats the report for a terminal of 80 columns."""
        count, labels, broken = self._summary()
        rows = [("", f"{count} in {duration(self.seconds)}"), *labels]
        if self.sides:
            size = self.config.image_size
            rows += [("size", f"shorter side {_range(self.sides, 'px')}")]
            small = sum(side < size for side in self.sides) / len(self.sides)
            rows += [("", f"{small:.1%} below the {size} px that training takes")]
        kinds = ", ".join(f"{n:,} {name}" for name, n in self.kinds.most_common())
        rows += [("kinds", kinds or "none")]
        extra = sum(len(group) - 1 for group in self.copies)
        rows += [("copies", f"{extra:,}: these images are the same" if extra else "none")]
        rows += [("", " = ".join(group[:3])) for group in self.copies[:GROUPS]]
        rows += broken
        if self.refused:
            rows += [("test part", self.refused)]
        if self.test:
            count, labels, broken = self.test._summary()
            rows += [("test part", count), *labels, *broken]
        rows += [("verdict", self.verdict)]
        wrap = textwrap.TextWrapper(
            WIDTH, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
        )
        lines = [self.source]
        for name, text in rows:
            wrap.initial_indent = f"  {name:10}"
            lines += wrap.wrap(text)
        return "\n".join(lines)

    def _summary(self) -> tuple[str, list[Row], list[Row]]:
        """The number of images, rows about labels, and rows about broken images."""
        of = "" if self.scanned == self.images else f" of {self.images:,}"
        labels = [
            ("labels", f"{label}: {len(sizes):,} with {_range(sizes, 'images each')}")
            for label, sizes in self.classes.items()
        ]
        broken = [("broken", f"{len(self.bad):,} ({len(self.bad) / max(1, self.scanned):.1%})")]
        broken += [("", f"{name}: {reason}") for name, reason in self.bad[:SHOWN]]
        if len(self.bad) > SHOWN:
            broken += [("", f"and {len(self.bad) - SHOWN:,} more; --fix-list FILE writes all")]
        return f"{self.scanned:,}{of} images scanned", labels, broken


def check(
    data: str | Path | Images,
    preset: str | Path | Config,
    changes: dict[str, Any] | None = None,
    *,
    fix_list: Path | None = None,
    limit: int | None = None,
) -> Report:
    """Reads the images of `data`, and of its test split, as a run would, on all cores.

    Args:
        preset: the planned training, with `changes` of config keys; sizes are compared with it.
        fix_list: where to write the broken images, for ``--data.skip`` and ``eval --skip``.
        limit: number of images to read of each split, evenly spaced.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: at least one image has to be scanned")
    if fix_list is not None:
        check_writable(fix_list)  # before minutes are spent
    config = configure(preset, changes)
    skip = config.data.skip
    if fix_list and skip and fix_list.resolve() == Path(skip).resolve():
        raise UserError(
            f"--fix-list {fix_list}: data.skip reads this list, which would be overwritten; name "
            f"another file"
        )
    images, test, refused = open_images(data), None, None
    try:
        test = open_test(data)
    except DataError as error:
        refused = str(error)
    if test is None:
        images = without_skipped(images, skip)
    else:
        images, test = both_without_skipped(images, test, skip)
    name = printable(str(data)) if isinstance(data, str | Path) else "images"
    report = _report(name, config, images, limit)
    part = None if test is None else _report(f"{name}, test part", config, test, limit)
    report = replace(report, refused=refused, test=part)
    if fix_list is not None:
        write_list(fix_list, report.bad, report.test.bad if report.test else [])
    return report


def _report(source: str, config: Config, images: Images, limit: int | None) -> Report:
    count = min(limit or len(images), len(images))
    numbers = np.linspace(0, len(images) - 1, count).round().astype(int).tolist()
    begin, runtime = time.monotonic(), config.runtime
    found = inspect_images(images, numbers, runtime.workers, runtime.worker_timeout)
    pairs = list(zip(numbers, found, strict=True))
    good = [(i, facts) for i, facts in pairs if facts.reason is None]
    by_digest: dict[bytes, list[int]] = {}
    for i, facts in good:
        by_digest.setdefault(facts.digest, []).append(i)
    return Report(
        source=source,
        config=config,
        images=len(images),
        seconds=time.monotonic() - begin,
        scanned=count,
        bad=[(images.name(i), facts.reason) for i, facts in pairs if facts.reason is not None],
        sides=[min(facts.height, facts.width) for _, facts in good],
        kinds=Counter(facts.kind for _, facts in good),
        copies=[[images.name(i) for i in group] for group in by_digest.values() if len(group) > 1],
        # Not bincount: a label may be any integer, such as -1 or the id of an image.
        classes={
            name: np.unique(label, return_counts=True)[1].tolist()
            for name, label in images.labels.items()
        },
    )


def inspect_images(
    images: Images, numbers: Sequence[int], workers: int | None = None, timeout: float = 300.0
) -> list[ImageFacts]:
    """Facts about these images, read by `workers` processes; None: one per core."""
    watched = Watched(images, workers, timeout)
    chunks = [list(numbers[i : i + CHUNK]) for i in range(0, len(numbers), CHUNK)]
    found: list[ImageFacts] = []
    begin = time.monotonic()
    with Ticker("check", len(numbers)) as ticker:
        for facts in batches(partial(_inspect, watched), chunks, watched):
            found += facts
            rate = len(found) / (time.monotonic() - begin)
            ticker.update(len(found), f"{rate:.0f} images/s")
    return found


def _inspect(watched: Watched, numbers: list[int]) -> list[ImageFacts]:
    found = []
    for number in numbers:
        with collect_files() as files:
            try:
                pixels = watched.read(number)
            except BadImageError as error:
                found.append(ImageFacts(str(error)))
                continue
        data = files[-1] if files else np.ascontiguousarray(pixels).tobytes()
        height, width = pixels.shape[:2]
        kind = format_of(data) if files else "pixels"
        found.append(ImageFacts(None, height, width, kind, hashlib.sha256(data).digest()))
    return found


def _range(values: list[int], unit: str) -> str:
    median = statistics.median(values)
    return f"{min(values):,} to {max(values):,} {unit}, median {median:,.0f}"
