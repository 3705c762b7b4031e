"""`stopmim check`, and lists of images to skip."""

import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_decode import encoded, picture

from stopmim import Run, pretrain
from stopmim.base.errors import DataError
from stopmim.base.files import append_jsonl, read_jsonl
from stopmim.cli import main
from stopmim.data.checks.check import check
from stopmim.data.pack import pack
from stopmim.data.skip import both_without_skipped, read_list, without, without_skipped
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scenes import Bands
from tiny import NoiseImages, assert_same_run, tiny, write_folder, write_parts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """18 images, of which 3 are broken and 2 are copies, in two classes of 12 and 6."""
    root = tmp_path / "images"
    (root / "a").mkdir(parents=True)
    (root / "b").mkdir()
    for i in range(8):
        (root / "a" / f"{i}.jpg").write_bytes(encoded(picture(100 + i, 200), "JPEG"))
    (root / "a" / "cut.jpg").write_bytes(encoded(picture(), "JPEG")[:400])
    (root / "a" / "empty.png").write_bytes(b"")
    (root / "a" / "text.gif").write_bytes(b"not an image at all\n")
    (root / "a" / "copy.jpeg").write_bytes((root / "a" / "0.jpg").read_bytes())
    (root / "b" / "copy.jpg").write_bytes((root / "a" / "0.jpg").read_bytes())
    (root / "b" / "cmyk.jpg").write_bytes(encoded(picture().convert("CMYK"), "JPEG"))
    (root / "b" / "grey16.png").write_bytes(
        encoded(Image.fromarray(np.full((300, 300), 40_000, np.uint16)), "PNG")
    )
    (root / "b" / "alpha.png").write_bytes(encoded(picture().convert("RGBA"), "PNG"))
    (root / "b" / "palette.gif").write_bytes(encoded(picture().convert("P"), "GIF"))
    two = [picture(), picture().rotate(180)]
    (root / "b" / "two.gif").write_bytes(
        encoded(two[0], "GIF", save_all=True, append_images=two[1:])
    )
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_a_report_counts_what_is_there(folder: Path, workers: int) -> None:
    report = check(folder, "tiny_cpu", {"runtime.workers": workers})
    assert (report.images, report.scanned) == (18, 18)
    assert [name for name, _ in report.bad] == ["a/cut.jpg", "a/empty.png", "a/text.gif"]
    assert report.bad[1][1] == "empty file"
    assert sorted(report.copies[0]) == ["a/0.jpg", "a/copy.jpeg", "b/copy.jpg"]
    assert len(report.copies) == 1
    assert report.classes == {"class": [12, 6]}
    assert (min(report.sides), max(report.sides), len(report.sides)) == (47, 300, 15)
    assert report.kinds == {
        "JPEG RGB": 10, "JPEG CMYK": 1, "PNG I;16": 1, "PNG RGBA": 1, "GIF P": 1,
        "GIF P animated": 1,
    }  # fmt: skip
    assert "not usable" in report.verdict
    assert "3 of 18 images cannot be read" in str(report.problem)


def test_the_text_fits_a_terminal_and_says_what_to_do(folder: Path) -> None:
    text = check(folder, "vit_b16_stop", {"optim.batch_size": 4}).text()
    lines = text.splitlines()[1:]
    assert max(map(len, lines)) <= 80
    for part in ("12 images each", "below the 224 px", "a/cut.jpg: "):
        assert part in text, part
    assert "a/0.jpg = a/copy.jpeg = b/copy.jpg" in text
    assert lines[-1].startswith("  verdict   not usable")


def test_the_command_ends_with_3_for_too_many_broken_images_and_with_0_once_they_are_listed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixes = tmp_path / "my fixes.jsonl"
    words = ["check", str(folder), "--preset", "tiny_cpu"]
    assert main(words) == 3
    said = capsys.readouterr()
    assert "verdict   not usable" in said.out
    assert sum("stopmim: error" in line for line in said.err.splitlines()) == 1
    assert main([*words, "--fix-list", str(fixes)]) == 0
    said = capsys.readouterr()
    assert "verdict   usable without the images on the list" in said.out
    assert f"pretrain --data.skip '{fixes}'" in said.out
    assert f"wrote {fixes}: 3 images to leave out" in said.out
    assert "stopmim: error" not in said.err
    assert [json.loads(line)["name"] for line in fixes.read_text().splitlines()] == [
        "a/cut.jpg",
        "a/empty.png",
        "a/text.gif",
    ]
    assert main([*words, "--data.skip", str(fixes)]) == 0
    assert "broken    0 (0.0%)" in capsys.readouterr().out
    assert main([*words, "--data.max_bad", "0.5"]) == 0


