"""Packing: shards hold the same images as their source, whole or not at all, and prove it."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stopmim.base.errors import DataError, RunInUseError, UserError
from stopmim.cli import main
from stopmim.config.schema import Config, override
from stopmim.data.images import Images
from stopmim.data.loading import Crops
from stopmim.data.order import permutation
from stopmim.data.pack import LOCK, ShardFormat, pack
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.sources.packed import read_index, verify_shards
from stopmim.train.loop import pretrain
from tiny import tiny

KINDS: list[ShardFormat] = ["tar", "parquet"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs of several formats and sizes, in two classes, with names that are easily lost."""
    rng = np.random.default_rng(0)
    names = ["a.1.jpg", "a.2.jpg", "a.jpg", "a.png", "a_1.jpg", "b.webp", "c..gif", "ü ?.bmp"]
    for place in ("cat", "dog/deep"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        for name in names:
            height, width = rng.integers(20, 60, 2)
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / place / name)
    return tmp_path / "photos"


def same(one: Images, other: Images) -> None:
    assert len(one) == len(other)
    for i in range(len(one)):
        assert np.array_equal(one.read(i), other.read(i)), one.name(i)
    for name, label in one.labels.items():
        assert np.array_equal(label, other.labels[name])
    assert one.classes == other.classes  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_pixels_order_and_labels_of_their_source(
    kind: ShardFormat, folder: Path, tmp_path: Path
) -> None:
    index = pack(folder, tmp_path / "out", kind=kind, shard_mib=1)
    assert [shard.images for shard in index.shards] == [16]
    same(open_images(folder), open_images(tmp_path / "out"))
    assert verify_shards(tmp_path / "out") == index == read_index(tmp_path / "out")
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir()) == [f".{kind}", ".json"][::-1]


def test_a_run_on_shards_is_the_run_on_the_folder(folder: Path, tmp_path: Path) -> None:
    """The same crops in the same order: the same losses to the last digit."""
    pack(folder, tmp_path / "out", shard_mib=1)
    config = tiny(**{"optim.batch_size": 8, "optim.epochs": 2})
    runs = [
        pretrain(data, tmp_path / name, config)
        for name, data in (("a", folder), ("b", tmp_path / "out"))
    ]
    first, second = ([line["loss"] for line in run.metrics] for run in runs)
    assert first == second
    assert len(first) >= 2


def test_crops_and_order_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "out")
    config = override(Config(), {"image_size": 32, "arch": "vit_micro4"})
    plain, packed = (Crops(open_images(x), config) for x in (folder, tmp_path / "out"))
    for key in [(0, 0), (0, 7), (3, 15)]:
        one, other = plain[key].image, packed[key].image
        assert one is not None
        assert other is not None
        assert one.equal(other)
    orders = [permutation(crops.images, 5, 2) for crops in (plain, packed)]
    assert orders[0].equal(orders[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_do_not_depend_on_workers_or_time(
    kind: ShardFormat, folder: Path, tmp_path: Path
) -> None:
    first = pack(folder, tmp_path / "a", kind=kind, size=24, workers=0)
    second = pack(folder, tmp_path / "b", kind=kind, size=24, workers=2)
    assert first == second


def test_larger_images_become_smaller_and_smaller_ones_keep_their_bytes(
    folder: Path, tmp_path: Path
) -> None:
    pack(folder, tmp_path / "out", size=32, quality=80)
    before, after = open_images(folder), open_images(tmp_path / "out")
    for i in range(len(before)):
        old, new = before.read(i), after.read(i)
        if min(old.shape[:2]) <= 32:
            assert np.array_equal(old, new)
        else:
            assert min(new.shape[:2]) == 32
            ratio = old.shape[1] / old.shape[0]
            assert new.shape[1] / new.shape[0] == pytest.approx(ratio, rel=0.02)


def test_a_shuffled_pack_has_every_image_once_with_its_label(folder: Path, tmp_path: Path) -> None:
    index = pack(folder, tmp_path / "out", shuffle=True)
    before, after = open_images(folder), open_images(tmp_path / "out")
    assert index.shuffled
    assert before.labels["class"].tolist() != after.labels["class"].tolist()

    def contents(images: Images) -> set[tuple[bytes, int]]:
        label = images.labels["class"]
        return {(images.read(i).tobytes(), int(label[i])) for i in range(len(images))}

    assert contents(before) == contents(after)
    assert len(contents(after)) == 16


def test_splits_stay_apart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "both/train").symlink_to(folder)
    (tmp_path / "both/val").symlink_to(folder)
    index = pack(tmp_path / "both", tmp_path / "out")
    assert [shard.split for shard in index.shards] == ["train", "test"]
    same(open_images(folder), open_images(tmp_path / "out"))
    test = open_test(tmp_path / "out")
    assert test is not None
    assert len(test) == 16


def test_arrays_are_packed_without_loss(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 20, 30, 3), dtype=np.uint8)
    pack(Arrays(pixels, {"class": np.arange(5)}, [], "x"), tmp_path / "out")
    found = open_images(tmp_path / "out")
    assert all(np.array_equal(found.read(i), pixels[i]) for i in range(5))
    assert found.labels["class"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "channels"), [("uint16", 5), ("float32", 1), ("uint8", 4)])
