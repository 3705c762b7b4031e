"""Near-duplicates: what is found, what is not mistaken for one, and what the search costs."""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_decode import encoded

from stopmim.data.checks import duplicates
from stopmim.data.checks.check import check
from stopmim.data.checks.duplicates import SIDE, groups, join, near_duplicates, thumbnail
from stopmim.data.decode import decode
from stopmim.data.sources.scenes import Scenes

WORKERS = {"runtime.workers": 0}


def disturbed(pixels: np.ndarray, rng: np.random.Generator, keep: float = 0.9) -> bytes:
    """A JPEG of 40 to 150 % of the size and any quality, less up to a tenth of each side."""
    height, width = pixels.shape[:2]
    h, w = round(height * rng.uniform(keep, 1)), round(width * rng.uniform(keep, 1))
    top, left = (
        rng.integers(0, height - h, endpoint=True),
        rng.integers(0, width - w, endpoint=True),
    )
    scale = rng.uniform(0.4, 1.5)
    image = Image.fromarray(pixels[top : top + h, left : left + w])
    image = image.resize((round(w * scale), round(h * scale)), Image.Resampling.BICUBIC)
    return encoded(image, "JPEG", quality=int(rng.integers(30, 95)))


def planted(
    count: int, size: int, copies: int, keep: float
) -> tuple[np.ndarray, set[tuple[int, int]]]:
    """Thumbnails of different scenes and of disturbed copies of the first, and the true pairs."""
    rng, scenes = np.random.default_rng(0), Scenes(count, size, seed=11).pixels
    extra = [thumbnail(decode(disturbed(scenes[i], rng, keep))) for i in range(copies)]
    found = np.stack([*map(thumbnail, scenes), *extra])
    return found, {(i, count + i) for i in range(copies)}


def pairs_of(thumbnails: np.ndarray) -> set[tuple[int, int]]:
    return {(a, b) for a, b in near_duplicates(thumbnails).tolist()}


@pytest.mark.parametrize("keep", [1.0, 0.9])
def test_disturbed_copies_are_found_among_scenes_that_are_alike(keep: float) -> None:
    thumbnails, true = planted(300, 64, 40, keep)
    found = pairs_of(thumbnails)
    assert len(found & true) >= 38
    assert found <= true


@pytest.mark.parametrize("count", [2, 3, 10])
def test_few_images_are_enough(count: int) -> None:
    """Statistics of the data set alone would make of two images two opposites."""
    thumbnails, true = planted(count, 96, count, 0.95)
    assert pairs_of(thumbnails) == true


def test_images_that_show_nothing_are_like_no_other() -> None:
    flat = np.stack([np.full((SIDE, SIDE), grey, np.uint8) for grey in (0, 0, 255, 254)])
    assert near_duplicates(flat).shape == (0, 2)
    assert near_duplicates(flat[:0]).shape == (0, 2)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5000), (5000, 3), (24, 24), (1000, 700)])
def test_a_thumbnail_is_the_mean_of_its_cells_whatever_the_shape(shape: tuple[int, int]) -> None:
    rows = np.linspace(0, 255, shape[0]).round().astype(np.uint8)
    image = np.broadcast_to(rows[:, None, None], (*shape, 3))
    found = thumbnail(image)
    assert found.shape == (SIDE, SIDE)
    assert found.dtype == np.uint8
    if shape[0] >= SIDE:
        cells = np.linspace(0, 255, 2 * SIDE + 1)[1::2]
        assert np.abs(found[:, 5] - cells).max() <= 5.5


def test_groups_follow_chains_of_pairs() -> None:
    labels = np.array([0, 1, 2, 3, 1, 4])
    joined = join(labels, np.array([[0, 2], [2, 4], [3, 3]]))
    assert groups(joined) == [[0, 1, 2, 4]]
    assert groups(labels) == [[1, 4]]
    assert join(labels[:0], np.empty((0, 2), int)).tolist() == []


@pytest.mark.parametrize("cameras", [1, 3])
def test_frames_of_cameras_that_do_not_move_are_alike_at_bounded_cost(cameras: int) -> None:
    """Nearly every pair is one, but not every pair is looked at."""
    rng = np.random.default_rng(0)
    views = rng.integers(0, 256, (cameras, 6, 6)).repeat(4, axis=1).repeat(4, axis=2)
    frames = views.repeat(1500 // cameras, axis=0)
    frames = (frames + rng.integers(-3, 4, frames.shape)).clip(0, 255).astype(np.uint8)
    found = near_duplicates(frames)
    assert len(found) <= duplicates.NEAREST * len(frames)
    together = groups(join(np.arange(len(frames)), found))
    assert [len(group) for group in together] == [1500 // cameras] * cameras


def write_splits(root: Path, count: int, size: int, copies: int, near: int) -> None:
    """train/ and val/ of different scenes, with files of train/ copied and disturbed in val/."""
    rng, scenes = np.random.default_rng(1), Scenes(count, size, seed=5).pixels
    for i, pixels in enumerate(scenes):
        part = "train" if i < count * 4 // 5 else "val"
        folder = root / part / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:04}.png").write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    chosen = rng.permutation(count * 4 // 5)
    for i in chosen[:copies].tolist():
        file = root / "train" / f"class{i % 2}" / f"{i:04}.png"
        (root / "val" / "class0" / f"copy{i:04}.png").write_bytes(file.read_bytes())
    for i in chosen[copies : copies + near].tolist():
        (root / "val" / "class1" / f"near{i:04}.jpg").write_bytes(disturbed(scenes[i], rng))


def assert_leaks(root: Path, copies: int, near: int, enough: int) -> None:
    report = check(root, "tiny_cpu", WORKERS)
    same = [(test, train) for test, train, equal in report.leaked if equal]
    alike = [(test, train) for test, train, equal in report.leaked if not equal]
    assert len(same) == copies
    assert near >= len(alike) >= enough
    for test, train in (*same, *alike):  # of the right image, and nothing else
        assert test[-8:-4] == train[-8:-4]
        assert test[7:11] in ("copy", "near")
    assert report.copies == report.near == []
    assert report.test
    assert report.test.copies == report.test.near == []
    text = " ".join(report.text().split())
    assert f"{len(same) + len(alike)} of {report.test.images} test images are copies" in text
    assert "leave the leaked images out" in report.verdict


def test_copies_across_splits_are_found(tmp_path: Path) -> None:
    write_splits(tmp_path / "set", 150, 64, copies=20, near=10)
    assert_leaks(tmp_path / "set", copies=20, near=10, enough=9)


@pytest.mark.slow
def test_a_hundred_copies_and_fifty_near_duplicates_among_a_thousand_scenes(tmp_path: Path) -> None:
    write_splits(tmp_path / "set", 1000, 128, copies=100, near=50)
    assert_leaks(tmp_path / "set", copies=100, near=50, enough=45)


@pytest.mark.slow
def test_ten_times_as_many_images_take_about_ten_times_as_long() -> None:
    rng = np.random.default_rng(0)

    def seconds(count: int) -> float:
        coarse = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        images = coarse.repeat(3, axis=1).repeat(3, axis=2)
        begin = time.process_time()
        assert len(near_duplicates(images)) == 0
        return time.process_time() - begin

    seconds(1000)
    assert seconds(40_000) < 30 * seconds(4000)
