"""Parquet files with images in the schema of Hugging Face: a column of struct{bytes, path}."""

import contextlib
import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stopmim.base.errors import DataError, UserError
from stopmim.base.files import open_to_read
from stopmim.data import index_cache as cache
from stopmim.data.decode import BadImageError, one_line
from stopmim.data.rasters.raster import Stored
from stopmim.data.remote.cache import RemoteFiles
from stopmim.data.sources.arrays import label_name
from stopmim.data.sources.parquet_pages import unpacked
from stopmim.data.sources.shards import Shards, find_shards, names_shards
from stopmim.data.sources.source import MAX_EXPANDED, MAX_SHARD, Source, printable

CACHE_BYTES = 2**28  # of row groups, per process; at least one is kept
MAX_GROUP = 2**31  # bytes of a row group, which is read whole
PART, MOST_PARTS = 2**26, 10_000  # bytes, if all rows were as large as the group; and parts
GLANCE = 4  # images that are looked at
MAX_WINDOW = 16_384  # images that the order of an epoch mixes at a time


class Contents(NamedTuple):  # metadata and labels of one file
    column: str  # that holds the images
    classes: list[str]
    groups: list[tuple[int, int]]  # rows and bytes of each row group
    labels: dict[str, np.ndarray]


class RowGroup(NamedTuple):  # that was read
    column: Any  # its images: all, or those before `problem`
    nbytes: int
    problem: str = "missing from its row group"


