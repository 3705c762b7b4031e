"""A cached index saves time and is never out of date."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_tar import shard

from stopmim.data import index_cache as cache
from stopmim.data.sources.folder import Folder
from stopmim.data.sources.tar import Tar


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private cache, used for small folders too."""
    monkeypatch.setenv("STOPMIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stopmim.data.index_cache.WORTH_IT", 1)
    return tmp_path / "cache"


def age(root: Path, seconds: float = 60.0) -> None:
    """Sets all times below `root` back, as if nothing had changed for a while."""
    then = time.time() - seconds
    for path in [*root.rglob("*"), root]:
        os.utime(path, (then, then))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    for name in ("a/1.png", "a/2.png", "b/deep/3.png", "b/deep/4.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * int(Path(name).stem))
    age(root)
    return root


def seen(root: Path) -> tuple[list[str], str, list[str], dict[str, list[int]]]:
    folder = Folder(root)
    names = [folder.name(i) for i in range(len(folder))]
    labels = {name: values.tolist() for name, values in folder.labels.items()}
    return names, folder.fingerprint, folder.classes, labels


def fresh(root: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    with monkeypatch.context() as without:
        without.setenv("STOPMIM_CACHE", "")
        return seen(root)


def test_the_second_start_reads_no_folder_and_finds_the_same(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = seen(root)
    assert len(list(place.iterdir())) == 1

    def refuse(path: object) -> None:
        raise AssertionError(f"{path} was listed")

    monkeypatch.setattr("os.scandir", refuse)
    assert seen(root) == first


def overwrite(root: Path) -> None:
    (root / "a/2.png").write_bytes(b"longer than before")


CHANGES: dict[str, Callable[[Path], object]] = {
    "add": lambda root: (root / "b/deep/5.png").touch(),
    "remove": lambda root: (root / "a/1.png").unlink(),
    "rename": lambda root: (root / "a/1.png").rename(root / "a/0.png"),
    "move": lambda root: (root / "a/1.png").rename(root / "b/deep/1.png"),
    "new folder": lambda root: (root / "c").mkdir(),
    "remove folder": lambda root: shutil.rmtree(root / "a"),
    "link": lambda root: (root / "c").symlink_to("b/deep"),
    "replace": lambda root: (root / "b").rename(root / "z"),
    "overwrite, where every file is checked": overwrite,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_tree_is_noticed(
    root: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = seen(root)
    CHANGES[change](root)
    now = seen(root)
    assert now == fresh(root, monkeypatch)
    if change not in ("new folder", "link"):  # an empty folder; a second way to the same
        assert now != before


def test_what_has_just_changed_is_not_stored(root: Path, place: Path) -> None:
    """File systems round times: a second change within the same tick would go unnoticed."""
    (root / "a/9.png").touch()
    Folder(root)
    assert not place.exists()
    age(root)
    Folder(root)
    assert place.exists()


def test_two_roots_and_two_names_of_one_root_do_not_share_an_index(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen(root)[0] != seen(root / "a")[0]
    monkeypatch.chdir(root.parent)
    assert seen(Path("set")) == seen(root)


def test_a_folder_of_a_year_that_no_array_holds_is_read(root: Path, place: Path) -> None:
    os.utime(root / "a", ns=(10**19, 10**19))  # of 2286, as an archive can say
    assert (root / "a").stat().st_mtime_ns > 2**63
    assert seen(root) == seen(root)
    shard(root / "x.tar", 0, 1)
    os.utime(root / "x.tar", ns=(10**19, 10**19))
    assert len(Tar([str(root / "x.tar")])) == 1


def test_a_damaged_or_foreign_file_in_the_cache_is_not_believed(root: Path, place: Path) -> None:
    expected = seen(root)
    (stored,) = place.iterdir()
    data = stored.read_bytes()
    flipped = bytearray(data)
    flipped[data.index(b"a/1.png")] ^= 1
    for bad in (b"", data[:100], data[:-30], bytes(flipped), b"\x80\x04K\x01."):
        stored.write_bytes(bad)
        assert seen(root) == expected
    np.savez(stored, key=np.frombuffer(b"another root/", np.uint8), names=np.zeros(3, np.uint8))
    assert seen(root) == expected


@pytest.mark.parametrize("place_named", ["/dev/null/x", "/proc/stopmim", ""])
def test_a_cache_that_cannot_be_written_is_not_used(
    root: Path, place_named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOPMIM_CACHE", place_named)
    assert seen(root) == seen(root)
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_leaves_no_half_an_index(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, **arrays: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(Folder(root)) == 4
    assert list(place.iterdir()) == []


def test_the_place_follows_the_rules_of_the_desktop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOPMIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache.store("kind", b"key", {"a": np.arange(3)})
    assert [p.parent for p in (tmp_path / "xdg").rglob("*.npz")] == [tmp_path / "xdg/stopmim"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.load("kind", b"key") is None
    cache.store("kind", b"key", {"a": np.arange(3)})
    assert (tmp_path / "home/.cache/stopmim").is_dir()
    found = cache.load("kind", b"key")
    assert found is not None
    assert found["a"].tolist() == [0, 1, 2]


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("STOPMIM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache.store("kind", b"key", {"a": np.arange(3)})
    assert cache.load("kind", b"key") is None


def test_shards_are_walked_once_and_again_when_they_change(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(shard(tmp_path / "tars" / f"{i}.tar", 10 * i, 3)) for i in range(2)]
    os.truncate(paths[1], 3000)
    age(tmp_path / "tars")
    first = Tar(paths)
    walked = list[str]()
    from stopmim.data.sources import tar

    samples = tar._samples
    monkeypatch.setattr(tar, "_samples", lambda path: walked.append(path) or samples(path))  # type: ignore
    second = Tar(paths)
    assert walked == []
    assert second.fingerprint == first.fingerprint
    assert second.unreadable == first.unreadable != []
    assert second.labels["class"].tolist() == first.labels["class"].tolist()
    assert [second.name(i) for i in range(len(second))] == [
        first.name(i) for i in range(len(first))
    ]
    assert second.read(1)[0, 0, 0] == 1
    shard(Path(paths[1]), 10, 3)
    assert len(Tar(paths)) == 6
    assert walked == paths


@pytest.mark.parametrize("kind", ["pipe", "endless", "unknown method", "encrypted", "cut"])
def test_a_hostile_file_in_the_cache_is_indexed_anew(place: Path, kind: str) -> None:
    cache.store("folder", b"key", {"x": np.arange(1000)})
    (file,) = place.iterdir()
    data = bytearray(file.read_bytes())
    where = data.rindex(b"PK\x01\x02")  # the last entry of the directory of the zip
    if kind in ("pipe", "endless"):
        file.unlink()
        os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    elif kind == "unknown method":
        data[where + 10] = 99
        file.write_bytes(data)
    elif kind == "encrypted":
        data[where + 8] |= 1
        file.write_bytes(data)
    else:
        file.write_bytes(data[: len(data) // 2])
    assert cache.load("folder", b"key") is None
