"""Parquet files with images in the schema of Hugging Face: a column of struct{bytes, path}."""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from stopmim.data.arrays import label_name
from stopmim.data.decode import BadImageError, decode
from stopmim.data.folder import printable
from stopmim.errors import DataError, UserError

CACHE_BYTES = 2**28  # of row groups, in each process; at least one is kept
MAX_GROUP = 2**31  # bytes: the least that can be read at a time
MAX_WINDOW = 16_384  # samples that the order of an epoch mixes at a time


class Parquet:
    """The images of Parquet files, in the order of the files and of their rows.

    A row group is the least that can be read; each process keeps those it used last. `window`, what
    the order mixes at a time, is chosen so that they suffice: half of `CACHE_BYTES`.

    Attributes:
        labels: every integer column without gaps; "label" and "labels" are called "class".
        classes: names of "class", if the schema has them.
        fingerprint: sha256 of names and sizes of the files, and rows and bytes of their row groups.
        unreadable: files that could not be used, and why.
        chunks: where each row group begins.
    """

    def __init__(self, files: Sequence[str]) -> None:
        arrow, parquet = _pyarrow(files[0])
        self.files = list[str]()
        self.unreadable = list[str]()
        self.classes = list[str]()
        self._column = ""
        self._groups = list[tuple[int, int]]()  # number of a file, number of a row group in it
        self._cached: OrderedDict[int, Any] = OrderedDict()
        rows, volume, labels, digest = (
            list[int](),
            0,
            list[dict[str, np.ndarray]](),
            hashlib.sha256(),
        )
        for path in map(os.path.abspath, files):
            name = printable(os.path.basename(path))
            try:
                with parquet.ParquetFile(path) as file:
                    schema, about = file.schema_arrow, file.metadata
                    column, numbers = _columns(arrow, schema)
                    table = file.read(columns=numbers, use_threads=False) if numbers else None
            except (arrow.ArrowException, OSError) as error:
                self.unreadable.append(f"{name}: {' '.join(str(error).split())[:100]}")
                continue
            if not column or column != (self._column or column):
                raise DataError(
                    f"{name}: no column {self._column or 'of images'}; looked for struct<bytes: "
                    f"binary, path: string>, got {', '.join(schema.names)[:200]}"
                )
            self._column = column
            self.classes = self.classes or _class_names(schema)
            digest.update(
                b"%b\0%d\n" % (os.fsencode(os.path.basename(path)), os.stat(path).st_size)
            )
            for g in range(about.num_row_groups):
                group = about.row_group(g)
                if group.total_byte_size > MAX_GROUP:
                    raise DataError(
                        f"{name}: row group {g} has {group.total_byte_size} bytes; "
                        f"write the file again with row_group_size=100"
                    )
                digest.update(b"%d %d\n" % (group.num_rows, group.total_byte_size))
                self._groups.append((len(self.files), g))
                rows.append(group.num_rows)
                volume += group.total_byte_size
            self.files.append(path)
            labels.append(
                {
                    label_name(c): table.column(c).to_numpy().astype(np.int64)
                    for c in numbers
                    if table.column(c).null_count == 0
                }
            )
        self.chunks = np.cumsum([0, *rows])
        if not len(self):
            lost = f" ({self.unreadable[0]})" if self.unreadable else ""
            raise DataError(f"{printable(files[0])}: no images in {len(files)} Parquet files{lost}")
        self.window = int(min(MAX_WINDOW, max(1, CACHE_BYTES // 2 // max(1, volume // len(self)))))
        self.fingerprint = digest.hexdigest()
        common = set.intersection(*map(set, labels))
        self.labels = {k: np.concatenate([one[k] for one in labels]) for k in sorted(common)}

    def __len__(self) -> int:
        return int(self.chunks[-1])

    def __getstate__(self) -> dict[str, Any]:  # for a spawned process, which reads its own
        return self.__dict__ | {"_cached": OrderedDict()}

    def read(self, i: int) -> np.ndarray:
        """Pixels of image `i`, (H, W, 3) uint8."""
        group, row = self._place(i)
        value = self._read_group(group)[row].as_py()
        data = value and value["bytes"]
        if data is None:
            raise BadImageError("no bytes; a path alone is not followed")
        return decode(data)

    def name(self, i: int) -> str:
        """File and row."""
        file = self._groups[self._place(i)[0]][0]
        first = next(j for j, (f, _) in enumerate(self._groups) if f == file)
        return f"{printable(os.path.basename(self.files[file]))} row {i - int(self.chunks[first])}"

    def _place(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        group = int(np.searchsorted(self.chunks, i, side="right")) - 1
        return group, i - int(self.chunks[group])

    def _read_group(self, group: int) -> Any:
        if group in self._cached:
            self._cached.move_to_end(group)
            return self._cached[group]
        number, g = self._groups[group]
        arrow, parquet = _pyarrow(self.files[number])
        try:
            # One thread: the pool of threads of a parent does not live on in a forked worker.
            with parquet.ParquetFile(self.files[number], pre_buffer=False) as file:
                columns = [f"{self._column}.bytes"]
                table = file.read_row_group(g, columns=columns, use_threads=False)
        except (arrow.ArrowException, OSError) as error:
            raise BadImageError(" ".join(str(error).split())[:100]) from None
        held = self._cached[group] = table.column(self._column)
        while len(self._cached) > 1 and sum(c.nbytes for c in self._cached.values()) > CACHE_BYTES:
            self._cached.popitem(last=False)
        return held


def _pyarrow(source: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f'{printable(source)}: Parquet needs pyarrow: pip install "stopmim[shards]"'
        ) from None
    return pyarrow, pyarrow.parquet


def _columns(arrow: Any, schema: Any) -> tuple[str, list[str]]:
    """Names of the first column of images ("" if there is none) and of all integer columns."""
    types = arrow.types
    images = [
        field.name
        for field in schema
        if types.is_struct(field.type)
        and any(
            child.name == "bytes"
            and (types.is_binary(child.type) or types.is_large_binary(child.type))
            for child in field.type
        )
    ]
    return next(iter(images), ""), [f.name for f in schema if types.is_integer(f.type)]


def _class_names(schema: Any) -> list[str]:
    """Of the ClassLabel that becomes "class", from what `datasets` writes beside the schema."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"][
            "features"
        ]
        return next(
            [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if label_name(column) == "class" and feature.get("_type") == "ClassLabel"
        )
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
        return []
