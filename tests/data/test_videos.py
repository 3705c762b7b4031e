"""Rendered videos are exact and equal on every machine; DAVIS is read as published."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stopmim.base.errors import DataError, UserError
from stopmim.data.rendering.render import render
from stopmim.data.rendering.scene import FOOT
from stopmim.data.rendering.scene import sample as sample_scene
from stopmim.data.videos import (
    AHEAD,
    LENGTH,
    PALETTE,
    Bytes,
    Davis,
    ReadAhead,
    SceneVideo,
    open_videos,
    read_ahead,
    read_mask,
    sample,
    write_mask,
)

MANY = [SceneVideo(3, i) for i in range(24)]


# ------------------------------------------------------------------------------ read ahead


class Counted:
    """A video of grey frames that notes which of them are read."""

    annotated = True

    def __init__(self, name: str, length: int = 40) -> None:
        self.name, self.length, self.read = name, length, list[int]()

    def __len__(self) -> int:
        return self.length

    def stem(self, i: int) -> str:
        return str(i)

    def frame(self, i: int) -> Bytes:
        self.read.append(i)
        if i == 30:
            raise DataError("frame 30 is broken")
        return np.full((2, 3, 3), i, np.uint8)

    def mask(self, i: int) -> Bytes:
        return np.full((2, 3), i, np.uint8)


def test_frames_are_read_ahead_once_and_not_further_than_needed() -> None:
    with ThreadPoolExecutor(4) as pool:
        video = Counted("a")
        reader = ReadAhead(video, pool)
        for i in range(10):
            assert (reader.frame(i) == i).all()
            assert (reader.mask(i) == i).all()
            assert max(video.read) <= i + AHEAD
    assert sorted(video.read) == list(range(10 + AHEAD))
    assert (reader.frame(0) == 0).all()  # gone, and read again
    assert (reader.mask(0) == 0).all()


def test_the_next_video_is_begun_before_it_is_asked_for() -> None:
    videos = [Counted("a", 3), Counted("b", 3), Counted("c", 3)]
    with ThreadPoolExecutor(1) as pool:
        readers = read_ahead(videos, pool)
        assert next(readers).name == "a"
        pool.submit(int).result()  # comes last
        assert [len(video.read) for video in videos] == [3, 3, 0]
        assert [reader.name for reader in readers] == ["b", "c"]


def test_a_frame_that_cannot_be_read_ahead_fails_in_its_turn() -> None:
    with ThreadPoolExecutor(4) as pool:
        reader = ReadAhead(Counted("a"), pool)
        for i in range(30):
            reader.frame(i)
        with pytest.raises(DataError, match="frame 30"):
            reader.frame(30)


# ------------------------------------------------------------------------------ drawn


def test_a_drawn_video_is_the_same_to_the_last_bit_on_every_machine() -> None:
    video = SceneVideo(0, 4)
    frames = b"".join(video.frame(i).tobytes() for i in range(len(video)))
    masks = b"".join(video.mask(i).tobytes() for i in range(len(video)))
    assert hashlib.sha256(frames).hexdigest() == FRAMES
    assert hashlib.sha256(masks).hexdigest() == MASKS


FRAMES = "d286c58006a9b503a8474bb2cfd7cfdac448b7a477294da9060baf34d4febe53"
MASKS = "ab68438531f2d527cb990ee6057ea91b32574393ca54eef43f25c5d69f634a17"


def test_twenty_frames_are_drawn_in_well_under_a_second() -> None:
    begin = time.process_time()
    video = SceneVideo(1, 0, 64)
    assert len([(video.frame(i), video.mask(i)) for i in range(len(video))]) == LENGTH
    assert time.process_time() - begin < 0.8


def test_objects_are_numbered_from_one_in_the_first_frame_and_keep_their_number() -> None:
    for video in MANY[:8]:
        first = np.unique(video.mask(0)).tolist()
        assert first == list(range(len(first)))
        assert len(first) > 1
        for i in range(1, len(video)):
            assert set(np.unique(video.mask(i))) <= set(first)
            # An object that moves a pixel or two per frame overlaps with itself, not with another.
            before, now = video.mask(i - 1), video.mask(i)
            for k in first[1:]:
                if (now == k).sum() > 30 and (before == k).sum() > 30:
                    assert (before[now == k] == k).mean() > 0.5


def test_a_body_hardly_seen_at_first_is_no_object_and_leaves_no_gap() -> None:
    video = SceneVideo(0, 0)
    for i, scene in enumerate(video.scenes):
        near, second, *rest = scene.bodies
        # At first a speck, later as large as it was.
        second = replace(second, half=second.half if i else 0.03)
        video.scenes[i] = replace(scene, bodies=(near, second, *rest))
    assert len(video.scenes[0].bodies) == 4
    for i in (0, 9):
        ids = render(video.scenes[i], 64)[1]
        for body, number in ((1, 1), (3, 2), (4, 3)):
            assert np.array_equal(video.mask(i) == number, ids == body)
        assert video.mask(i).max() == 3
    assert (render(video.scenes[9], 64)[1] == 2).sum() > 20


def test_every_object_moves_and_no_two_ever_touch() -> None:
    for video in MANY:
        for scene in video.scenes:
            bodies = scene.bodies
            for a in range(len(bodies)):
                for b in range(a):
                    apart = np.hypot(bodies[a].x - bodies[b].x, bodies[a].y - bodies[b].y)
                    feet = sum(bodies[k].half * FOOT[bodies[k].shape] for k in (a, b))
                    assert apart >= feet
        ends = zip(video.scenes[0].bodies, video.scenes[-1].bodies, strict=True)
        assert all((a.x, a.y) != (b.x, b.y) for a, b in ends)


def test_videos_differ_by_seed_and_by_number_and_show_no_scene_of_the_images() -> None:
    pictures = [SceneVideo(s, i, 32).frame(0).tobytes() for s in (0, 1) for i in (0, 1)]
    pictures += [render(sample_scene(s, i), 32)[0].tobytes() for s in (0, 1) for i in (0, 1)]
    assert len(set(pictures)) == 8
    assert sample(0, 0)[:5] == sample(0, 0, length=5)


@pytest.mark.parametrize(
    ("source", "count", "size", "name"),
    [
        ("scenes", 30, 64, "scene-0-0000"),
        ("scenes:3", 3, 64, "scene-0-0000"),
        ("scenes:2:48", 2, 48, "scene-0-0000"),
        ("scenes:2:48:7", 2, 48, "scene-7-0000"),
        ("scenes:2:48:0", 2, 48, "scene-0-0000"),
    ],
)
def test_drawn_videos_are_opened_by_count_size_and_seed(
    source: str, count: int, size: int, name: str
) -> None:
    videos = open_videos(source)
    assert len(videos) == count
    assert videos[0].name == name
    assert videos[0].frame(0).shape == (size, size, 3)


@pytest.mark.parametrize(
    "source",
    [
        "scenes:",
        "scenes:0",
        "scenes:2:0",
        "scenes:x",
        "scenes:1:2:3:4",
        "scenes:1:4097",
        "scenes:10001",
    ],
)
def test_a_source_that_makes_no_sense_is_one_line(source: str) -> None:
    with pytest.raises(UserError, match="expected scenes") as caught:
        open_videos(source)
    assert len(str(caught.value).splitlines()) == 1


# ------------------------------------------------------------------------------ DAVIS


def davis(root: Path, year: str = "2017", frames: int = 4) -> Path:
    """Two videos in the layout of the download of `year`, of 24 x 40 pixels."""
    for n, name in enumerate(("bike-packing", "judo")):
        pictures, masks = (root / part / "480p" / name for part in ("JPEGImages", "Annotations"))
        pictures.mkdir(parents=True)
        masks.mkdir(parents=True)
        for i in range(frames):
            Image.fromarray(np.full((24, 40, 3), 40 * i, np.uint8)).save(pictures / f"{i:05}.jpg")
            ids = np.zeros((24, 40), np.uint8)
            ids[4:8, i : i + 6] = 1
            ids[12:20, 20:30] = 2 - n
            ids[0, 0] = 255
            if year == "2016":
                Image.fromarray(np.where(ids % 255 > 0, 255, 0).astype(np.uint8)).save(
                    masks / f"{i:05}.png"
                )
            else:
                write_mask(ids, masks / f"{i:05}.png")
    lists = root / "ImageSets" / ("2017" if year == "2017" else "480p")
    lists.mkdir(parents=True)
    if year == "2017":
        (lists / "val.txt").write_text("judo\nbike-packing\n")
    else:
        lines = [
            f"/JPEGImages/480p/{name}/{i:05}.jpg /Annotations/480p/{name}/{i:05}.png \n"
            for name in ("judo", "bike-packing")
            for i in range(frames)
        ]
        (lists / "val.txt").write_text("".join(lines))
    return root


def test_davis_2017_is_read_in_the_order_of_its_list_with_void_as_background(
    tmp_path: Path,
) -> None:
    videos = Davis(davis(tmp_path))
    assert [video.name for video in videos] == ["judo", "bike-packing"]
    video = videos[1]
    assert (len(video), video.stem(3), video.annotated) == (4, "00003", True)
    assert video.frame(2).shape == (24, 40, 3)
    assert abs(int(video.frame(2)[0, 0, 0]) - 80) < 3
    assert np.unique(video.mask(0)).tolist() == [0, 1, 2]
    assert video.mask(0)[0, 0] == 0
    assert video.mask(2)[5, 7] == 1
    assert video.mask(3).dtype == np.uint8


@pytest.mark.parametrize("layout", ["2016", "2017"])
def test_davis_2016_is_one_object_in_either_layout(layout: str, tmp_path: Path) -> None:
    root = davis(tmp_path, layout)
    if layout == "2017":  # which has both lists, one beside the other
        (root / "ImageSets" / "2016").mkdir()
        (root / "ImageSets" / "2016" / "val.txt").write_text("judo\nbike-packing")
    videos = Davis(root, "2016")
    assert [video.name for video in videos] == ["judo", "bike-packing"]
    mask = videos[1].mask(0)
    assert np.unique(mask).tolist() == [0, 1]
    assert mask[5, 0] == mask[13, 21] == 1


def test_the_year_is_taken_from_the_folder(tmp_path: Path) -> None:
    new, old = davis(tmp_path / "new"), davis(tmp_path / "old", "2016")
    assert open_videos(new)[1].mask(0).max() == 2
    assert open_videos(str(old))[1].mask(0).max() == 1
    assert str(open_videos(new)) == str(new)


def test_a_split_with_first_annotations_only_is_read_and_cannot_be_scored(tmp_path: Path) -> None:
    root = davis(tmp_path)
    for path in (root / "Annotations").rglob("*.png"):
        if path.stem != "00000":
            path.unlink()
    video = Davis(root)[0]
    assert not video.annotated
    assert video.mask(0).any()
    with pytest.raises(DataError, match=r"judo.*frame 2"):
        video.mask(2)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("JPEGImages", "JPEGImages"),
        ("Annotations/480p", "Annotations/480p"),
        ("ImageSets/2017/val.txt", "val.txt: no such file"),
        ("JPEGImages/480p/judo", "judo: no frames"),
        ("Annotations/480p/judo/00002.png", "00002.png: no such file"),
        ("Annotations/480p/judo/00000.png", "00000.png: no such file"),
        ("", "no such folder"),
    ],
)
def test_what_is_missing_is_named_in_one_line(gone: str, says: str, tmp_path: Path) -> None:
    root = davis(tmp_path / "davis")
    (root / gone).rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=says) as caught:
        Davis(root)
    assert len(str(caught.value).splitlines()) == 1
    assert str(root) in str(caught.value)


def test_an_empty_list_and_an_unknown_year_are_refused(tmp_path: Path) -> None:
    root = davis(tmp_path)
    (root / "ImageSets" / "2017" / "val.txt").write_text("\n \n")
    with pytest.raises(DataError, match="empty"):
        Davis(root)
    year: str = "2018"
    with pytest.raises(UserError, match="2016 or 2017"):
        Davis(root, year)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n1234"])
def test_a_broken_frame_or_mask_is_named_in_one_line(bad: bytes, tmp_path: Path) -> None:
    root = davis(tmp_path)
    for part in ("JPEGImages/480p/judo/00001.jpg", "Annotations/480p/judo/00001.png"):
        (root / part).write_bytes(bad)
    video = Davis(root)[0]
    for read in (video.frame, video.mask):
        with pytest.raises(DataError, match="00001") as caught:
            read(1)
        assert len(str(caught.value).splitlines()) == 1


def test_a_mask_in_colours_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    with pytest.raises(DataError, match="expected an indexed PNG"):
        read_mask(tmp_path / "x.png")


def test_a_mask_is_written_as_an_indexed_png_with_the_colours_of_davis(tmp_path: Path) -> None:
    ids: Bytes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    write_mask(ids, tmp_path / "x.png")
    assert np.array_equal(read_mask(tmp_path / "x.png"), ids)
    with Image.open(tmp_path / "x.png") as image:
        assert image.mode == "P"
        colours = np.array(image.convert("RGB")).reshape(256, 3).tolist()
    assert colours == PALETTE.tolist()
    assert [colours[i] for i in (0, 1, 6, 9, 11, 18, 21, 22, 255)] == [
        [0, 0, 0],
        [128, 0, 0],
        [0, 128, 128],
        [191, 0, 0],
        [191, 128, 0],
        [0, 191, 0],
        [128, 64, 128],
        [22, 22, 22],
        [255, 255, 255],
    ]
