"""Packs any source of images into tar or Parquet shards, with an index and checksums.

The same images and options give the same bytes, whatever the number of processes. A shard is
written whole or not at all, so that a pack that was stopped continues where it was.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from stopmim._version import __version__
from stopmim.base.console import Ticker, say
from stopmim.base.errors import DataError, RunInUseError, StorageError, UserError
from stopmim.base.files import read_regular, replaced, sweep, write_whole
from stopmim.base.random_keys import numpy_generator
from stopmim.config.schema import MOST_WORKERS
from stopmim.data.encode import Encoded, FileEncoder
from stopmim.data.images import Images
from stopmim.data.sources.open import keep_outside, open_images, open_test
from stopmim.data.sources.packed import FORMAT, INDEX, Index, PackedShard
from stopmim.data.sources.parquet import parquet_file
from stopmim.data.sources.tar import WINDOW
from stopmim.data.workers import Watched, batches

ShardFormat = Literal["tar", "parquet"]

CHUNK = 16  # images per answer of a worker
SAMPLE = 64  # images whose sizes predict how many fill a shard
PLAN, LOCK = ".pack.json", ".pack.lock"
GROUP = 100  # rows per row group of Parquet, the unit of reading
SHOWN = 3  # unreadable images that are named


class Plan(NamedTuple):
    """Everything that determines the bytes of the shards."""

    kind: ShardFormat
    size: int | None
    quality: int | None  # None without `size`: nothing is re-encoded
    shard_mib: int
    shuffle: bool
    fingerprints: dict[str, str]  # of the images, by split
    per_shard: dict[str, int]  # images, by split; empty until a sample of them is measured


def pack(
    data: str | Path | Images,
    out: str | Path,
    *,
    kind: ShardFormat = "tar",
    size: int | None = None,
    quality: int = 90,
    shard_mib: int = 256,
    shuffle: bool | None = None,
    workers: int | None = None,
) -> Index:
    """Writes the images of `data`, and of its test split, to shards in the folder `out`.

    Args:
        size: makes larger images smaller, so that their shorter side has this many pixels.
        quality: of the JPEGs that `size` writes, 1 to 100.
        shard_mib: about how large a shard becomes.
        shuffle: the order of an epoch mixes neighbours only, so shards sorted by class are mixed
            badly; by default images are shuffled if there are more than the order mixes freely.
        workers: processes that read and encode; by default one per core.
    """
    for name, value in (("size", size), ("shard-mib", shard_mib)):
        if value is not None and value < 1:
            raise UserError(f"pack: --{name} {value}: expected 1 or more")
    if workers is not None and not 0 <= workers <= MOST_WORKERS:
        raise UserError(f"pack: --workers {workers}: expected 0 to {MOST_WORKERS}")
    if not 1 <= quality <= 100:
        raise UserError(f"pack: --quality {quality}: expected 1 to 100")
    folder = Path(out)
    keep_outside(folder, data)
    images, test = open_images(data), open_test(data)
    splits = {"": images} if test is None else {"train": images, "test": test}
    with _claimed(folder):
        parts = {
            split: FileEncoder(Watched(one, workers, 300.0, "--workers "), size, quality)
            for split, one in splits.items()
        }
        mixed = max(map(len, splits.values())) > WINDOW if shuffle is None else shuffle
        prints = {split: one.fingerprint for split, one in splits.items()}
        wanted = Plan(kind, size, quality if size else None, shard_mib, mixed, prints, {})
        plan = _planned(folder, wanted, parts)
        total = sum(map(len, splits.values()))
        with Ticker("pack", total) as ticker:
            packing = Packing(folder, plan, ticker)
            shards = [made for split, part in parts.items() for made in packing.shards(split, part)]
        index = _index(plan, images, shards)
        write_whole(folder / INDEX, json.dumps(index.model_dump(), indent=1) + "\n")
        for name in (PLAN, *(f".{shard.name}.json" for shard in shards)):
            (folder / name).unlink(missing_ok=True)
    if lost := packing.lost:
        named = "; ".join(lost[:SHOWN])
        say(f"{len(lost)} of {total:,} images cannot be read and are left out: {named}")
    return index


def _index(plan: Plan, images: Images, shards: list[PackedShard]) -> Index:
    return Index(
        format=FORMAT,
        stopmim=__version__,
        kind=plan.kind,
        size=plan.size,
        quality=plan.quality,
        shuffled=plan.shuffle,
        fingerprints=plan.fingerprints,
        classes=getattr(images, "classes", []),
        channel_names=getattr(images, "channel_names", []),
        shards=shards,
    )


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Creates `folder` and keeps other packs out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise StorageError(f"{folder}: cannot write here: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sweep(folder)
        yield
        (folder / LOCK).unlink()
    except BlockingIOError:
        raise RunInUseError(f"{folder}: another `stopmim pack` is writing here") from None
    finally:
        os.close(file)


def _planned(folder: Path, wanted: Plan, parts: dict[str, FileEncoder]) -> Plan:
    """`wanted`, completed by a sample of the images, or by the unfinished pack in `folder`."""
    if (begun := _begun(folder)) is not None:
        wanted = wanted._replace(per_shard=begun.per_shard)
        pairs = zip(Plan._fields, begun, wanted, strict=True)
        if different := [(name, old, new) for name, old, new in pairs if old != new]:
            name, old, new = different[0]
            raise UserError(
                f"{folder}: holds an unfinished pack with another {name}: {old!r}, now {new!r}; "
                f"choose another --out, or remove this folder"
            )
        return wanted
    if any(folder.glob("*.tar")) or any(folder.glob("*.parquet")) or (folder / INDEX).exists():
        raise UserError(f"{folder}: holds shards already; choose another --out")
    each = {split: _per_shard(part, wanted.shard_mib) for split, part in parts.items()}
    plan = wanted._replace(per_shard=each)
    write_whole(folder / PLAN, json.dumps(plan._asdict()))
    return plan


def _begun(folder: Path) -> Plan | None:
    try:
        plan = Plan(**json.loads(read_regular(folder / PLAN)))
        return plan if all(int(each) > 0 for each in plan.per_shard.values()) else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _per_shard(part: FileEncoder, mib: int) -> int:
    """Number of images that fill a shard, estimated from an evenly spaced sample."""
    total = len(part.images)
    numbers = np.linspace(0, total - 1, min(SAMPLE, total)).astype(int).tolist()
    sizes = [len(one.data) for one in part(numbers) if not one.reason]
    if not sizes:
        first = part.images.name(0)
        raise DataError(f"none of {len(numbers)} images can be read, first {first}")
    return max(1, round(mib * 2**20 * len(sizes) / sum(sizes)))


class Packing:
    """Progress of a pack, and the images that it could not read."""

    def __init__(self, folder: Path, plan: Plan, ticker: Ticker) -> None:
        self.folder, self.plan, self.ticker = folder, plan, ticker
        self.lost = list[str]()  # names of images that cannot be read, and why
        self.began, self.read = time.monotonic(), 0

    def shards(self, split: str, part: FileEncoder) -> Iterator[PackedShard]:
        """Yields every shard of a split, existing and new ones."""
        keys, each, total = _keys(part.images), self.plan.per_shard[split], len(part.images)
        order = numpy_generator("pack").permutation(total) if self.plan.shuffle else range(total)
        for k, start in enumerate(range(0, total, each)):
            numbers = [int(i) for i in order[start : start + each]]
            name = f"{split}-{k:05}.{self.plan.kind}" if split else f"{k:05}.{self.plan.kind}"
            path, record = self.folder / name, self.folder / f".{name}.json"
            done, before = self.ticker.done, len(self.lost)
            if (known := _recorded(record, path)) is not None:
                made, lost = known
                self.lost += lost
            else:
                made = _write(path, split, part.images, keys, self._files(part, numbers))
                write_whole(record, json.dumps([made.model_dump(), self.lost[before:]]))
            self.ticker.update(done + len(numbers))
            yield made

    def _files(self, part: FileEncoder, numbers: list[int]) -> Iterator[Encoded]:
        """Yields the readable images of `numbers` as files, in this order."""
        chunks = [numbers[i : i + CHUNK] for i in range(0, len(numbers), CHUNK)]
        for found in batches(part, chunks, part.watched):
            self.read += len(found)
            rate = self.read / (time.monotonic() - self.began)
            self.ticker.update(self.ticker.done + len(found), f"{rate:.0f} images/s")
            bad = [one for one in found if one.reason]
            self.lost += [f"{part.images.name(one.number)}: {one.reason}" for one in bad]
            yield from (one for one in found if not one.reason)


def _recorded(record: Path, shard: Path) -> tuple[PackedShard, list[str]] | None:
    """The record of a shard that an earlier call wrote and that is still there, or None."""
    try:
        about, lost = json.loads(read_regular(record))
        made = PackedShard.model_validate(about)
        return (made, lost) if shard.stat().st_size == made.bytes else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _keys(images: Images) -> list[str]:
    """A name without an extension for each image, all different.

    As in WebDataset, a sample is named up to the first dot: a.1.jpg and a.2.jpg would be one.
    """
    keys, taken = list[str](), set[str]()
    for i in range(len(images)):
        *folders, base = images.name(i).lstrip("/").split("/")
        stem = base.rpartition(".")[0] or base
        parts = [*("__" if part == ".." else part for part in folders), stem.replace(".", "_")]
        key = "/".join(parts)
        while key in taken:
            key = f"{key}~{i}"
        taken.add(key)
        keys.append(key)
    return keys


def _write(
    path: Path, split: str, images: Images, keys: list[str], files: Iterable[Encoded]
) -> PackedShard:
    """Writes one shard, or nothing."""
    with replaced(path) as temporary:
        with temporary.open("wb") as file:
            write = _write_tar if path.suffix == ".tar" else _write_parquet
            count = write(file, images, keys, files)
            file.flush()
            os.fsync(file.fileno())
        with temporary.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        size = temporary.stat().st_size
    about = {"name": path.name, "split": split, "images": count, "bytes": size}
    return PackedShard.model_validate(about | {"sha256": digest})


def _write_tar(file: Any, images: Images, keys: list[str], files: Iterable[Encoded]) -> int:
    """Writes a member per image and per label, without times and owners, which would differ."""
    label, count = images.labels.get("class"), 0
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for one in files:
            add(f"{keys[one.number]}.{one.extension}", one.data)
            if label is not None:
                add(f"{keys[one.number]}.cls", str(int(label[one.number])).encode())
            count += 1
    return count


def _write_parquet(file: Any, images: Images, keys: list[str], files: Iterable[Encoded]) -> int:
    """Writes a row per image, with all its labels, in the schema of Hugging Face."""
    files, count = iter(files), 0
    with parquet_file(file, sorted(images.labels), getattr(images, "classes", [])) as write:
        while rows := list(islice(files, GROUP)):
            write(*_columns(rows, images, keys))
            count += len(rows)
    return count


def _columns(
    rows: list[Encoded], images: Images, keys: list[str]
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    numbers = [one.number for one in rows]
    labels = {name: label[numbers] for name, label in images.labels.items()}
    return [{"bytes": x.data, "path": f"{keys[x.number]}.{x.extension}"} for x in rows], labels
