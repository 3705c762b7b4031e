"""Tar shards: reading, refusing, and recovering the intact part of a damaged one."""

import io
import json
import os
import pickle
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stopmim.base.errors import DataError
from stopmim.data.decode import BadImageError
from stopmim.data.sources.open import open_images
from stopmim.data.sources.shards import expand_braces
from stopmim.data.sources.tar import Tar

Files = list[tuple[str, bytes]]


def png(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (value, 0, 0)).save(out, "PNG")
    return out.getvalue()


def write(path: Path, files: Files, form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def shard(path: Path, first: int, count: int) -> Path:
    """As WebDataset's own writer would: the members of a sample in a row, sorted."""
    pairs = ((f"{i:06d}", i) for i in range(first, first + count))
    files: Files = []
    for key, i in pairs:
        files += [(f"{key}.cls", b"%d" % (i % 7)), (f"{key}.jpg", png(i))]
    return write(path, files)


def values(images: Any) -> list[int]:
    return [int(images.read(i)[0, 0, 0]) for i in range(len(images))]


def names(images: Tar) -> list[str]:
    return [images.name(i) for i in range(len(images))]


@pytest.mark.parametrize(
    "source",
    ["{}", "{}/*.tar", "{}/train-{{000..002}}.tar", "{}/train-{{000,001,002}}.tar", "tar:{}"],
)
def test_a_folder_a_glob_and_a_brace_list_are_the_same_shards(tmp_path: Path, source: str) -> None:
    for i in range(3):
        shard(tmp_path / f"train-{i:03d}.tar", 5 * i, 5)
    images = open_images(source.format(tmp_path))
    assert isinstance(images, Tar)
    assert values(images) == list(range(15))
    assert images.labels["class"].tolist() == [i % 7 for i in range(15)]
    assert images.labels["class"].dtype == np.int64
    assert images.name(6) == "train-001.tar/000006.jpg"
    assert images.chunks.tolist() == [0, 5, 10, 15]
    assert images.unreadable == []


def test_images_are_read_in_any_order_and_in_another_process(tmp_path: Path) -> None:
    images = Tar([str(shard(tmp_path / "a.tar", 0, 20))])
    assert [int(images.read(i)[0, 0, 0]) for i in (19, 0, 7, 7)] == [19, 0, 7, 7]
    again: Tar = pickle.loads(pickle.dumps(images))  # noqa: S301
    assert values(again) == values(images)


def test_a_label_comes_from_cls_or_json_and_every_sample_needs_one(tmp_path: Path) -> None:
    def about(**entries: object) -> bytes:
        return json.dumps(entries | {"caption": "x" * 600}).encode()

    files = [("a.jpg", png(1)), ("a.json", about(label=5)), ("b.jpg", png(2)), ("b.cls", b" 6\n")]
    files += [("c.jpg", png(3)), ("c.json", about(cls=7))]
    images = Tar([str(write(tmp_path / "all.tar", files))])
    assert images.labels["class"].tolist() == [5, 6, 7]
    for name, data in (
        ("d.cls", b"seven"),
        ("d.json", about(label="7")),
        ("d.json", b"[" * 50_000),
    ):
        path = write(tmp_path / "some.tar", [*files, ("d.jpg", png(4)), (name, data)])
        images = Tar([str(path)])
        assert len(images) == 4
        assert images.labels == {}


def test_a_sample_has_one_image_and_masks_are_not_images(tmp_path: Path) -> None:
    files = [("x/a.depth.png", png(9)), ("x/a.jpg", png(1)), ("x/a.mask.png", png(9))]
    files += [("y/a.jpg", png(2)), ("b.JPEG", png(3)), ("b.png", png(9)), ("readme.txt", b"hello")]
    files += [("._b.jpg", b"macOS"), ("scan.001.jpg", png(4)), ("scan.002.jpg", png(5))]
    images = Tar([str(write(tmp_path / "a.tar", files))])
    assert values(images) == [1, 2, 3, 4, 5]  # none of a run without a plain name is lost


def test_names_that_differ_in_case_are_two_samples(tmp_path: Path) -> None:
    files = [("Ab.JPG", png(1)), ("Ab.CLS", b"1"), ("ab.jpg", png(2)), ("ab.cls", b"2")]
    images = Tar([str(write(tmp_path / "a.tar", files))])
    assert values(images) == [1, 2]
    assert images.labels["class"].tolist() == [1, 2]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read_in_every_format(tmp_path: Path, form: int) -> None:
    long = "folder/" * 12 + "n" * 90
    listed = [f"{long}.jpg", "caf\u00e9.jpg"]
    listed += [] if form == tarfile.USTAR_FORMAT else ["m" * 300 + ".jpg"]
    images = Tar(
        [str(write(tmp_path / "a.tar", [(n, png(i)) for i, n in enumerate(listed)], form))]
    )
    assert names(images) == [f"a.tar/{name}" for name in listed]
    assert values(images) == list(range(len(listed)))


def test_the_fingerprint_knows_shards_and_members_and_not_the_place(tmp_path: Path) -> None:
    def of(folder: str, name: str, files: Files) -> str:
        return Tar([str(write(tmp_path / folder / name, files))]).fingerprint

    files = [("a.jpg", png(1)), ("b.jpg", png(2))]
    one = of("1", "s.tar", files)
    assert one == of("2", "s.tar", files)
    others = {
        of("3", "t.tar", files),
        of("4", "s.tar", files[::-1]),
        of("5", "s.tar", [("a.jpg", png(1) + b"!"), files[1]]),
        of("6", "s.tar", [("c.jpg", png(1)), files[1]]),
    }
    assert len(others | {one}) == 5


def test_shards_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    paths = [shard(tmp_path / folder / "0.tar", 0, 1) for folder in ("a", "b/c")]
    paths.append(shard(tmp_path / "b" / "1.tar", 0, 1))
    expected = ["a/0.tar/000000.jpg", "b/c/0.tar/000000.jpg", "b/1.tar/000000.jpg"]
    assert names(Tar([str(path) for path in paths])) == expected
    assert names(Tar([str(path) for path in paths[1:]])) == [
        "0.tar/000000.jpg",
        "1.tar/000000.jpg",
    ]
    os.truncate(paths[1], 100)
    images = Tar([str(path) for path in paths])
    assert names(images) == [expected[0], expected[2]]
    assert images.unreadable[0].startswith("b/c/0.tar: ")


def test_words_in_the_names_of_shards_are_splits(tmp_path: Path) -> None:
    shard(tmp_path / "imagenet1k-train-0000.tar", 0, 4)
    shard(tmp_path / "imagenet1k-train-0001.tar", 4, 4)
    shard(tmp_path / "imagenet1k-validation-00.tar", 8, 2)
    assert values(open_images(tmp_path)) == values(open_images(tmp_path, "train")) == list(range(8))
    assert values(open_images(tmp_path, "test")) == [8, 9]
    shard(tmp_path / "both/train/0.tar", 1, 1)
    shard(tmp_path / "both/val/0.tar", 2, 1)
    assert values(open_images(tmp_path / "both")) == [1]
    assert values(open_images(tmp_path / "both", "test")) == [2]
    with pytest.raises(DataError, match="no test split"):
        open_images(tmp_path / "both/train", "test")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst", "*.tar.xz"])
def test_compressed_shards_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"no random access.*decompress"):
        open_images(tmp_path / name)


