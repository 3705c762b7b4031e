"""``index.json`` beside shards, as `stopmim pack` writes it: their contents and checksums."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stopmim._version import __version__
from stopmim.base.console import Ticker
from stopmim.base.errors import DataError
from stopmim.base.files import open_to_read
from stopmim.data.sources.source import MAX_SHARD, printable, read_bytes

INDEX = "index.json"
FORMAT = 1
MAX_INDEX = 2**28  # bytes; a million shards need as much


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class PackedShard(_Strict):
    name: str  # of the file, in the folder of the index
    split: Literal["", "train", "test"]  # "" if the source has no splits
    images: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Index(_Strict):
    """Contents of the shards in a folder."""

    format: int
    stopmim: str
    kind: Literal["tar", "parquet"]
    size: int | None  # longest shorter side; None: images are as they were
    quality: int | None  # of the JPEGs that were re-encoded
    shuffled: bool  # not in the order of the source
    fingerprints: dict[str, str]  # of the images that were packed, by split
    classes: list[str]  # names of the values of the label "class"
    channel_names: list[str] = []
    shards: list[PackedShard]


def read_index(folder: str | Path) -> Index | None:
    """The index in `folder`; None if there is none."""
    path = Path(folder, INDEX)
    try:
        if path.stat().st_size > MAX_INDEX:
            raise DataError(f"{printable(path)}: more than {MAX_INDEX} bytes; not an index")
    except OSError:
        return None
    return parse_index(read_bytes(path), printable(path))


def parse_index(data: bytes, name: str) -> Index | None:
    """The index in `data`; None if the file is not one of `stopmim pack`."""
    if b'"sha256"' not in data or b'"stopmim"' not in data:
        return None
    try:
        index = Index.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"not an index as `stopmim pack` writes it: {where}: {first['msg']}"
        raise DataError(f"{name}: {printable(what)}") from None
    if index.format > FORMAT:
        raise DataError(
            f"{name}: format {index.format}, made by stopmim {printable(index.stopmim)}; this is "
            f"{__version__}: upgrade stopmim"
        )
    if outside := [
        shard.name for shard in index.shards if os.path.basename(shard.name) != shard.name
    ]:
        raise DataError(f"{name}: {printable(outside[0])}: not a file of this folder")
    # Each would be read and hashed as often as it is listed, and its images counted twice.
    for shard, times in Counter(shard.name for shard in index.shards).most_common(1):
        if times > 1:
            raise DataError(f"{name}: {printable(shard)}: listed {times} times; pack again")
    return index


def problems(folder: str | Path, index: Index) -> Iterator[str]:
    """Reads every byte of the shards in `folder`, and yields a line per damaged shard."""

    def look(shard: PackedShard) -> str:
        path = Path(folder, shard.name)
        name = printable(path)
        try:
            with open_to_read(path, MAX_SHARD) as file:
                if (size := os.fstat(file.fileno()).st_size) != shard.bytes:
                    return f"{name}: {size} bytes, the index says {shard.bytes}"
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{name}: {error.strerror}"
        return "" if found == shard.sha256 else f"{name}: other bytes than the index says"

    # Hashing leaves Python's lock: threads use all cores.
    with Ticker("verify", len(index.shards)) as ticker, ThreadPoolExecutor() as pool:
        for done, problem in enumerate(pool.map(look, index.shards), 1):
            ticker.update(done, f"{index.shards[done - 1].name}")
            if problem:
                yield problem


def verify_shards(folder: str | Path) -> Index:
    """Raises DataError unless the shards in `folder` are those that were packed."""
    index = read_index(folder)
    if index is None:
        what = f"no {INDEX} of `stopmim pack` in this folder; nothing to verify against"
        raise DataError(f"{printable(folder)}: {what}")
    if found := list(problems(folder, index)):
        more = f" (and {len(found) - 1} more shards)" if found[1:] else ""
        raise DataError(f"{found[0]}{more}; pack again, or copy the shards again")
    return index
