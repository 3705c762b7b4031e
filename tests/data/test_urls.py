"""Images at URLs: the same images as in local files, whatever the network does."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from test_tar import png, shard, values

from faulty_server import FAULTS, FaultyServer, answer_plain, impatient, serving
from stopmim.base.errors import DataError
from stopmim.data.order import permutation
from stopmim.data.pack import pack
from stopmim.data.remote import cache as remote_cache
from stopmim.data.remote import fetch
from stopmim.data.remote.ahead import in_reach, is_summed
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.sources.source import Split

IMAGES, SHARDS = 40, 4
SPLITS: list[Split] = ["train", "test"]


def write_index(folder: Path, suffix: str = ".tar", count: int = IMAGES) -> None:
    """As `stopmim pack` writes it."""
    shards = [
        {
            "name": path.name,
            "split": "",
            "images": count,
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.glob(f"*{suffix}"))
    ]
    about: dict[str, Any] = {"format": 1, "stopmim": "0", "kind": suffix[1:], "size": None}
    about |= {
        "quality": None,
        "shuffled": False,
        "fingerprints": {},
        "classes": [],
        "shards": shards,
    }
    (folder / "index.json").write_text(json.dumps(about))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(SHARDS):
        shard(tmp_path / "shards" / f"train-{k:03}.tar", IMAGES * k, IMAGES)
    return tmp_path / "shards"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fetch, "FIRST_WAIT", 0.02)
    with impatient(tmp_path / "cache"):
        yield


@pytest.fixture
def server(folder: Path) -> Iterator[FaultyServer]:
    with serving(folder) as server:
        yield server


def same(ours: Any, theirs: Any) -> bool:
    named = [ours.name(i) == theirs.name(i) for i in range(len(theirs))]
    labels = np.array_equal(ours.labels["class"], theirs.labels["class"])
    return len(ours) == len(theirs) and all(named) and labels and values(ours) == values(theirs)


def test_shards_at_a_url_are_those_of_the_folder(folder: Path, server: FaultyServer) -> None:
    local = open_images(folder)
    far = open_images(f"{server.url}/train-{{000..003}}.tar")
    assert same(far, local)
    assert far.fingerprint == local.fingerprint  # a run may move from one to the other
    assert np.array_equal(far.chunks, local.chunks)  # type: ignore[attr-defined]
    assert [server.fetched(f"train-{k:03}.tar") for k in range(SHARDS)] == [1] * SHARDS
    seen = len(server.log)
    again = open_images(f"{server.url}/train-{{000..003}}.tar")
    assert values(again) == values(local)
    # only sizes were asked for, and whether there is an index
    assert {r for _, r, _ in server.log[seen:]} == {"bytes=0-0"}


def test_an_index_opens_shards_without_fetching_them(folder: Path, server: FaultyServer) -> None:
    write_index(folder)
    far: Any = open_images(server.url)
    assert len(far) == IMAGES * SHARDS
    assert {path for path, _, _ in server.log} == {"/index.json"}
    assert int(far.read(2 * IMAGES)[0, 0, 0]) == 2 * IMAGES
    assert far.labels.at(np.array([81, 83])) == {"class": pytest.approx([81 % 7, 83 % 7])}
    assert {path for path, _, _ in server.log} == {"/index.json", "/train-002.tar"}
    assert same(far, open_images(folder))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_packed_shards_are_their_source_in_the_same_order(
    kind: Literal["tar", "parquet"], tmp_path: Path
) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(5):
                data = png(10 * (split == "val") + 5 * (name == "dog") + i)
                (tmp_path / "photos" / split / name / f"{i}.png").write_bytes(data)
    pack(tmp_path / "photos", tmp_path / "packed", kind=kind, workers=0)
    with serving(tmp_path / "packed") as server:
        for split in SPLITS:
            near, far = open_images(tmp_path / "packed", split), open_images(server.url, split)
            assert same(far, near)
            assert permutation(far, 3, 1).tolist() == permutation(near, 3, 1).tolist()
            assert getattr(far, "classes", None) == ["cat", "dog"]
        pack(server.url, tmp_path / "again", kind=kind, workers=0)  # a URL is a source like others
    assert sorted(values(open_images(tmp_path / "again"))) == list(range(10))


def test_parquet_and_folders_of_other_protocols(tmp_path: Path) -> None:
    for k in range(2):
        rows = [{"bytes": png(10 * k + i), "path": None} for i in range(10)]
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        labels = pyarrow.array(range(10), pyarrow.int64())
        table = pyarrow.table({"image": pyarrow.array(rows, kind), "label": labels})
        path = tmp_path / "p" / f"{('train', 'test')[k]}-0.parquet"
        path.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, path, row_group_size=4)
        fsspec.filesystem("memory").pipe(f"/bucket/{path.name}", path.read_bytes())
    local, far = open_images(tmp_path / "p"), open_images("memory://bucket/*.parquet")
    assert same(far, local)
    assert far.fingerprint == local.fingerprint
    test = open_test("parquet:memory://bucket")
    assert test is not None
    assert values(test) == list(range(10, 20))
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
    # its contents are known and its copy is here, but it is gone
    with pytest.raises(DataError, match=r"memory://bucket/\*\.parquet: no file of that name"):
        open_images("memory://bucket/*.parquet")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_survived(fault: str, folder: Path, server: FaultyServer) -> None:
    write_index(folder)
    far = open_images(server.url)
    server.plan = ["drop" if fault == "no-range" else fault, fault]
    assert int(far.read(5)[0, 0, 0]) == 5
    assert server.plan == []
    if fault in ("drop", "truncate", "stall"):  # continued, not repeated
        ranges = [r for path, r, _ in server.log if path == "/train-000.tar"]
        size = (folder / "train-000.tar").stat().st_size
        assert ranges[:2] == ["bytes=0-", f"bytes={size // 2}-"]


def test_a_server_says_how_long_to_wait(folder: Path, server: FaultyServer) -> None:
    asked = list[float]()

    def busy(request: Any) -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            del server.special["/train-000.tar"]
        answer_plain(request, 429, b"", Retry_After="1")

    write_index(folder)
    far = open_images(server.url)
    server.special["/train-000.tar"] = busy
    far.read(0)
    assert time.monotonic() - asked[0] >= 1.0


def test_a_missing_shard_is_named(folder: Path, server: FaultyServer) -> None:
    (folder / "train-002.tar").unlink()
    with pytest.raises(DataError, match=r"/train-002\.tar: no such file \(HTTP 404\)$"):
        open_images(f"{server.url}/train-{{000..003}}.tar")


def test_a_changed_shard_is_named(folder: Path, server: FaultyServer) -> None:
    write_index(folder)
    far = open_images(server.url)
    path = folder / "train-001.tar"
    data = path.read_bytes()
    path.write_bytes(data[:-600] + b"x" + data[-599:])
    with pytest.raises(DataError, match=r"/train-001\.tar: its bytes have another checksum"):
        far.read(IMAGES)
    assert server.fetched("train-001.tar") == remote_cache.WRONG
    path.write_bytes(data + bytes(512))
    with pytest.raises(DataError, match=r"/train-001\.tar: changed while it was read: bytes"):
        far.read(IMAGES)


def test_a_shard_without_an_index_must_stay_as_it_was(folder: Path, server: FaultyServer) -> None:
    url = f"{server.url}/train-000.tar"
    open_images(url)
    path = folder / "train-000.tar"
    data = path.read_bytes()
    path.write_bytes(data + bytes(1024))
    with pytest.raises(DataError, match=r"train-000\.tar: changed since it was first fetched here"):
        open_images(url)
    path.write_bytes(data[:-600] + b"x" + data[-599:])  # of the same size
    with pytest.raises(
        DataError, match="first fetched here: other bytes; if that is intended"
    ) as met:
        open_images(url)
    os.unlink(str(met.value).split("delete ")[1])
    assert len(open_images(url)) == IMAGES


def test_a_dead_server_is_given_up_in_one_line(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as server:
        write_index(folder)
        far = open_images(server.url)
    with impatient(tmp_path / "cache", STOPMIM_REMOTE_PATIENCE="0.5"):
        begin = time.monotonic()
        gone = r"train-000\.tar: unavailable for \d+ s, last error: "
        with pytest.raises(DataError, match=gone) as e:
            far.read(0)
    assert time.monotonic() - begin < 30
    assert "the same command continues" in str(e.value)
    assert "\n" not in str(e.value)


def test_shards_are_fetched_ahead_for_some_of_their_channels_too(
    folder: Path, server: FaultyServer
) -> None:
    write_index(folder)
    far, lists = open_images(f"channels:2,0:{server.url}"), [[0], [3 * IMAGES]]
    assert is_summed(far)
    assert list(in_reach(far, lists, list, in_flight=0)) == lists
    assert [server.fetched(f"train-{k:03}.tar") for k in range(SHARDS)] == [1, 0, 0, 1]


# ------------------------------------------------------------------------------ the cache


def test_a_copy_that_a_killed_process_has_begun_is_completed(
    folder: Path, server: FaultyServer
) -> None:
    write_index(folder)
    far = open_images(server.url)
    os.environ["STOPMIM_REMOTE_STALL"] = "20"  # set back by `quick`
    server.plan, server.stall = ["stall"], 20.0
    size = (folder / "train-000.tar").stat().st_size
    child = os.fork()
    if child == 0:
        far.read(0)
        os._exit(0)
    until = time.monotonic() + 10
    while time.monotonic() < until and not any(
        path.stat().st_size >= size // 2 for path in remote_cache.folder().glob("??/*.part")
    ):
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert int(far.read(0)[0, 0, 0]) == 0
    ranges = [r for path, r, _ in server.log if path == "/train-000.tar"]
    assert ranges == ["bytes=0-", f"bytes={size // 2}-"]


def copies() -> list[Path]:
    return [path for path in remote_cache.folder().glob("??/*") if path.suffix != ".part"]


def test_the_least_recently_used_copies_make_room(
    folder: Path, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index(folder)
    size = (folder / "train-000.tar").stat().st_size
    monkeypatch.setattr(remote_cache, "_slack", 0)
    with impatient(tmp_path / "cache", STOPMIM_REMOTE_GB=str(2.5 * size / 1e9)):
        far: Any = open_images(server.url)
        for k in (0, 1, 0, 2, 0):
            far.read(k * IMAGES)
            time.sleep(0.02)
        assert sum(path.stat().st_size for path in copies()) <= 2.5 * size
        fetched = [server.fetched(f"train-{k:03}.tar") for k in range(SHARDS)]
        assert fetched == [1, 1, 1, 0]
        far.read(IMAGES)
        assert server.fetched("train-001.tar") == 2  # it was the one out of use


def test_a_copy_in_use_is_never_evicted(
    folder: Path, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index(folder)
    size = (folder / "train-000.tar").stat().st_size
    monkeypatch.setattr(remote_cache, "_slack", 0)
    with impatient(tmp_path / "cache", STOPMIM_REMOTE_GB=str(1.5 * size / 1e9)):
        far: Any = open_images(server.url)
        held = remote_cache.hold(far.files.remotes[0])
        for k in (1, 2, 3):
            far.read(k * IMAGES)
        assert os.path.exists(held.path)
        held.close()
        far.read(IMAGES)
        assert not os.path.exists(held.path)


def test_names_in_the_cache_are_hashes(tmp_path: Path, server: FaultyServer, folder: Path) -> None:
    (folder / ".._.._evil.tar").write_bytes((folder / "train-000.tar").read_bytes())
    open_images(f"{server.url}/..%2f..%2fevil.tar")
    assert all(set(path.name) <= set("0123456789abcdef-") for path in copies())
    assert not list(tmp_path.glob("**/evil.tar"))
