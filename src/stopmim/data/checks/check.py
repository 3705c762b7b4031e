"""Reads every image of a data set, and reports problems before hours are spent on training."""

import statistics
import textwrap
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stopmim.base.console import duration
from stopmim.base.errors import DataError, UserError
from stopmim.base.tables import counted
from stopmim.config.schema import Config
from stopmim.data.checks.duplicates import groups
from stopmim.data.checks.facts import Copies, Facts, find_copies, inspect_images
from stopmim.data.checks.hashes import Comparison, compare_content
from stopmim.data.images import Images
from stopmim.data.order import evenly_spaced
from stopmim.data.skip import both_without_skipped, check_writable, without_skipped, write_list
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.sources.scanning import describe_others
from stopmim.data.sources.source import printable
from stopmim.data.subset import underlying, without_loose
from stopmim.method.build import configure

SHOWN = 20  # broken images that are listed
GROUPS = 5  # groups of equal images that are listed
WIDTH = 80
LONGEST = 2  # ratio of the sides above which a square crop loses more than half

Row = tuple[str, str]  # left and right column of the report


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
    near: list[list[str]]  # names of near-duplicates, one of each group of equal images
    long: list[str]  # names and sizes of images that a square crop would lose most of
    others: dict[str, int]  # files that are not read, by extension
    loose: int  # images beside class folders, without a label
    classes: dict[str, list[int]]  # label -> images per class
    ignored: list[str] = field(default_factory=list)  # columns of a list that are no labels
    lost: list[str] = field(default_factory=list)  # files and folders of which images are missing
    channels: list[Row] = field(default_factory=list)  # of images that are not ordinary pictures
    test: "Report | None" = None  # of the test split, if there is one
    refused: str | None = None  # why a test split cannot be opened
    leaked: list[tuple[str, str, bool]] = field(default_factory=list)
    """test images that are also in training: name, name of the training image, whether equal"""
    comparison: Comparison | None = None  # of the content with what was recorded earlier
    listed: bool = False  # whether there is a list of the images to leave out now

    @property
    def problem(self) -> str | None:
        """Reason why these images cannot be used for training or evaluation as they are."""
        changed = self.comparison.problem if self.comparison else None
        own = self._unreadable or self.refused or changed
        return own or (self.test.problem if self.test else None)

    @property
    def only_broken(self) -> bool:
        """Whether leaving out the broken images leaves a usable data set."""
        if self.refused or (self.comparison and self.comparison.problem):
            return False
        return all(split.sides for split in (self, self.test) if split)

    @property
    def test_bad(self) -> list[tuple[str, str]]:
        """Test images to leave out of evaluation, and why."""
        leaked = [
            (name, f"{'the same as' if same else 'nearly the same as'} {train} of training")
            for name, train, same in self.leaked
        ]
        return [*(self.test.bad if self.test else []), *leaked]

    @property
    def _unreadable(self) -> str | None:
        share, limit = len(self.bad) / max(1, self.scanned), self.config.data.max_bad
        if not self.sides:
            none = f"none of the {self.scanned} images scanned can be read"
            return f"{self.source}: {none if self.scanned > 1 else 'its image cannot be read'}"
        if share > limit:
            return (
                f"{self.source}: {len(self.bad)} of {self.scanned} images cannot be read, more "
                f"than the share of {limit:g} that data.max_bad allows; fix or remove them, or "
                f"leave them out: check --fix-list FILE lists them, for pretrain --data.skip FILE "
                f"and eval --skip FILE"
            )
        return None

    @property
    def verdict(self) -> str:
        batch = self.config.optim.batch_size
        if self.listed and self.problem and self.only_broken:
            return "usable without the images on the list"
        if self._unreadable:
            return "not usable: " + ("too many are broken" if self.sides else "none can be read")
        if self.refused:
            return "fit for training, but not for evaluation: the test split cannot be used"
        if self.test and self.test.problem:
            return f"fit for training, but not for evaluation: test split {self.test.verdict}"
        if self.images < batch:
            return f"readable, but too few for one batch of {batch}: set --optim.batch_size lower"
        if self.images * self.config.data.crops_per_image == 1:
            parts = "of a large one, train on parts: --data.crops_per_image"
            return f"readable, but nothing can be learned from a single image; {parts}"
        if self.leaked:
            return "usable, but leave the leaked images out of evaluation: eval --skip FILE"
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
        rows += [("kinds", kinds or "none"), *self.channels]
        rows += [*self._similar(), *broken]
        if self.others:
            rows += [("not read", describe_others(self.others))]
        rows += [("content", self.comparison.said)] if self.comparison else []
        if self.refused:
            rows += [("test", self.refused)]
        if self.test:
            count, labels, broken = self.test._summary()
            rows += [("test", count), *labels, *broken, *self._leakage()]
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
            (
                "labels",
                f"{label}: {counted(len(sizes), 'value')}, {_range(sizes, 'image', ' each')}",
            )
            for label, sizes in self.classes.items()
        ]
        if self.ignored:
            columns = ", ".join(self.ignored)
            labels += [("", f"no labels: {columns}; labels are whole numbers, or named class")]
        if self.loose:
            lie = "lies" if self.loose == 1 else "lie"
            labels += [("", f"{counted(self.loose, 'image')} {lie} beside the class folders: "
                            f"for pretraining only, without a label")]  # fmt: skip
        broken = [("broken", f"{len(self.bad):,} ({len(self.bad) / max(1, self.scanned):.1%})")]
        broken += [("", f"{name}: {reason}") for name, reason in self.bad[:SHOWN]]
        if len(self.bad) > SHOWN:
            broken += [("", f"and {len(self.bad) - SHOWN:,} more; --fix-list FILE writes all")]
        if self.lost:
            broken += [("lost", f"{len(self.lost):,}: incomplete, what is missing is not used")]
            broken += [("", name) for name in self.lost[:SHOWN]]
        if len(self.lost) > SHOWN:
            broken += [("", f"and {len(self.lost) - SHOWN:,} more")]
        count = f"{self.scanned:,}{of} image{'s' * (self.images != 1)} scanned"
        return count, labels, broken

    def _similar(self) -> list[Row]:
        """Rows about copies within this split, and images that do not fit a square."""
        extra = sum(len(group) - 1 for group in self.copies)
        split = "" if self.test else "; remove them before eval --hold-out, which may separate them"
        rows = [("copies", f"{extra:,}: these images are the same{split}" if extra else "none")]
        rows += [("", " = ".join(group[:3])) for group in self.copies[:GROUPS]]
        extra = sum(len(group) - 1 for group in self.near)
        look = f"{extra:,}: these look the same, resized, re-encoded or cropped"
        rows += [("similar", look if extra else "none")]
        rows += [("", " ~ ".join(group[:3])) for group in self.near[:GROUPS]]
        if self.long:
            lose = "loses" if len(self.long) == 1 else "lose"
            rows += [("crop", f"{counted(len(self.long), 'image')} {lose} more than half to the "
                              f"square crop of evaluation")]  # fmt: skip
            rows += [("", name) for name in self.long[:GROUPS]]
        return rows

    def _leakage(self) -> list[Row]:
        """Rows about test images that are also in training."""
        if not self.leaked or not self.test:
            return [("leakage", "none: no test image is a copy of a training image")]
        equal = sum(same for _, _, same in self.leaked)
        of = f"{len(self.leaked):,} of {counted(len(self.test.sides), 'test image')}"
        kinds = f"{equal:,} the same, {len(self.leaked) - equal:,} nearly"
        rows = [("leakage", f"{of} are copies of training images ({kinds}); --fix-list FILE "
                            f"lists them for eval --skip FILE")]  # fmt: skip
        return rows + [
            ("", f"{test} {'=' if same else '~'} {train} of training")
            for test, train, same in self.leaked[:GROUPS]
        ]