class Parquet(Shards):
    """The images of Parquet files, in the order of the files and of their rows.

    A row group is the smallest unit of reading; each process keeps the most recent ones. Half of
    `CACHE_BYTES` holds the `window` of images that the order of an epoch mixes at a time.
    Labels are the integer columns without nulls. Damaged files are ignored, as `unreadable`.
    """

    label_hint = "add a column of integers called label, without nulls"

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__(files)
        self.unreadable, where = list[str](), self._places
        arrow, _ = _pyarrow(where[0])
        self._cached: OrderedDict[int, RowGroup] = OrderedDict()
        found, numbers, digest = list[Contents](), list[int](), hashlib.sha256()
        for i, (path, name) in enumerate(zip(where, self._file_names, strict=True)):
            try:
                contents, size = _known_contents(self.files, i)
            except (arrow.ArrowException, OSError, BadImageError) as error:
                self.unreadable.append(f"{name}: {one_line(error)}")
                continue
            found.append(contents)
            numbers.append(i)
            digest.update(b"%b\0%d\n" % (os.fsencode(os.path.basename(path)), size))
            for group in contents.groups:
                digest.update(b"%d %d\n" % group)
        groups = [
            (i, g) for i, one in zip(numbers, found, strict=True) for g in range(len(one.groups))
        ]
        self._groups = np.array(groups, np.int64).reshape(-1, 2)  # file, row group in it
        self.chunks = np.cumsum([0, *(rows for one in found for rows, _ in one.groups)])
        if not len(self):
            lost = f" ({self.unreadable[0]})" if self.unreadable else ""
            raise DataError(f"{printable(where[0])}: no images in {len(files)} Parquet files{lost}")
        self.fingerprint = digest.hexdigest()
        self._column = found[0].column
        if other := [one.column for one in found if one.column != self._column]:
            raise DataError(
                f"{printable(where[0])}: images are in column {self._column}, in another file in "
                f"column {other[0]}; these are not parts of one data set"
            )
        self.classes = found[0].classes
        common = set.intersection(*(set(one.labels) for one in found))
        self.labels = {k: np.concatenate([one.labels[k] for one in found]) for k in sorted(common)}
        bytes_each = max(1, sum(n for one in found for _, n in one.groups) // len(self))
        self.detect_form(printable(files[0]), [b""] * min(GLANCE, int(self.chunks[1])))
        self.window = min(MAX_WINDOW, max(1, CACHE_BYTES // 2 // bytes_each))

    def __getstate__(self) -> dict[str, Any]:  # a spawned process reads its own
        return self.__dict__ | {"_cached": OrderedDict()}

    def _data(self, i: int) -> bytes:
        group = self._chunk(i)
        held, row = self._read_group(group), i - int(self.chunks[group])
        if row >= len(held.column):
            raise BadImageError(held.problem)
        value = held.column[row].as_py()
        data = value and value["bytes"]
        if data is None:
            raise BadImageError("no bytes; a path alone is not followed")
        return data

    def _glance(self, i: int) -> Stored:
        """One of the first images, without the rest of their row group."""
        file, number = self._groups[0].tolist()
        _, parquet = _pyarrow(self.files[file])
        columns = [f"{self._column}.bytes"]
        with parquet.ParquetFile(self.files[file], pre_buffer=False) as opened:
            _check_pages(self.files[file], opened.metadata, [number], columns)
            few = opened.iter_batches(GLANCE, [number], columns, use_threads=False)
            return Stored(next(few).column(0)[i].as_py()["bytes"] or b"")

    def file_of(self, numbers: np.ndarray) -> np.ndarray:
        return self._groups[super().file_of(numbers), 0]

    def name(self, i: int) -> str:
        file = self._groups[self._chunk(i), 0]
        first = np.searchsorted(self._groups[:, 0], file)  # row group of the file
        return f"{self._file_names[file]} row {i - self.chunks[first]}"

    def _read_group(self, group: int) -> RowGroup:
        if group in self._cached:
            self._cached.move_to_end(group)
            return self._cached[group]
        file, number = self._groups[group].tolist()
        arrow, parquet = _pyarrow(self._file_names[file])
        try:
            with parquet.ParquetFile(self.files[file], pre_buffer=False) as opened:
                column = f"{self._column}.bytes"
                size = _check_pages(self.files[file], opened.metadata, [number], [column])
                self._cached[group] = _read(opened, number, column, arrow, size)
        except (arrow.ArrowException, OSError) as error:
            raise BadImageError(one_line(error)) from None
        except BadImageError as error:
            # Not read again for each of its images.
            self._cached[group] = RowGroup((), 0, str(error))
        while len(self._cached) > 1 and sum(h.nbytes for h in self._cached.values()) > CACHE_BYTES:
            self._cached.popitem(last=False)
        return self._cached[group]


def _check_pages(path: str, about: Any, groups: Sequence[int], columns: Sequence[str]) -> int:
    """Bytes of the pages of these columns; refuses what a small file can claim, but not hold."""
    size, chunks = os.stat(path).st_size, list[tuple[Any, int]]()
    for group in map(about.row_group, groups):
        every = map(group.column, range(group.num_columns))
        chunks += [(chunk, group.num_rows) for chunk in every if chunk.path_in_schema in columns]
    total, largest = unpacked(path, chunks)
    # Unpacked, a page is held twice.
    if total > min(MAX_GROUP, MAX_EXPANDED + 4 * size) or largest > MAX_EXPANDED // 2 + 4 * size:
        raise BadImageError(f"{total} bytes of pages, the largest of {largest}, in {size}")
    return total


def _read(opened: Any, number: int, column: str, arrow: Any, size: int) -> RowGroup:
    """The images of a row group, read in parts: a dictionary may have one for all rows.

    `size`: bytes of its pages. What it says of itself may be a lie.
    """
    about = opened.metadata.row_group(number)
    size = max(1, size, about.total_byte_size)
    rows = max(1, PART // size, about.num_rows // MOST_PARTS)
    parts, total = list[Any](), 0
    try:
        # One thread: a forked worker does not inherit the thread pool of its parent.
        for batch in opened.iter_batches(rows, [number], [column], use_threads=False):
            parts.append(batch.column(0))
            total += parts[-1].nbytes
            if total > max(CACHE_BYTES, size + size // 4):
                problem = f"more than {total} bytes of images in a row group of {size}"
                return RowGroup(arrow.chunked_array(parts), total, problem)
    except (arrow.ArrowException, OSError) as error:
        return RowGroup((), 0, one_line(error))  # not read again for each of its images
    return RowGroup(arrow.chunked_array(parts), total)


def _pyarrow(source: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f'{printable(source)}: Parquet needs pyarrow: pip install "stopmim[shards]"'
        ) from None
    return pyarrow, pyarrow.parquet


@contextlib.contextmanager
def parquet_file(
    file: Any, labels: Sequence[str], classes: Sequence[str]
) -> Iterator[Callable[[list[dict[str, Any]], dict[str, np.ndarray]], None]]:
    """Writes a Parquet file: yields a function that adds a row group of images and labels.

    The label "class" becomes the column "label", with the names of its values, as `datasets` does.
    """
    arrow, parquet = _pyarrow("pack")
    columns = {name: "label" if name == "class" else name for name in labels}
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    for name, column in columns.items():
        named = {"names": list(classes), "_type": "ClassLabel"}
        is_named = name == "class" and bool(classes)
        features[column] = named if is_named else {"dtype": "int64", "_type": "Value"}
    about = json.dumps({"info": {"features": features}})
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    fields = [("image", image), *((column, arrow.int64()) for column in columns.values())]
    schema = arrow.schema(fields, metadata={"huggingface": about})
    # Images are compressed already, and nobody looks for the smallest of them.
    options = {"compression": "none", "write_statistics": False, "use_dictionary": False}
    with parquet.ParquetWriter(file, schema, **options) as writer:

        def write(images: list[dict[str, Any]], values: dict[str, np.ndarray]) -> None:
            arrays = [arrow.array(images, image), *(arrow.array(values[n]) for n in columns)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))

        yield write


def _known_contents(files: Sequence[str], i: int) -> tuple[Contents, int]:
    """Contents and size of a file; of a remote one they are kept, so that it is read once."""
    if not isinstance(files, RemoteFiles):
        with open_to_read(files[i], MAX_SHARD) as file:
            size = os.fstat(file.fileno()).st_size
        return _read_contents(files[i], size), size
    remote = files.remotes[i]
    key, size = json.dumps([remote.url, *remote.state]).encode(), remote.about.size
    if (kept := cache.load("parquet", key)) is not None:
        column, classes = json.loads(kept["about"].tobytes())
        groups = [(int(rows), int(most)) for rows, most in kept["groups"]]
        labels = {k.removeprefix("label "): v for k, v in kept.items() if k.startswith("label ")}
        return Contents(column, classes, groups, labels), size
    found = _read_contents(files[i], size)
    arrays = {f"label {name}": values for name, values in found.labels.items()}
    arrays["about"] = np.frombuffer(json.dumps([found.column, found.classes]).encode(), np.uint8)
    arrays["groups"] = np.array(found.groups, np.int64).reshape(-1, 2)
    cache.store("parquet", key, arrays)
    return found, size


def _read_contents(path: str, size: int) -> Contents:
    arrow, parquet = _pyarrow(path)
    types, name = arrow.types, printable(os.path.basename(path))

    def holds_images(kind: Any) -> bool:
        at = kind.get_field_index("bytes") if types.is_struct(kind) else -1
        return at >= 0 and kind[at].type in (arrow.binary(), arrow.large_binary())

    with parquet.ParquetFile(path, pre_buffer=False) as file:
        schema, about = file.schema_arrow, file.metadata
        if twice := [field for field, n in Counter(schema.names).items() if n > 1]:
            raise DataError(f"{name}: two columns are called {printable(twice[0])[:200]}")
        images = [field.name for field in schema if holds_images(field.type)]
        if not images:
            raise DataError(
                f"{name}: no column of images; looked for struct<bytes: binary, path: string>, "
                f"got {printable(', '.join(schema.names))[:200]}"
            )
        numbers = [field.name for field in schema if types.is_integer(field.type)]
        # A column of one value takes no room in the file, but eight bytes a row in memory, twice.
        rows = sum(about.row_group(g).num_rows for g in range(about.num_row_groups))
        expanded = 16 * rows * (len(numbers) + 1)
        if expanded > max(MAX_EXPANDED, 4 * size):
            what = f"{rows} rows of {len(numbers)} numbers in a file of {size} bytes"
            raise DataError(f"{name}: {what}; STOPMIM_MAX_BYTES={expanded} allows it")
        for group in range(about.num_row_groups if numbers else 0):
            _check_pages(path, about, [group], numbers)
        table = file.read(columns=numbers, use_threads=False)
    groups = [about.row_group(g) for g in range(about.num_row_groups)]
    sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    # Images hardly compress: what expands a lot is no image.
    if (vast := max((n for _, n in sizes), default=0)) > min(MAX_GROUP, MAX_EXPANDED + 4 * size):
        advice = "rewrite the file with row_group_size=100"
        raise DataError(f"{name}: a row group of {vast} bytes; {advice}")
    whole = [column for column in numbers if table.column(column).null_count == 0]
    labels = {label_name(c): table.column(c).to_numpy().astype(np.int64, copy=False) for c in whole}
    return Contents(images[0], _class_names(schema), sizes, labels)


def _class_names(schema: Any) -> list[str]:
    """Names of the ClassLabel that becomes "class", from the metadata that `datasets` writes."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return next(
            [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if label_name(column) == "class" and feature["_type"] == "ClassLabel"
        )
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration, RecursionError):
        return []


PARQUET = Source(
    "parquet",
    lambda text, split: Parquet(find_shards(text, ".parquet", split)),
    suffix=".parquet",
    recognise=lambda text: names_shards(text, ".parquet"),
)
