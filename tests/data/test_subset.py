"""Subsets of a source, and its split into two parts."""

from pathlib import Path

import numpy as np
import pytest

from stopmim.base.errors import DataError
from stopmim.cli import main
from stopmim.data.images import Images
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.folder import Folder
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import Subset, check_named, find_named, split_by_class, underlying
from stopmim.evals.inputs import choose_labels, open_encoder
from stopmim.evals.views import middle
from tiny import write_folder, write_parts


def source(counts: list[int]) -> Arrays:
    label = np.repeat(np.arange(len(counts)), counts)
    pixels = np.arange(len(label), dtype=np.uint8)[:, None, None, None] + np.zeros(
        (1, 2, 2, 3), int
    )
    return Arrays(pixels.astype(np.uint8), {"class": label}, [], "numbers")


def values(images: Subset) -> list[int]:
    return [int(images.read(i).max()) for i in range(len(images))]


def test_some_images_keep_names_pixels_and_labels_and_have_a_fingerprint_of_their_own() -> None:
    images = source([5, 5])
    some = Subset(images, [7, 3])
    assert [some.name(i) for i in range(2)] == [images.name(3), images.name(7)]
    assert values(some) == [3, 7]
    assert some.labels["class"].tolist() == [0, 1]
    assert len({images.fingerprint, some.fingerprint, Subset(images, [3, 8]).fingerprint}) == 3


class Named(Arrays):
    """Images of which only the names matter."""

    def __init__(self, *names: str) -> None:
        super().__init__(np.zeros((len(names), 1, 1, 3), np.uint8), {}, [], "")
        self.names = names

    def name(self, i: int) -> str:
        return self.names[i]


@pytest.mark.parametrize(
    ("names", "listed", "found"),
    [
        # Whole paths, with or without ./, split and extension, before base names.
        ("cat/7.png dog/7.png", "dog/7.png", "dog/7.png"),
        ("cat/7.png dog/7.png", "./dog/7.png train/cat/7.png", "cat/7.png dog/7.png"),
        ("cat/7.png dog/7.png", "dog/7", "dog/7.png"),
        ("7.png dog/7.png", "7.png", "7.png"),
        ("a/7.png.jpg a/7.png", "a/7.png 7.png", "a/7.png"),
        ("a/7.png a/7", "a/7", "a/7"),
        ("a/cat/7.png cat/7.png", "cat/7.png", "cat/7.png"),
        ("1.tar/cat/7.png 2.tar/dog/7.png", "dog/7.png", "2.tar/dog/7.png"),
        ("1.tar/cat/7.png 2.tar/dog/7.png", "train/dog/7.png", "2.tar/dog/7.png"),
        # Unique base names, wherever the images are.
        ("n1/n1_5.JPEG n2/n2_5.JPEG", "n2_5.JPEG n2_5.JPEG", "n2/n2_5.JPEG"),
        ("n1/n1_5.JPEG n2/n2_5.JPEG", "n2_5", "n2/n2_5.JPEG"),
        ("n2_5.JPEG n1_5.JPEG", "n1/n1_5.JPEG", "n1_5.JPEG"),
        ("part/3.png part/7.png", "elsewhere/3.png", "part/3.png"),
        # As Windows writes them, but only what is not there as it is listed.
        ("cat/7.png dog/7.png", "dog\\7.png .\\cat\\7.png", "cat/7.png dog/7.png"),
        ("cat/7.png dog/7.png", "C:\\photos\\dog\\7.PNG", "dog/7.png"),
        ("n1/n1_5.JPEG n2/n2_5.JPEG", "n2/n2_5.jpeg n1_5.Jpeg", "n1/n1_5.JPEG n2/n2_5.JPEG"),
        ("a/7.JPG a/7.jpg", "a/7.JPG", "a/7.JPG"),
        ("a\\7.png a/7.png", "a\\7.png", "a\\7.png"),
    ],
)
def test_a_list_finds_whole_paths_and_unique_base_names(
    names: str, listed: str, found: str, tmp_path: Path
) -> None:
    images, file = Named(*names.split()), tmp_path / "few.txt"
    file.write_text("\n\n".join(listed.split()) + "\n")
    assert [images.name(i) for i in find_named(images, file)] == found.split()