def check(
    data: str | Path | Images,
    preset: str | Path | Config,
    changes: dict[str, Any] | None = None,
    *,
    fix_list: Path | None = None,
    limit: int | None = None,
    against: Path | None = None,
) -> Report:
    """Reads the images of `data`, and of its test split, as a run would, on all cores.

    Args:
        preset: the planned training, with `changes` of config keys; sizes are compared with it.
        fix_list: where to write the broken images, for ``--data.skip`` and ``eval --skip``.
        limit: number of images to read of each split, evenly spaced.
        against: a run, or a .jsonl file: compares the content of all images with what was recorded
            there the first time.
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
    splits = [(name, images)] if test is None else [(name, images), (f"{name}, test split", test)]
    read = [_read(images, config, limit) for _, images in splits]
    copies = find_copies([facts for facts, _ in read])
    reports = [
        _report(source, config, images, facts, found, seconds)
        for (source, images), (facts, seconds), found in zip(splits, read, copies, strict=True)
    ]
    comparison = compare_content(images, read[0][0], against) if against else None
    report = replace(reports[0], refused=refused, comparison=comparison)
    if test is not None:
        leaked = _leaked(images, test, [facts for facts, _ in read], copies)
        report = replace(report, test=reports[1], leaked=leaked)
    if fix_list is not None:
        write_list(fix_list, report.bad, report.test_bad)
        report = replace(report, listed=True)
    return report


def _read(images: Images, config: Config, limit: int | None) -> tuple[Facts, float]:
    """Facts about the images, or `limit` of them, and the seconds that this took."""
    numbers = evenly_spaced(len(images), limit or len(images))
    begin, runtime = time.monotonic(), config.runtime
    facts = inspect_images(images, numbers, runtime.workers, runtime.worker_timeout)
    return facts, time.monotonic() - begin


def _report(
    source: str, config: Config, images: Images, facts: Facts, copies: Copies, seconds: float
) -> Report:
    rows, whole, names = facts.rows, underlying(images), getattr(images, "channel_names", None)
    short, long = (f(rows["height"], rows["width"]) for f in (np.minimum, np.maximum))

    def name(row: int) -> str:
        return images.name(int(rows["number"][row]))

    one_each = np.unique(copies.same, return_index=True)[1]
    return Report(
        source=source,
        config=config,
        images=len(images),
        seconds=seconds,
        scanned=len(rows) + len(facts.bad),
        bad=[(images.name(i), reason) for i, reason in facts.bad],
        sides=short.tolist(),
        kinds=facts.kinds,
        copies=[[name(i) for i in group] for group in groups(copies.same)],
        near=[[name(one_each[i]) for i in group] for group in groups(copies.near[one_each])],
        long=[
            f"{name(i)} ({rows['width'][i]}x{rows['height'][i]})"
            for i in np.flatnonzero(long > LONGEST * short).tolist()
        ],
        others=getattr(whole, "others", {}),
        loose=getattr(whole, "loose", 0),
        ignored=getattr(whole, "ignored", []),
        lost=getattr(whole, "unreadable", []),
        channels=facts.channels.rows(names) if facts.channels else [],
        # Not bincount: a label may be any integer, such as -1 or the id of an image.
        classes={
            key: np.unique(label, return_counts=True)[1].tolist()
            for key, label in without_loose(images).labels.items()
        },
    )


def _leaked(
    train: Images, test: Images, facts: list[Facts], copies: list[Copies]
) -> list[tuple[str, str, bool]]:
    """Test images that are also in training, each with one training image that it is a copy of."""
    found = []
    ours, theirs = (one.rows["number"].tolist() for one in facts)
    known = [dict(zip(x[::-1].tolist(), ours[::-1], strict=True)) for x in copies[0]]
    for i, same, near in zip(theirs, *(x.tolist() for x in copies[1]), strict=True):
        twin = known[0].get(same, known[1].get(near))
        if twin is not None:
            found.append((test.name(i), train.name(twin), same in known[0]))
    return found


def _range(values: list[int], noun: str, each: str = "") -> str:
    """The range of `values`, as "6 to 12 images each, median 9"."""
    low, high, median = min(values), max(values), statistics.median(values)
    unit = (noun if noun == "px" or high == 1 else f"{noun}s") + each
    return f"{low:,} {unit}" if low == high else f"{low:,} to {high:,} {unit}, median {median:,.0f}"
