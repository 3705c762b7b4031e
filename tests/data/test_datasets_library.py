"""Data sets of the `datasets` library, in folders that it wrote."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tar import png, values

from stopmim.base.errors import DataError
from stopmim.data.sources.open import open_images, open_test


@pytest.fixture(scope="module")
def library() -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets


def table(library: Any, first: int, count: int) -> Any:
    features = library.Features(
        {
            "id": library.Value("string"),
            "picture": library.Image(),
            "label": library.ClassLabel(names=["cat", "dog"]),
            "year": library.Value("int32"),
        }
    )
    numbers = range(first, first + count)
    columns: dict[str, list[Any]] = {
        "id": [str(i) for i in numbers],
        "picture": [{"bytes": png(i), "path": f"{i}.png"} for i in numbers],
        "label": [i % 2 for i in numbers],
        "year": [2000 + i for i in numbers],
    }
    return library.Dataset.from_dict(columns, features=features)


def test_a_saved_data_set_is_a_source(library: Any, tmp_path: Path) -> None:
    table(library, 0, 10).save_to_disk(tmp_path / "one")
    images = open_images(tmp_path / "one")
    assert values(images) == list(range(10))
    assert images.name(3) == "row 3 3.png"
    assert images.labels["class"].tolist() == [0, 1] * 5
    assert images.labels["year"].tolist() == list(range(2000, 2010))
    assert images.classes == ["cat", "dog"]  # type: ignore[attr-defined]
    assert open_images(tmp_path / "one").fingerprint == images.fingerprint
    table(library, 1, 10).save_to_disk(tmp_path / "other")
    assert open_images(tmp_path / "other").fingerprint != images.fingerprint
    assert open_test(tmp_path / "one") is None


def test_splits_of_a_dictionary(library: Any, tmp_path: Path) -> None:
    parts = {"train": table(library, 0, 6), "validation": table(library, 6, 4)}
    library.DatasetDict(parts).save_to_disk(tmp_path / "both")
    assert values(open_images(tmp_path / "both")) == list(range(6))
    test = open_test(tmp_path / "both")
    assert test is not None
    assert values(test) == list(range(6, 10))


def test_the_order_of_a_shuffled_one_is_kept(library: Any, tmp_path: Path) -> None:
    table(library, 0, 10).select([7, 2, 5]).save_to_disk(tmp_path / "some")
    assert values(open_images(tmp_path / "some")) == [7, 2, 5]


def test_what_is_no_data_set_of_images_is_one_line(library: Any, tmp_path: Path) -> None:
    library.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "text")
    with pytest.raises(DataError, match=r"text: no column of images; there is text$"):
        open_images(tmp_path / "text")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match="bad") as met:
        open_images(tmp_path / "bad")
    assert "\n" not in str(met.value)
    data = next((tmp_path / "text").glob("*.arrow"))
    data.write_bytes(data.read_bytes()[:50])
    with pytest.raises(DataError, match="text: ") as met:
        open_images(tmp_path / "text")
    assert "\n" not in str(met.value)


def forged(name: str, **changes: Any) -> Callable[[Path], object]:
    """Changes the entries of the only data file in state.json."""

    def change(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_bytes())
        state["_data_files"][0] |= changes
        (folder / name).write_text(json.dumps(state))

    return change


def wild_offset(folder: Path) -> None:
    """The table says that the first image ends two gigabytes further on."""
    [file] = folder.glob("*.arrow")
    offsets = np.cumsum([0] + [len(png(i)) for i in range(10)], dtype="<i4").tobytes()
    wild = offsets[:4] + np.array([2**31 - 1, -5], "<i4").tobytes() + offsets[12:]
    data = file.read_bytes()
    assert offsets in data
    file.write_bytes(data.replace(offsets, wild))


def piped(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


HOSTILE: dict[str, Callable[[Path], object]] = {
    "an offset beyond the file": wild_offset,
    "a pipe as description": piped("dataset_info.json"),
    "a pipe as state": piped("state.json"),
    "an endless file": forged("state.json", filename="/dev/zero"),
    "a number as file": forged("state.json", filename=3),
    "no files": lambda folder: (folder / "state.json").write_text('{"_data_files": []}'),
    "nested state": lambda folder: (folder / "state.json").write_text("[" * 100_000),
    "a list as state": lambda folder: (folder / "state.json").write_text("[]"),
    "a list as description": lambda folder: (folder / "dataset_info.json").write_text("[1]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused(name: str, library: Any, tmp_path: Path) -> None:
    table(library, 0, 10).save_to_disk(tmp_path / "one")
    HOSTILE[name](tmp_path / "one")
    with pytest.raises(DataError):
        open_images(tmp_path / "one")