def test_a_limit_looks_at_images_from_the_first_to_the_last(folder: Path) -> None:
    report = check(folder, "tiny_cpu", {"runtime.workers": 0}, limit=4)
    assert (report.images, report.scanned, len(report.sides) + len(report.bad)) == (18, 4, 4)
    assert "4 of 18 images scanned" in report.text()


def test_images_in_memory_are_checked_by_their_pixels() -> None:
    images = NoiseImages(8, broken=(3,))
    images.images[5] = images.images[1]
    report = check(images, "tiny_cpu", {"runtime.workers": 0})
    assert report.bad == [("noise 3", "broken on purpose")]
    assert report.copies == [["noise 1", "noise 5"]]
    assert report.kinds == {"pixels": 7}


def test_labels_may_be_any_numbers() -> None:
    images = NoiseImages(8)
    hidden, ids = [-1] * 6 + [4, 4], [10**15 + i for i in range(8)]
    images.labels = {"class": np.array(hidden, np.int64), "id": np.array(ids, np.int64)}
    report = check(images, "tiny_cpu", {"runtime.workers": 0})
    assert report.classes == {"class": [6, 2], "id": [1] * 8}


def test_nothing_readable_is_a_problem_whatever_max_bad_allows() -> None:
    images = NoiseImages(8, broken=tuple(range(8)))
    report = check(images, "tiny_cpu", {"runtime.workers": 0, "data.max_bad": 1.0})
    assert "none of the 8 images" in str(report.problem)
    assert report.text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--limit", "0"], 2, "--limit 0: at least one image"),
        (["--limit", "-5"], 2, "--limit -5: at least one image"),
        (["--fix-list", "nowhere/a.jsonl"], 5, "nowhere/a.jsonl: cannot write the list: No such"),
        (["--fix-list", "a.jsonl", "--preset", "no"], 2, "no: no such preset"),
        (["--fix-list", "a.txt"], 2, "a.txt: the name of a list of images must end in .jsonl"),
    ],
)
def test_what_cannot_work_is_said_before_an_image_is_read(
    words: list[str],
    code: int,
    said: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(folder), *words]) == code
    (line,) = capsys.readouterr().err.splitlines()  # and none of progress
    assert line.startswith(f"stopmim: error: {said}")
    assert not list(tmp_path.glob("a.*"))


# ------------------------------------------------------------------------------ the test split


def test_a_test_part_is_read_too_and_its_broken_files_are_told_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, fixes = write_parts(tmp_path / "images"), tmp_path / "fixes.jsonl"
    words = ["check", str(root), "--preset", "tiny_cpu"]
    assert main([*words, "--data.max_bad", "0.05"]) == 3  # one of 40, but one of 16 to test on
    said = capsys.readouterr()
    assert "test      16 images scanned" in said.out
    assert "fit for training, but not for evaluation" in said.out
    assert "images, test split: 1 of 16 images cannot be read" in said.err
    assert main([*words, "--data.max_bad", "0.1", "--fix-list", str(fixes)]) == 0
    assert "eval --skip" in capsys.readouterr().out
    assert [json.loads(line) for line in fixes.read_text().splitlines()] == [
        {"name": "part0/003.png", "reason": "not an image of a known format"},
        {"name": "part1/001.png", "reason": "empty file", "part": "test"},
    ]
    report = check(root, "tiny_cpu", {"optim.batch_size": 8, "data.skip": str(fixes)})
    assert report.test
    assert (report.images, report.test.images, report.verdict) == (39, 15, "usable")


def test_a_class_that_training_does_not_know_makes_the_test_part_useless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_parts(tmp_path / "images")
    (root / "val" / "part1").rename(root / "val" / "zebra")
    assert main(["check", str(root), "--preset", "tiny_cpu", "--data.max_bad", "0.1"]) == 3
    said = capsys.readouterr()
    assert "verdict   fit for training, but not for evaluation" in said.out
    assert "class zebra is not among those of training" in said.err