@pytest.mark.parametrize(
    ("names", "listed", "said"),
    [
        ("a/7.png b/7.png c/7.png", "7.png", "7.png could be a/7.png or b/7.png; write its whole"),
        ("a/7.png b/7.png", "elsewhere/7.png", "elsewhere/7.png could be a/7.png or b/7.png"),
        ("a/7.png a/7.jpg", "a/7", "a/7 could be a/7.png or a/7.jpg"),
        ("a/x/7.png b/x/7.png", "x/7.png", "x/7.png could be a/x/7.png or b/x/7.png"),
        ("a/7.png b/8.png", "9.png 7.png 5.png", "among the 2 training images: 9.png and 1 more"),
        # There is a folder b, and it has no such file.
        ("a/7.png b/8.png", "b/7.png", "not among the 2 training images: b/7.png$"),
        ("a/7.png b/8.png", "train/b/7.png", "not among the 2 training images: train/b/7.png$"),
        ("1.tar/b/7.png 1.tar/a/8.png", "b/8.png", "not among the 2 training images: b/8.png$"),
        ("a/7.png b/8.png", "7.jpg", "not among the 2 training images: 7.jpg$"),
        ("a/7.png b/8.png", r"b\7.png", r"not among the 2 training images: b\\7.png$"),
        ("a/7.JPG a/7.jpg", "a/7.Jpg", "a/7.Jpg could be a/7.JPG or a/7.jpg"),
        ("Cat/7.png cat/8.png", "cat/7.png", "not among the 2 training images: cat/7.png$"),
        ("a/7.png", "", "an empty list; expected the name of an image per line"),
    ],
)
def test_a_list_that_is_ambiguous_or_names_others_is_refused(
    names: str, listed: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "few.txt"
    file.write_text("\n".join(listed.split()))
    with pytest.raises(DataError, match=rf"^[^\n]*few.txt: [^\n]*{said}"):
        find_named(Named(*names.split()), file)


def test_images_of_another_folder_than_the_one_in_the_list_are_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, file = Named("cat/c0.png", "fox/0.png", "fox/1.png"), tmp_path / "few.txt"
    images.labels = {"class": np.array([0, 1, 1])}
    file.write_text("train/cat/c0.png\n0.png\nfox/1.png\n")
    check_named(images, file, ["class"])
    assert capsys.readouterr().err == ""
    file.write_text("cat/c0.png\ndog/0.png\ndog/1.png\n")
    check_named(images, file, ["class"])
    said = " ".join(capsys.readouterr().err.split())
    assert "2 of its 3 images were found in another folder" in said
    assert "such as dog/0.png as fox/0.png" in said


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])  # each begins with a mark
def test_a_list_that_windows_wrote_means_the_same_and_is_not_warned_of(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, file = Named("cat/0.JPEG", "fox/0.JPEG", "fox/1.JPEG"), tmp_path / "few.txt"
    images.labels = {"class": np.array([0, 1, 1])}
    lines = ["", "train\\fox\\0.jpeg", "cat\\0.JPEG", "  ", "cat\\0.JPEG", "cat/0", ""]
    file.write_bytes("\r\n".join(lines).encode(encoding))
    assert find_named(images, file) == [0, 1]
    check_named(images, file, ["class"])
    assert capsys.readouterr().err == ""


def test_a_part_of_scenes_is_asked_what_scenes_are_asked_and_shown_whole() -> None:
    fit, test = split_by_class(Scenes(20, 24), 0.2, seed=0)
    assert isinstance(underlying(Subset(test, [0])), Scenes)
    assert choose_labels(fit, test, ()) == choose_labels(Scenes(8, 24), Scenes(8, 24), ())
    assert middle(open_encoder("random:vit_micro8@24"), test).resize == 24


def test_beside_a_class_other_numbers_are_asked_about_only_by_name() -> None:
    images = source([2, 2])
    images.labels = {"width": np.array([5, 6, 7, 8]), **images.labels}
    assert choose_labels(images, images, ()) == ["class"]
    assert choose_labels(images, images, ("width",)) == ["width"]
    del images.labels["class"]
    assert choose_labels(images, images, ()) == ["width"]


def test_hidden_labels_are_refused_by_name() -> None:
    images, hidden = source([2, 2]), source([2, 2])
    hidden.labels = {"class": np.array([0, -1, -1, -1])}
    with pytest.raises(DataError, match=r"^class: 3 of 4 test images .* below zero"):
        choose_labels(images, hidden, ())
    with pytest.raises(DataError, match=r"^class: 3 of 4 training images .* below zero"):
        choose_labels(hidden, images, ())


def test_images_without_labels_are_told_how_their_source_gets_them(tmp_path: Path) -> None:
    def refusal(train: Images, test: Images) -> str:
        with pytest.raises(DataError) as error:
            choose_labels(train, test, ())
        return str(error.value)

    flat, classes = Folder(write_folder(tmp_path / "a") / "part0"), Folder(tmp_path / "a")
    (tmp_path / "list.txt").write_text("a/part0/000.png\n")
    listed, array = open_images(tmp_path / "list.txt"), source([2, 2])
    array.labels = {}
    said = refusal(classes, flat)
    assert said.startswith("eval: the test images have no labels: put them in one folder per class")
    assert "FOLDER@LIST" in said
    assert "the training images have no labels" in refusal(flat, classes)
    assert "the images have no labels" in refusal(flat, Subset(flat, [0]))
    assert f"each line of {tmp_path}/list.txt a label" in refusal(listed, listed)
    assert "an integer array called labels" in refusal(array, array)
    array.labels = {"width": np.arange(4)}
    said = refusal(classes, array)
    assert said.endswith("training images have class, test images width")


def test_two_parts_are_all_images_once_and_have_their_share_of_every_class() -> None:
    images = source([10, 20, 3, 1])
    fit, test = split_by_class(images, 0.2, seed=0)
    assert sorted(values(fit) + values(test)) == list(range(34))
    # Of three a fifth is less than one image, and one is tested; a lone image is never tested.
    assert np.bincount(test.labels["class"], minlength=4).tolist() == [2, 4, 1, 0]
    for part in (fit, test):
        assert [images.labels["class"][v] for v in values(part)] == part.labels["class"].tolist()
    assert fit.fingerprint != test.fingerprint


def test_a_source_is_split_by_its_classes_and_not_by_other_numbers() -> None:
    images = source([10, 20])
    images.labels = {"area": np.arange(30), **images.labels}
    _, test = split_by_class(images, 0.2, seed=0)
    assert np.bincount(test.labels["class"]).tolist() == [2, 4]


def test_no_class_is_tested_whole_and_the_seed_decides_who_is() -> None:
    images = source([4, 4])
    fit, test = split_by_class(images, 0.99, seed=0)
    assert np.bincount(fit.labels["class"]).tolist() == [1, 1]
    drawn = {tuple(values(split_by_class(images, 0.5, seed)[1])) for seed in range(8)}
    assert len(drawn) > 4
    assert values(split_by_class(images, 0.99, seed=0)[1]) == values(test)


def test_a_folder_without_a_test_part_can_be_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat", "dog"):
        write_folder(tmp_path / "data" / name, 5)
    words = ["eval", "knn", "random:vit_micro8@24", "--data", str(tmp_path / "data")]
    assert main(words) == 3
    assert "eval --hold-out 0.2 makes one" in capsys.readouterr().err
    assert main([*words, "--hold-out", "0.4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"On {tmp_path / 'data'} (4 images)" in said  # two of each class
    assert main([*words, "--hold-out", "1"]) == 2
    assert "--hold-out 1: expected a share" in capsys.readouterr().err


def test_loose_images_are_left_out_of_an_evaluation_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat", "dog", "."):
        write_folder(tmp_path / "data" / name, 5)
    for part in ("part0", "part1", "part2"):  # of the last, whose images are to lie loose
        for file in (tmp_path / "data" / part).iterdir():
            file.rename(tmp_path / "data" / f"{part}{file.name}")
        (tmp_path / "data" / part).rmdir()
    words = ["eval", "knn", "random:vit_micro8@24", "--data", str(tmp_path / "data")]
    assert main([*words, "--hold-out", "0.4"]) == 0
    said = capsys.readouterr()
    assert said.err.count("5 images lie beside the class folders, without a label: left out") == 1
    assert f"On {tmp_path / 'data'} (4 images)" in " ".join(said.out.split())


def test_a_folder_with_a_test_part_is_not_split_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_parts(tmp_path / "data")
    words = ["eval", "knn", "random:vit_micro8@24", "--hold-out", "0.2", "--data"]
    assert main([*words, str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--hold-out 0.2: {root} has a test split" in line
    fixes = tmp_path / "fixes.jsonl"
    fixes.write_text('{"name": "part0/003.png"}\n')
    assert main([*words, str(root / "train"), "--skip", str(fixes)]) == 0
