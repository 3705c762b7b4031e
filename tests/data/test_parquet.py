"""Parquet in the schema that `datasets` of Hugging Face writes."""

import io
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import hostile_arrays
from stopmim.base.errors import DataError
from stopmim.cli import main
from stopmim.data.decode import BadImageError
from stopmim.data.images import Chunked
from stopmim.data.order import permutation
from stopmim.data.sources.open import open_images
from stopmim.data.sources.parquet import Parquet
from stopmim.data.sources.parquet_pages import unpacked


def png(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (value, 0, 0)).save(out, "PNG")
    return out.getvalue()


def write(path: Path, first: int, count: int, rows: int = 4, column: str = "image") -> Path:
    """As `Dataset.to_parquet` does: struct of bytes and path, names of classes in the metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + count)
    images = pa.array(
        [{"bytes": png(i), "path": f"{i}.png"} for i in numbers],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table({column: images, "label": pa.array([i % 3 for i in numbers], pa.int64())})
    features = {
        column: {"_type": "Image"},
        "label": {"names": ["ant", "bee", "cat"], "_type": "ClassLabel"},
    }
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(about), path, row_group_size=rows)
    return path


def values(images: object) -> list[int]:
    assert isinstance(images, Parquet)
    return [int(images.read(i)[0, 0, 0]) for i in range(len(images))]


def hub(root: Path) -> Path:
    """A data set as it lies in a clone of the Hub."""
    write(root / "data/train-00000-of-00002.parquet", 0, 10)
    write(root / "data/train-00001-of-00002.parquet", 10, 5)
    write(root / "data/validation-00000-of-00001.parquet", 15, 3)
    write(root / "data/test-00000-of-00001.parquet", 18, 2)
    (root / "README.md").touch()
    return root


def test_a_clone_of_the_hub_has_its_splits_labels_and_classes(tmp_path: Path) -> None:
    images = open_images(hub(tmp_path))
    assert isinstance(images, Parquet)
    assert values(images) == values(open_images(tmp_path, "train")) == list(range(15))
    assert values(open_images(tmp_path, "test")) == [15, 16, 17]  # validation before test
    assert images.labels["class"].tolist() == [i % 3 for i in range(15)]
    assert images.classes == ["ant", "bee", "cat"]
    assert images.name(12) == "train-00001-of-00002.parquet row 2"
    assert images.chunks.tolist() == [0, 4, 8, 10, 14, 15]
    assert isinstance(images, Chunked)


@pytest.mark.parametrize(
    "source", ["{}/data/train-*.parquet", "{}/data/train-{{00000..00001}}-of-00002.parquet"]
)
def test_patterns_name_the_same_files(tmp_path: Path, source: str) -> None:
    assert values(open_images(source.format(hub(tmp_path)))) == list(range(15))
    assert values(open_images(tmp_path / "data/train-00001-of-00002.parquet")) == list(
        range(10, 15)
    )


def test_other_columns_of_integers_are_labels_and_those_with_gaps_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 0, 4, column="img")
    table = pq.read_table(path).rename_columns(["img", "fine_label"])
    table = table.append_column("coarse_label", pa.array([1, 0, 1, 0], pa.int32()))
    table = table.append_column("gaps", pa.array([1, None, 1, 0]))
    pq.write_table(table, path)
    images = Parquet([str(path)])
    found = {k: v.tolist() for k, v in images.labels.items()}
    assert found == {"coarse_label": [1, 0, 1, 0], "fine_label": [0, 1, 2, 0]}
    assert all(v.dtype == np.int64 for v in images.labels.values())


def test_a_row_group_is_read_once_while_it_is_in_use(tmp_path: Path) -> None:
    """Else each image costs a whole row group."""
    path = write(tmp_path / "a.parquet", 0, 40, rows=10)
    images = Parquet([str(path)])
    assert values(images) == list(range(40))
    path.unlink()  # what was read is still there
    assert values(images)[::-1] == list(range(40))[::-1]
    again: Parquet = pickle.loads(pickle.dumps(images))  # noqa: S301
    with pytest.raises(BadImageError):  # but does not travel to a spawned process
        again.read(0)


def test_the_cache_is_bounded_and_the_order_stays_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", 0, 200, rows=10)
    size = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    monkeypatch.setattr("stopmim.data.sources.parquet.CACHE_BYTES", 8 * size)
    images = Parquet([str(path)])
    assert 20 < images.window < 60  # about 4 of 20 row groups
    assert values(images) == list(range(200))
    missed = 0
    for i in permutation(images, 0, 0).tolist():
        missed += images._chunk(i) not in images._cached
        images.read(i)
    assert missed <= 22  # each of 20 row groups once; in a plain random order 120 times
    assert 4 * size < sum(held.nbytes for held in images._cached.values()) <= 8 * size


def test_a_row_group_that_repeats_an_image_is_read_no_further_than_the_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary has the image once: a file of 10 kB would fill the memory."""
    monkeypatch.setattr("stopmim.data.sources.parquet.CACHE_BYTES", 10**6)
    monkeypatch.setattr("stopmim.data.sources.parquet.PART", 10**5)
    data = np.random.default_rng(0).bytes(10**4)
    table = pa.table({"image": [{"bytes": data, "path": ""}] * 300})
    pq.write_table(table, tmp_path / "a.parquet")
    images = Parquet([str(tmp_path / "a.parquet")])
    with pytest.raises(BadImageError, match="of images in a row group of"):
        images.read(299)
    assert 10**6 < images._read_group(0).nbytes < 1.3 * 10**6
    with pytest.raises(BadImageError, match="format"):  # the first ones were read
        images.read(0)