def test_leaked_test_images_are_listed_for_evaluation_to_skip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, fixes = write_parts(tmp_path / "images"), tmp_path / "fixes.jsonl"
    (root / "val/part1/same.png").write_bytes((root / "train/part0/005.png").read_bytes())
    pixels = np.asarray(Image.open(root / "train/part1/004.png"))
    (root / "val/part1/resaved.bmp").write_bytes(encoded(Image.fromarray(pixels), "BMP"))
    words = ["check", str(root), "--preset", "tiny_cpu", "--data.max_bad", "0.1"]
    assert main([*words, "--fix-list", str(fixes)]) == 0
    said = capsys.readouterr().out
    assert "2 of 17 test images are copies of training images (1 the same, 1" in said
    assert "part1/resaved.bmp ~ part1/004.png of training" in said
    assert read_list(fixes, "test") == {"part1/001.png", "part1/same.png", "part1/resaved.bmp"}
    assert read_list(fixes) == {"part0/003.png"}
    assert main([*words, "--data.skip", str(fixes)]) == 0
    assert "leakage   none" in capsys.readouterr().out


def test_loose_files_other_files_and_long_images_are_told(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images")
    rng = np.random.default_rng(1)
    for name, shape in {"loose.png": (40, 40), "part0/long.png": (30, 61)}.items():
        Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(root / name)
    Image.fromarray(rng.integers(0, 256, (30, 60, 3), dtype=np.uint8)).save(root / "part1/wide.png")
    (root / "part2/raw.NEF").touch()
    report = check(root, "tiny_cpu", {"runtime.workers": 0})
    assert report.classes == {"class": [15, 14, 13]}
    assert (report.loose, report.long) == (1, ["part0/long.png (61x30)"])
    text = " ".join(report.text().split())
    assert "class: 3 values, 13 to 15 images each, median 14" in text
    assert "1 image lies beside the class folders: for pretraining only" in text
    assert "crop 1 image loses more than half" in text
    assert "not read 1 .nef; convert .nef to JPEG or PNG" in text


def test_a_cut_shard_and_an_image_that_lacks_a_channel_are_named(tmp_path: Path) -> None:
    pack(write_folder(tmp_path / "images", 8), tmp_path / "shards")
    shard = tmp_path / "shards" / "00000.tar"
    os.truncate(shard, shard.stat().st_size // 2)
    plates = tmp_path / "plates"
    plates.mkdir()
    for name in ("w0_red", "w0_green", "w1_red"):
        Image.new("L", (48, 48)).save(plates / f"{name}.png")
    for source, name in (
        (str(shard), "00000.tar: "),
        (f"{plates}@{{name}}_{{channel}}.png", "w1: no file of green"),
    ):
        text = " ".join(check(source, "tiny_cpu", {"runtime.workers": 0}).text().split())
        assert f"lost 1: incomplete, what is missing is not used {name}" in text


def test_one_image_is_not_called_images(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        picture(80, 90 + len(name)).save(tmp_path / name)
    (tmp_path / "b/2.png").write_bytes(b"junk")
    text = check(tmp_path, "tiny_cpu", {"runtime.workers": 0}).text()
    assert "class: 2 values, 1 image each" in text
    (tmp_path / "a/1.png").unlink()
    report = check(tmp_path, "tiny_cpu", {"runtime.workers": 0})
    assert "1 image scanned" in report.text()
    assert "1 images" not in f"{text} {report.text()} {report.problem}"


# ------------------------------------------------------------------------------ leaving out


def test_images_left_out_are_never_read_and_the_others_keep_names_and_labels(folder: Path) -> None:
    images = open_images(folder)
    rest = without(images, {"a/cut.jpg", "a/empty.png", "a/text.gif", "gone.jpg"})
    assert len(rest) == 15
    names = [rest.name(i) for i in range(15)]
    assert names == [images.name(i) for i in range(18) if images.name(i) in names]
    assert all(rest.read(i).ndim == 3 for i in range(15))
    assert np.bincount(rest.labels["class"]).tolist() == [9, 6]
    assert rest.fingerprint != images.fingerprint
    assert rest.fingerprint != without(images, {"a/cut.jpg"}).fingerprint


def test_a_run_that_skips_is_the_run_on_the_others_and_resumes_exactly(tmp_path: Path) -> None:
    folder, fixes = write_folder(tmp_path / "images"), tmp_path / "fixes.jsonl"
    (folder / "part0" / "bad.png").write_bytes(b"junk")
    (folder / "part1" / "000bad.png").write_bytes(b"")
    check(folder, "tiny_cpu", {"runtime.workers": 0}, fix_list=fixes)
    config = tiny(data={"skip": str(fixes), "max_bad": 0.0})
    whole = pretrain(folder, tmp_path / "whole", config)
    assert whole.about["data"]["images"] == 40
    assert not (whole.path / "bad_files.jsonl").exists()
    pretrain(folder, tmp_path / "cut", config, stop_at=4)
    assert_same_run(pretrain(folder, tmp_path / "cut", config), whole)
    (folder / "part0" / "bad.png").unlink()
    (folder / "part1" / "000bad.png").unlink()
    clean = pretrain(folder, tmp_path / "clean", tiny())
    assert (clean.checkpoint / "model.safetensors").read_bytes() == (
        whole.checkpoint / "model.safetensors"
    ).read_bytes()


def test_an_entry_is_left_out_of_its_own_part_though_the_other_has_the_name(
    tmp_path: Path,
) -> None:
    root, fixes = write_parts(tmp_path / "images"), tmp_path / "fixes.jsonl"
    train, test = open_images(root, "train"), open_images(root, "test")

    def left_out(*lines: dict[str, str]) -> list[set[str]]:
        fixes.write_text("".join(json.dumps(line) + "\n" for line in lines))
        parts = both_without_skipped(train, test, fixes)
        return [
            {whole.name(i) for i in range(len(whole))} - {part.name(i) for i in range(len(part))}
            for whole, part in zip((train, test), parts, strict=True)
        ]

    one, two = "part0/003.png", "part1/001.png"
    assert left_out({"name": one}, {"name": two, "part": "test"}) == [{one}, {two}]
    assert left_out({"name": one, "part": "train"}, {"name": "gone"}) == [{one}, set()]
    assert left_out({"name": two, "part": "test"}) == [set(), {two}]
    assert without_skipped(train, fixes) is train  # and training is as without it
    (root / "train" / two).unlink()
    train = open_images(root, "train")
    assert left_out({"name": one}, {"name": two}) == [{one}, {two}]  # there is but one of that name
    with pytest.raises(DataError, match="names none of the 55 images"):
        left_out({"name": "gone"})


def test_an_empty_list_leaves_nothing_out(tmp_path: Path) -> None:
    fixes, images = tmp_path / "fixes.jsonl", NoiseImages()
    check(images, "tiny_cpu", {"runtime.workers": 0}, fix_list=fixes)
    assert without_skipped(images, fixes) is images
    assert both_without_skipped(images, images, fixes) == (images, images)


def test_a_list_that_is_read_is_not_written_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixes, link = tmp_path / "fixes.jsonl", tmp_path / "link.jsonl"
    fixes.write_text('{"name": "a/cut.jpg"}\n')
    link.symlink_to(fixes)
    assert main(["check", str(folder), "--data.skip", str(link), "--fix-list", str(fixes)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stopmim: error: --fix-list {fixes}: data.skip reads this list")
    assert read_list(fixes) == {"a/cut.jpg"}


def test_a_torn_line_costs_neither_the_line_after_it_nor_the_list(tmp_path: Path) -> None:
    file, lines = tmp_path / "bad_files.jsonl", [{"name": f"noise {i}"} for i in range(3)]
    whole = json.dumps(lines[1])
    append_jsonl(file, lines[0])
    for end in range(1, len(whole)):
        file.write_text(json.dumps(lines[0]) + "\n" + whole[:end])
        assert read_list(file) == {"noise 0"}
        append_jsonl(file, lines[2])
        assert list(read_jsonl(file)) == [lines[0], lines[2]]
        assert read_list(file) == {"noise 0", "noise 2"}
    append_jsonl(file, lines[1])
    assert len(file.read_text().splitlines()) == 4  # no empty line after one that is whole


def test_a_folder_whose_name_is_no_text_is_named_in_a_printable_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "images").rename(tmp_path / os.fsdecode(b"im\xffges"))
    assert main(["check", str(root), "--preset", "tiny_cpu", "--optim.batch_size", "8"]) == 0
    out = capsys.readouterr().out
    assert "im\\udcffges" in out.splitlines()[0]
    out.encode()


def test_another_list_is_another_data_set(tmp_path: Path) -> None:
    fixes = tmp_path / "fixes.jsonl"
    fixes.write_text('{"name": "noise 3"}\n')
    config = tiny(data={"skip": str(fixes)})
    pretrain(NoiseImages(), tmp_path / "run", config, stop_at=2)
    fixes.write_text('{"name": "noise 4"}\n')
    with pytest.raises(DataError, match="not the images this run began with"):
        pretrain(NoiseImages(), tmp_path / "run", config)


def test_a_run_that_met_too_many_bad_files_goes_on_as_it_advises(tmp_path: Path) -> None:
    images = NoiseImages(broken=(3, 17))
    with pytest.raises(DataError, match=r"raise --data.max_bad to continue") as said:
        pretrain(images, tmp_path / "my a", tiny(data={"max_bad": 0.0}))
    pretrain(images, tmp_path / "my a", tiny(data={"max_bad": 0.1}))
    (listed,) = shlex.split(str(said.value).split("--data.skip ")[1])
    pretrain(images, tmp_path / "b", tiny(data={"max_bad": 0.05, "skip": listed}))


def test_the_bad_files_of_a_run_can_be_skipped_by_the_next(tmp_path: Path) -> None:
    images = NoiseImages(broken=(3, 17))
    first = pretrain(images, tmp_path / "a", tiny(data={"max_bad": 0.1}))
    bad = first.path / "bad_files.jsonl"
    assert read_list(bad) == {"noise 3", "noise 17"}
    second: Run = pretrain(images, tmp_path / "b", tiny(data={"skip": str(bad), "max_bad": 0.0}))
    assert second.about["data"]["images"] == 38


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read this list"),
        ("noise 3\n", "not a list of images"),
        ('{"path": "noise 3"}\n', "not a list of images"),
        ("[1]\n", "not a list of images"),
        ('{"name": "other"}\n', "names none of the 40 images"),
        ("".join(f'{{"name": "noise {i}"}}\n' for i in range(40)), "names all of the 40"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "list.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=message):
        without_skipped(NoiseImages(), file)


# ----------------------------------------------------------------------- many channels


def test_a_report_shows_the_range_and_the_gaps_of_each_channel() -> None:
    pixels = np.random.default_rng(0).normal(5, 1, (12, 16, 16, 4)).clip(1, 9).astype(np.float32)
    pixels[2:4, 0, 0, 1] = np.nan
    pixels[..., 2] = np.nan
    pixels[5, ..., 3] = 2
    names = ["red", "nir", "lost", "height"]
    images = Arrays(pixels, {}, [], "x", channel_names=names)
    text = check(images, "tiny_cpu", {"runtime.workers": 0}).text()
    assert "channels  4 channels, float\n" in text
    said = " ".join(text.split())
    assert "red: 1." in said
    assert "in 2 images lost: no finite value, with NaN or infinity in all images" in said
    assert "empty in 1 images" in said
    assert max(map(len, text.splitlines())) <= 80


def test_an_image_of_other_channels_is_listed_as_broken() -> None:
    class Mixed(NoiseImages):
        def read(self, i: int) -> np.ndarray:
            pixels = super().read(i).astype(np.uint16)
            return pixels if i != 7 else pixels[..., :1]

    report = check(Mixed(), "tiny_cpu", {"runtime.workers": 0, "optim.batch_size": 8})
    why = "1 channel, 16 bit, where the others have 3 channels, 16 bit"
    assert report.bad == [("noise 7", why)]


def test_copies_are_found_among_images_of_many_channels() -> None:
    pixels = Bands(12, 48).pixels.copy()
    pixels[3] = pixels[8]
    pixels[5] = pixels[1] // 2  # another exposure
    report = check(Arrays(pixels, {}, [], "x"), "tiny_cpu", {"runtime.workers": 0})
    assert [sorted(group) for group in report.copies] == [["x 3", "x 8"]]
    assert [sorted(group) for group in report.near] == [["x 1", "x 5"]]