def test_images_of_any_channels_and_type_are_packed_without_loss(
    tmp_path: Path, kind: ShardFormat, dtype: str, channels: int
) -> None:
    pixels = np.random.default_rng(1).integers(0, 250, (6, 20, 30, channels)).astype(dtype)
    names = [f"band {c}" for c in range(channels)]
    arrays = Arrays(pixels, {"class": np.arange(6)}, [], "x", channel_names=names)
    pack(arrays, tmp_path / "out", kind=kind)
    found = open_images(tmp_path / "out")
    assert all(np.array_equal(found.read(i), pixels[i]) for i in range(6))
    assert found.read(0).dtype == dtype
    if kind == "tar":
        assert found.channel_names == names  # type: ignore[attr-defined]
    pack(arrays, tmp_path / "small", kind=kind, size=10)
    small = open_images(tmp_path / "small").read(3)
    assert (small.shape, small.dtype) == ((10, 15, channels), np.dtype(dtype))
    assert abs(small.mean() - pixels[3].mean()) < 8


def test_a_broken_image_is_left_out_and_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cat/broken.jpg").write_bytes(b"\xff\xd8 no picture")
    assert main(["pack", str(folder), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "1 of 17 images cannot be read and are left out: cat/broken.jpg" in said.err
    assert "16 images in 1 shard," in said.out
    assert len(open_images(tmp_path / "out")) == 16


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_finds_any_damage(damage: str, folder: Path, tmp_path: Path) -> None:
    index = pack(folder, tmp_path / "out")
    shard = tmp_path / "out" / index.shards[0].name
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    match damage:
        case "flip":
            shard.write_bytes(data)
        case "cut":
            shard.write_bytes(data[:-512])
        case "remove":
            shard.unlink()
    with pytest.raises(DataError, match=r"00000\.tar: .*; pack again"):
        verify_shards(tmp_path / "out")


def test_verify_says_what_it_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder), "--verify"]) == 3
    assert "no index.json of `stopmim pack`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"stopmim": 1, "sha256": 2}', '{"stopmim": "9", "sha256": [', "\ud800"],
)
def test_a_strange_index_is_no_internal_error(text: str, folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "out")
    (tmp_path / "out/index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError):
        verify_shards(tmp_path / "out")


def test_an_index_cannot_point_outside_its_folder(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "out")
    file = tmp_path / "out/index.json"
    file.write_text(file.read_text().replace("00000.tar", "../photos/cat/a.jpg"))
    with pytest.raises(DataError, match="not a file of this folder"):
        verify_shards(tmp_path / "out")


def test_an_index_with_a_file_twice_is_refused_before_anything_is_hashed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(folder, tmp_path / "out")
    file = tmp_path / "out/index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"shards": index["shards"] * 1000}))
    (tmp_path / "out/00000.tar").unlink()  # what hashing it would say first
    capsys.readouterr()
    assert main(["check", str(tmp_path / "out"), "--verify"]) == 3
    error = capsys.readouterr().err
    assert "index.json: 00000.tar: listed 1000 times; pack again" in error
    assert error.count("\n") == 1


def test_other_options_or_images_are_refused(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "out")
    with pytest.raises(UserError, match="holds shards already"):
        pack(folder, tmp_path / "out")
    with pytest.raises(UserError, match="lies in the folder of the images"):
        pack(folder, folder / "shards")
    wrong = (("size", 0), ("quality", 0), ("quality", 101), ("shard_mib", 0))
    for option, value in (*wrong, ("workers", -1), ("workers", 10**6)):
        with pytest.raises(UserError, match="expected"):
            pack(folder, tmp_path / "other", **{option: value})  # type: ignore[arg-type]


KILLED = """
import os, sys
from stopmim.data import pack as module
written = 0
real = module.write_whole
def write_whole(path, text):
    global written
    written += 1
    if written == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    real(path, text)
module.write_whole = write_whole
module.pack(sys.argv[1], sys.argv[2], shard_mib=1, workers=0)
"""


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_killed_pack_continues_and_gives_the_same_bytes(moment: int, tmp_path: Path) -> None:
    """Killed as it writes the plan, the record of a shard, or the index."""
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for i in range(12):
        pixels = rng.integers(0, 256, (250, 250, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{i}.png")
    whole = pack(tmp_path / "photos", tmp_path / "whole", shard_mib=1)
    assert len(whole.shards) == 2
    out = tmp_path / "cut"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "photos"), str(out), str(moment)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    kept = {
        p: p.stat().st_mtime_ns for p in out.glob("*.tar") if (out / f".{p.name}.json").exists()
    }
    assert pack(tmp_path / "photos", out, shard_mib=1) == whole
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert len(kept) == max(0, moment - 2)
    assert sorted(p.name for p in out.iterdir()) == ["00000.tar", "00001.tar", "index.json"]
    for shard in whole.shards:
        assert hashlib.sha256((out / shard.name).read_bytes()).hexdigest() == shard.sha256


def test_a_pack_with_other_options_does_not_continue(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(folder, out)
    plan = {"kind": "tar", "size": None, "quality": None, "shard_mib": 256, "shuffle": False}
    prints = {"fingerprints": {"": open_images(folder).fingerprint}, "per_shard": {"": 9}}
    (out / ".pack.json").write_text(json.dumps(plan | prints))
    with pytest.raises(UserError, match="holds an unfinished pack with another size: None, now 32"):
        pack(folder, out, size=32)


def test_two_packs_do_not_write_to_one_folder(folder: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunInUseError):
            pack(folder, tmp_path / "out")


def test_other_tools_can_read_the_tar(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "out")
    with tarfile.open(tmp_path / "out/00000.tar") as tar:
        members = tar.getmembers()
    assert len(members) == 32
    assert all(m.isreg() and not m.name.startswith("/") and m.mtime == 0 for m in members)
    stems = [m.name.rpartition(".")[0] for m in members]
    assert all("." not in os.path.basename(stem) for stem in stems)  # one sample per image
    assert len(set(stems)) == 16


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_continues(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for i in range(60):
        pixels = rng.integers(0, 256, (1200, 1200, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{i}.jpg")
    command = [sys.executable, "-m", "stopmim", "pack", str(tmp_path / "photos")]
    command += ["--out", str(tmp_path / "out"), "--size", "64", "--shard-mib", "1"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out/.pack.json").exists():
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "stopped" in said.splitlines()[-1]
    assert len(pack(tmp_path / "photos", tmp_path / "out", size=64, shard_mib=1).shards) == 1


def test_hidden_files_of_others_stay_in_the_folder(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".mine.json").write_text("{}")
    pack(folder, out)
    assert [path.name for path in out.glob(".*")] == [".mine.json"]


@pytest.mark.parametrize("each", [0, -3, "x", None])
def test_a_strange_plan_is_made_anew(folder: Path, tmp_path: Path, each: object) -> None:
    out = tmp_path / "out"
    out.mkdir()
    plan = {"kind": "tar", "size": None, "quality": None, "shard_mib": 256, "shuffle": False}
    prints = {"fingerprints": {"": open_images(folder).fingerprint}, "per_shard": {"": each}}
    (out / ".pack.json").write_text(json.dumps(plan | prints))
    assert sum(shard.images for shard in pack(folder, out).shards) == len(open_images(folder))