def test_missing_shards_of_a_brace_list_are_counted(tmp_path: Path) -> None:
    shard(tmp_path / "a-00.tar", 0, 1)
    with pytest.raises(DataError, match=r"2 of 3 names lead to no file, first .*a-01\.tar$"):
        open_images(f"{tmp_path}/a-{{00..02}}.tar")
    with pytest.raises(DataError, match="none or over 1000000 files"):
        open_images(f"{tmp_path}/a-{{0..99999999999}}.tar")
    with pytest.raises(DataError, match="none or over"):
        open_images(f"{tmp_path}/a-{{7..3}}.tar")


def test_a_brace_list_of_long_names_is_refused_before_they_fill_the_memory() -> None:
    tracemalloc.start()
    with pytest.raises(DataError, match="or too long names"):
        expand_braces("{a,b}" * 5000 + ".tar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**29


# ------------------------------------------------------------- damaged shards


def test_what_lies_before_a_cut_is_kept_and_the_shard_is_named(tmp_path: Path) -> None:
    whole = shard(tmp_path / "whole.tar", 100, 3)
    data = shard(tmp_path / "cut.tar", 0, 10).read_bytes()
    end = len(data.rstrip(b"\0"))
    for cut in np.linspace(0, end, 20).astype(int).tolist():
        (tmp_path / "cut.tar").write_bytes(data[:cut])
        images = Tar([str(tmp_path / "cut.tar"), str(whole)])
        kept = len(images) - 3
        assert values(images) == [*range(kept), 100, 101, 102]
        assert abs(kept - cut / end * 10) <= 1
        assert len(images.unreadable) == 1
        assert images.unreadable[0].startswith("cut.tar: ")


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_cut_between_an_image_and_its_label_costs_that_image_alone(
    tmp_path: Path, kept: int
) -> None:
    files = [(f"{i}.{kind}", png(i) if kind == "jpg" else b"%d" % i)
             for i in range(3) for kind in ("jpg", "json")]  # fmt: skip
    whole, cut = (write(tmp_path / name, files) for name in ("whole.tar", "cut.tar"))
    images = Tar([str(cut)])
    os.truncate(cut, int(images._at[kept]) + 512)  # all of the image, nothing of its label
    images = Tar([str(cut), str(whole)])
    assert values(images) == images.labels["class"].tolist() == [*range(kept), 0, 1, 2]
    assert len(images.unreadable) == 1
    # Without any labels there is none to be lost, and the image is used.
    bare = write(tmp_path / "bare.tar", [file for file in files if file[0].endswith("jpg")])
    os.truncate(bare, int(Tar([str(bare)])._at[kept]) + 512)
    assert values(Tar([str(bare)])) == list(range(kept + 1))


def test_a_shard_that_shrinks_or_goes_after_the_start_makes_bad_images_only(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", 0, 4)
    images = Tar([str(path)])
    os.truncate(path, 1700)
    assert images.read(0).shape == (3, 4, 3)
    with pytest.raises(BadImageError, match="ends within this image"):
        images.read(3)
    path.unlink()
    with pytest.raises(BadImageError, match="No such file"):
        images.read(0)


@pytest.mark.timeout(10)
def test_shards_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    shard(tmp_path / "good.tar", 0, 2)
    paths = [str(tmp_path / name) for name in ("gone.tar", "good.tar", "pipe.tar")]
    images = Tar(paths)
    assert values(images) == [0, 1]
    assert [line.split(":")[0] for line in images.unreadable] == ["gone.tar", "pipe.tar"]
    with pytest.raises(DataError, match=r"no images in 1 tar shards \(gone.tar: No such file"):
        Tar(paths[:1])


# ------------------------------------------------------------ hostile archives


def header(name: bytes, size: int = 0, kind: bytes = b"0", link: bytes = b"") -> bytearray:
    block = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
    block[0:100] = name[:100].ljust(100, b"\0")
    wide = size >= 8**11 or size < 0
    block[124:136] = (b"\x80" + (size % 2**88).to_bytes(11, "big")) if wide else b"%011o\0" % size
    block[156:157] = kind
    block[157:257] = link.ljust(100, b"\0")
    return signed(block)


def signed(block: bytearray) -> bytearray:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return block


def member(name: bytes, data: bytes, kind: bytes = b"0", size: int | None = None) -> bytes:
    start = bytes(header(name, len(data) if size is None else size, kind))
    return start + data + b"\0" * (-len(data) % 512)


def record(key: bytes, value: bytes) -> bytes:
    length = next(n for n in range(5, 10**6) if n == len(b"%d %b=%b\n" % (n, key, value)))
    return b"%d %b=%b\n" % (length, key, value)


def link(kind: bytes) -> bytes:
    return bytes(header(b"evil.jpg", 512, kind, b"/etc/passwd"))


def broken_checksum() -> bytes:
    block = header(b"evil.jpg", 10)
    block[0] ^= 1
    return bytes(block) + b"\0" * 512


def sparse() -> bytes:
    block = header(b"evil.jpg", 512, b"S")
    block[482] = 1  # one more block of map
    block[483:495] = b"77777777777\0"  # it claims to be 8 GiB
    return bytes(signed(block)) + b"\0" * 512 + b"hole" * 128


GOOD = member(b"good.jpg", png(7))
AFTER = member(b"later.jpg", png(8))
END = b"\0" * 1024

# Content between two good members: the archive, the names that are read, and the message.
HOSTILE: dict[str, tuple[Callable[[], bytes], list[str], str]] = {
    "parent": (lambda: member(b"../../evil.jpg", png(6)), ["../../evil.jpg"], ""),
    "absolute": (lambda: member(b"/tmp/evil.jpg", png(6)), ["/tmp/evil.jpg"], ""),
    "symlink": (lambda: link(b"2"), [], ""),
    "hardlink": (lambda: link(b"1"), [], ""),
    "device": (lambda: link(b"3") + link(b"4") + link(b"6"), [], ""),
    "many empty members": (lambda: b"".join([member(b"no.txt", b"")] * 100_000), [], ""),
    "vast size": (lambda: member(b"evil.jpg", b"x", size=2**62), [], "lies about its size"),
    "negative size": (lambda: member(b"evil.jpg", b"x", size=-512), [], "lies about its size"),
    "overlong name": (lambda: member(b"@", b"n" * 10**6, b"L"), [], "1000000 bytes of header"),
    "broken checksum": (broken_checksum, [], "broken header at byte"),
    "GNU sparse": (sparse, [], ""),
    "pax sparse": (
        lambda: member(b"@", record(b"GNU.sparse.size", b"9" * 18), b"x") + member(b"e.jpg", b"x"),
        [],
        "",
    ),
    "pax size": (
        lambda: member(b"@", record(b"size", b"9" * 18), b"x") + member(b"evil.jpg", b"x"),
        [],
        "lies about its size",
    ),
    "pax name for all": (
        lambda: member(b"@", record(b"path", b"../all.jpg"), b"g") + member(b"own.jpg", png(6)),
        ["own.jpg"],
        "",
    ),
    "pax lengths": (lambda: member(b"@", b"999999999 path=x\n", b"x"), [], "broken pax header"),
    "control characters": (
        lambda: member(b"@", record(b"path", b"\x1b[2J\n.jpg"), b"x") + member(b"x", png(6)),
        ["\\x1b[2J\\n.jpg"],
        "",
    ),
    "pax without an end": (lambda: member(b"@", b"", b"x") * 1000, [], ""),
}


_opened: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    events = ("open", "os.mkdir", "os.remove", "os.symlink", "os.rename")
    # A descriptor is of a file that was opened before.
    if _opened is not None and event in events and not isinstance(args[0], int):
        _opened.append(str(args[0]))


sys.addaudithook(_watch)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Every file that this process opens, makes or removes meanwhile."""
    global _opened
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_reaches_nothing_and_stops_nothing(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPMIM_CACHE", "")
    make, read, said = HOSTILE[what]
    path = tmp_path / "in" / "evil.tar"
    path.parent.mkdir()
    path.write_bytes(GOOD + make() + AFTER + END)
    with watched() as touched:
        images = Tar([str(path)])
        pixels = values(images)
    assert set(touched) == {str(path)}
    later = [] if said else ["later.jpg"]
    assert names(images) == [f"evil.tar/{name}" for name in ["good.jpg", *read, *later]]
    assert pixels == [7] + [6] * len(read) + [8] * len(later)
    if said:
        assert said in images.unreadable[0]
    else:
        assert images.unreadable == []
    assert sorted(tmp_path.rglob("*")) == [path.parent, path]


def test_a_member_beyond_the_limit_is_a_bad_image_and_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(GOOD + header(b"vast.jpg", 2**30 + 1))
        file.truncate(file.tell() + 2**30 + 512 + 1024)
    images = Tar([str(path)])
    assert len(images) == 2
    with pytest.raises(BadImageError, match="more than"):
        images.read(1)
