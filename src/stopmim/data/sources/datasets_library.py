"""Data sets of the `datasets` library: a folder that it wrote, or a name on the Hugging Face Hub.

Its tables are memory-mapped. Nothing is executed: data sets that are Python scripts are refused.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from stopmim.base.errors import DataError, UserError
from stopmim.base.files import open_to_read
from stopmim.data.decode import BadImageError, decode, one_line
from stopmim.data.images import stamp_files
from stopmim.data.sources.arrays import label_name
from stopmim.data.sources.folder import TEST_NAMES
from stopmim.data.sources.source import (
    MAX_SHARD,
    Source,
    Split,
    contains,
    no_split,
    printable,
    read_json,
    refuse_split,
)

MAX_FILES = 10_000  # of a split: the library opens all of them


class Table:
    """The images of one split: the first column of images, by the features of the data set.

    Labels are the columns of class labels and of integers, without nulls. The fingerprint is that
    of the names and sizes of all images.
    """

    label_hint = "cast a column to ClassLabel before save_to_disk"

    def __init__(self, split: Any, name: str) -> None:
        import pyarrow
        import pyarrow.compute

        kinds = {column: type(kind).__name__ for column, kind in split.features.items()}
        self._column = next((column for column, kind in kinds.items() if kind == "Image"), "")
        if not self._column or not len(split):
            columns = ", ".join(kinds)[:200]
            raise DataError(f"{name}: no column of images; there is {printable(columns)}")
        if split._indices is not None:  # shuffled or filtered in memory
            split = split.flatten_indices()
        self._files = [file["filename"] for file in split.cache_files]
        self._images = split.data.column(self._column)
        self._images.validate(full=True)  # it is read in place: an offset may lead anywhere
        self.labels: dict[str, np.ndarray] = {}
        self.classes: list[str] = []
        for column in kinds:
            values = split.data.column(column)
            values.validate()
            if not pyarrow.types.is_integer(values.type) or values.null_count:
                continue
            self.labels[label_name(column)] = values.to_numpy().astype(np.int64)
            if label_name(column) == "class" and kinds[column] == "ClassLabel":
                self.classes = [str(one) for one in split.features[column].names]
        digest = hashlib.sha256()
        for chunk in self._images.chunks:
            sizes = pyarrow.compute.binary_length(chunk.field("bytes")).fill_null(-1)
            digest.update(sizes.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
            digest.update("\0".join(str(path) for path in chunk.field("path").to_pylist()).encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._images)

    def read(self, i: int) -> np.ndarray:
        return self.read_reduced(i, None)

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        if (data := self._images[i].as_py()["bytes"]) is None:
            raise BadImageError("no bytes; a path alone is not followed")
        return decode(data, enough=enough)

    def name(self, i: int) -> str:
        path = self._images[i].as_py()["path"]
        return f"row {i}" + (f" {printable(os.path.basename(path))}" if path else "")

    def stamp(self) -> str:
        return stamp_files(self._files)


def _library(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name}: needs the datasets library: pip install datasets") from None
    datasets.disable_progress_bars()
    return datasets


def _choose(found: Any, text: str, split: Split | None, wanted: str = "") -> Table:
    """One split of a data set, or of a dictionary of them."""
    name = printable(text)
    if not isinstance(found, dict):
        refuse_split(text, split)
        return Table(found, name)
    if wanted and wanted not in found:
        raise DataError(f"{name}: no split {printable(wanted)}; there is {', '.join(found)}")
    words = [wanted] if wanted else TEST_NAMES if split == "test" else ["train"]
    if wanted:
        refuse_split(text, split)
    one = next((word for word in words if word in found), None)
    if one is None and split is None and len(found) == 1:
        one = next(iter(found))
    if one is None:
        raise no_split(text, split or "train")
    return Table(found[one], name)


def _open_folder(text: str, split: Split | None) -> Table:
    library, folder = _library(text), Path(text)
    try:
        parts = [folder]
        if (folder / "dataset_dict.json").exists():
            parts = [
                folder / str(name) for name in read_json(folder / "dataset_dict.json")["splits"]
            ]
        for part in parts:
            _check_files(part)
        return _choose(library.load_from_disk(text), text, split)
    except UserError:
        raise
    except Exception as error:  # of the library or of pyarrow: many types
        raise DataError(f"{printable(text)}: {one_line(error)}") from None


def _check_files(folder: Path) -> None:
    """Refuses files that the library would read forever: pipes, devices, and links to them."""
    read_json(folder / "dataset_info.json")
    files = read_json(folder / "state.json")["_data_files"]
    if len(files) > MAX_FILES:
        raise DataError(f"{printable(folder)}: {len(files)} files, more than {MAX_FILES}")
    for file in files:
        open_to_read(folder / file["filename"], MAX_SHARD).close()


def _open_name(text: str, split: Split | None) -> Table:
    """Opens NAME or NAME@SPLIT; downloads it to the cache of the library if it is not there."""
    name, _, wanted = text.partition("@")
    library = _library(f"hf:{text}")
    # Since version 4 there are no scripts at all.
    old = int(library.__version__.split(".")[0]) < 4
    try:
        found = library.load_dataset(name, **({"trust_remote_code": False} if old else {}))
    except Exception as error:  # of the library, of huggingface_hub, or of the network
        raise DataError(f"hf:{printable(text)}: {one_line(error)[:300]}") from None
    return _choose(found, f"hf:{text}", split, wanted)


def _recognise(text: str) -> bool:
    is_one = contains(text, "state.json") and contains(text, "dataset_info.json")
    return is_one or contains(text, "dataset_dict.json")


HF_FOLDER = Source("datasets", _open_folder, recognise=_recognise)
HF = Source("hf", _open_name)