def test_forked_workers_read_for_themselves(tmp_path: Path) -> None:
    images = Parquet([str(write(tmp_path / "a.parquet", 0, 12))])
    images.read(0)  # the parent has used the library already
    loader: DataLoader[int] = DataLoader(
        Reader(images), batch_size=3, num_workers=2, multiprocessing_context="fork", collate_fn=list
    )
    assert [value for batch in loader for value in batch] == list(range(12))


class Reader(Dataset[int]):
    def __init__(self, images: Parquet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> int:
        return int(self.images.read(i)[0, 0, 0])


def test_a_damaged_file_is_named_and_the_others_are_used(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "a.parquet", 0, 5), write(tmp_path / "b.parquet", 5, 5)
    data = bad.read_bytes()
    bad.write_bytes(data[: len(data) // 2])
    images = Parquet([str(good), str(bad)])
    assert values(images) == [0, 1, 2, 3, 4]
    assert len(images.unreadable) == 1
    assert images.unreadable[0].startswith("b.parquet: ")
    with pytest.raises(DataError, match=r"no images in 1 Parquet files \(b\.parquet"):
        Parquet([str(bad)])
    bad.write_bytes(data)
    first = pq.ParquetFile(bad).metadata.row_group(0).column(0)  # image.bytes
    start = first.dictionary_page_offset or first.data_page_offset
    bad.write_bytes(data[:start] + b"\xff" * 50 + data[start + 50 :])
    images = Parquet([str(bad)])
    with pytest.raises(BadImageError):
        images.read(0)
    assert int(images.read(4)[0, 0, 0]) == 9


def test_an_image_without_bytes_is_a_bad_image_and_its_path_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png(1))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": None, "path": str(tmp_path / "1.png")}, None, {"bytes": png(3), "path": None}]
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "a.parquet")
    images = Parquet([str(tmp_path / "a.parquet")])
    for i in (0, 1):
        with pytest.raises(BadImageError, match="no bytes"):
            images.read(i)
    assert int(images.read(2)[0, 0, 0]) == 3


def test_a_table_without_images_is_refused_with_what_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column of images; .* got text, url$") as caught:
        open_images(tmp_path / "a.parquet")
    assert "\n" not in str(caught.value)


def test_the_fingerprint_knows_files_and_row_groups_and_not_the_place(tmp_path: Path) -> None:
    def of(*args: object, **options: int) -> str:
        return Parquet([str(write(tmp_path / args[0], *args[1:], **options))]).fingerprint  # type: ignore

    one = of("1/a.parquet", 0, 9)
    assert one == of("2/a.parquet", 0, 9)
    others = {of("3/b.parquet", 0, 9), of("4/a.parquet", 0, 8), of("5/a.parquet", 0, 9, rows=3)}
    assert len(others | {one}) == 4


def test_without_pyarrow_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.parquet", 0, 1)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    assert main(["pretrain", str(path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert 'pip install "stopmim[shards]"' in said
    assert len(said.splitlines()) == 1


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{folder}/0.parquet", 0, 1)) for folder in "abc"]
    Path(files[1]).write_bytes(b"junk")
    images = Parquet(files)
    assert [images.name(i) for i in range(2)] == ["a/0.parquet row 0", "c/0.parquet row 0"]
    assert images.unreadable[0].startswith("b/0.parquet: ")
    assert Parquet(files[:1]).name(0) == "0.parquet row 0"


def test_the_pages_say_how_large_they_are_whatever_the_footer_says(tmp_path: Path) -> None:
    hostile_arrays.lying(3, 10**6, 60)(tmp_path / "a.parquet")
    group = pq.read_metadata(tmp_path / "a.parquet").row_group(0)
    assert group.total_byte_size < 100
    total, largest = unpacked(str(tmp_path / "a.parquet"), [(group.column(0), 60)])
    assert 3 * 10**6 < largest < total < 3.1 * 10**6


def test_a_page_that_a_small_file_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile_arrays.lying(3, 10**6, 60)(tmp_path / "a.parquet")
    monkeypatch.setattr("stopmim.data.sources.parquet.MAX_EXPANDED", 4 * 10**6)
    images = open_images(tmp_path / "a.parquet")
    with pytest.raises(BadImageError, match="bytes of pages, the largest of"):
        images.read(0)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_of_more_rows_than_the_footer_counts_are_refused(
    tmp_path: Path, version: str
) -> None:
    """A hundred million rows of nothing, said to be forty, took six gigabytes."""
    path = tmp_path / "a.parquet"
    hostile_arrays.many_as_few(path, version)
    assert pq.read_metadata(path).row_group(0).num_rows == 40
    with pytest.raises(DataError, match=r"pages of \d+ values in a row group of 40 rows"):
        open_images(path)
