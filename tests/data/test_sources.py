"""Every source in its real format: how it is recognised, and its images, labels and splits."""

import hashlib
import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_tar import shard

from stopmim import pretrain
from stopmim.base.errors import DataError, UserError
from stopmim.data.checks.check import check
from stopmim.data.images import Images
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.cifar import interpret
from stopmim.data.sources.folder import Files, Folder
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scanning import class_folders
from tiny import assert_same_run, tiny


def put(root: Path, *paths: str) -> None:
    """Small images, each with its number as red."""
    for i, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        with (root / path).open("wb") as file:
            Image.new("RGB", (4, 3), (i, 0, 0)).save(file, "PNG")


def names(images: Images) -> list[str]:
    return [images.name(i) for i in range(len(images))]


def values(images: Images) -> list[int]:
    return [int(images.read(i)[0, 0, 0]) for i in range(len(images))]


def labels(images: Images) -> list[int]:
    assert images.labels["class"].dtype == np.int64
    return images.labels["class"].tolist()


# ------------------------------------------------------------ folders with splits


@pytest.mark.parametrize("test", ["val", "validation", "test"])
def test_a_root_with_train_and_val_has_these_splits(tmp_path: Path, test: str) -> None:
    put(tmp_path, "train/ant/1.png", "train/bee/2.png", "train/cat/3.png", f"{test}/cat/4.png")
    (tmp_path / "readme.txt").touch()
    assert names(open_images(tmp_path)) == ["ant/1.png", "bee/2.png", "cat/3.png"]
    assert names(open_images(tmp_path, "train")) == ["ant/1.png", "bee/2.png", "cat/3.png"]
    found = open_images(str(tmp_path), "test")
    assert names(found) == ["cat/4.png"]
    assert labels(found) == [2]  # numbered as in train, though it is the only one here
    assert labels(open_images(tmp_path)) == [0, 1, 2]
    assert len(open_images(f"folder:{tmp_path}")) == 4


def test_images_beside_the_splits_are_mentioned_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, "train/a/1.png", "train/b/2.png", "val/a/3.png", "x.png", "y.png", ".z.png")
    for split in (None, "train", "test"):
        open_images(tmp_path, split)
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 images lie beside train/ and its test split" in line
    assert "as x.png" in line


def test_a_class_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "train/ant/1.png", "train/bee/2.png", "val/eel/3.png")
    with pytest.raises(DataError, match="class eel is not among"):
        open_images(tmp_path, "test")


@pytest.mark.parametrize(
    "entry", ["._0.jpg", "folder.jpg/", "again -> bee", "all -> .", "deep -> bee/deep", "out -> /o"]
)
def test_classes_for_a_test_part_are_those_of_training(tmp_path: Path, entry: str) -> None:
    root = tmp_path / "train"
    (tmp_path / "o").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "o" / "0.png")
    for folder in ("ant", "bee/deep"):
        (root / folder).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(root / folder / "0.png")
    name, link, target = entry.partition(" -> ")
    if link:
        (root / name).symlink_to(target.replace("/o", str(tmp_path / "o")))
    elif name.endswith("/"):
        (root / name).mkdir()
    else:
        (root / name).write_bytes(b"macOS")
    expected = ["ant", "bee"] + ["out"] * (name == "out")
    assert class_folders(root) == Folder(root).classes == expected


def test_class_folders_called_train_and_bus_are_classes(tmp_path: Path) -> None:
    put(tmp_path, "train/1.png", "bus/2.png", "test/3.png")
    images = open_images(tmp_path)
    assert isinstance(images, Folder)
    assert images.classes == ["bus", "test", "train"]
    with pytest.raises(DataError, match="no test split"):
        open_images(tmp_path, "test")


def test_the_frames_of_davis_are_images_once(tmp_path: Path) -> None:
    put(tmp_path, "JPEGImages/480p/bear/0.jpg", "JPEGImages/Full-Resolution/bear/0.jpg")
    put(tmp_path, "Annotations/480p/bear/0.png")
    assert names(open_images(tmp_path)) == ["bear/0.jpg"]


# ------------------------------------------------------------------------- lists

IMAGENET = [
    "n01440764/n01440764_1.JPEG",
    "n01530575/n01530575_2.JPEG",
    "n02510455/n02510455_3.JPEG",
]


def test_a_list_of_one_percent_is_numbered_by_all_classes_of_the_root(tmp_path: Path) -> None:
    put(tmp_path, *(f"train/{p}" for p in IMAGENET), f"val/{IMAGENET[2]}")
    (tmp_path / "1percent.txt").write_text("n02510455_3.JPEG\nn01530575_2.JPEG\n")
    for root in (tmp_path, tmp_path / "train"):
        images = open_images(f"{root}@{tmp_path}/1percent.txt")
        assert values(images) == [2, 1]
        assert labels(images) == [2, 1]
    whole = Folder(tmp_path / "train")
    assert isinstance(images, Files)
    assert images.classes == whole.classes == class_folders(tmp_path / "train")
    tested = open_images(f"{tmp_path}@{tmp_path}/1percent.txt", "test")
    assert labels(tested) == [2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b/2.png\na/1.png\n", [1, 0]),  # without labels: by folder
        ("b/2.png\t7\r\na/1.png\t-3\r\n", [7, -3]),
        ("b/2.png,7\n\na/1.png,8", [7, 8]),
        ("b/2.png 7\na/1.png 8\n", [7, 8]),
        ("b/2.png zebra\na/1.png 8\n", [1, 0]),  # names: sorted
        ("c d/5, 6.png,zebra\na/1.png,ant\n", [1, 0]),  # the last comma, not the first
        ("c d/5, 6.png\na/1.png\n", [2, 0]),  # blanks and commas in a path alone
    ],
)
def test_a_line_is_a_path_or_a_path_and_a_label(
    tmp_path: Path, text: str, expected: list[int]
) -> None:
    put(tmp_path, "a/1.png", "b/2.png", "c d/5, 6.png")
    (tmp_path / "list.txt").write_text(text)
    images = open_images(tmp_path / "list.txt")
    assert len(images) == 2
    assert labels(images) == expected
    assert images.name(1) == "a/1.png"


@pytest.mark.parametrize(
    ("text", "expected", "classes"),
    [
        ("path,label\nb/2.png,7\na/1.png,8\n", [7, 8], []),
        ("\ufefffile;Species\r\nb/2.png;zebra\r\na/1.png;ant\r\n", [1, 0], ["ant", "zebra"]),
        ('label\tfile\nzebra\t"b/2.png"\nant\ta/1.png\n', [1, 0], ["ant", "zebra"]),
        ('file,caption,label\n"c d/5, 6.png","a, b",x\na/1.png,c,y\n', [0, 1], ["x", "y"]),
        ("file,y,site\nb/2.png,,3\na/1.png,ant,4\n", [-1, 0], ["ant"]),  # a blank: unknown
        ("file,y\nb/2.png,\na/1.png,10\n", [-1, 10], []),  # integers are kept beside it
        ("filename\nb/2.png\na/1.png\n", [1, 0], ["a", "b", "c d"]),  # no labels: by folder
    ],
)
def test_a_list_with_a_header_names_its_columns(
    tmp_path: Path, text: str, expected: list[int], classes: list[str]
) -> None:
    put(tmp_path, "a/1.png", "b/2.png", "c d/5, 6.png")
    (tmp_path / "list.csv").write_text(text, encoding="utf-8", newline="")
    for source in (f"{tmp_path}/list.csv", f"{tmp_path}@{tmp_path}/list.csv"):
        images = open_images(source)
        assert isinstance(images, Files)
        assert (labels(images), images.classes) == (expected, classes)
        assert images.name(1) == "a/1.png"


def test_columns_of_integers_are_labels_by_their_names(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png", "b/2.png")
    table = tmp_path / "list.csv"
    table.write_text("file,count,site,label\na/1.png,3,x,1\nb/2.png,4,y,0\n")
    found = open_images(table).labels
    assert {k: v.tolist() for k, v in found.items()} == {"count": [3, 4], "class": [1, 0]}
    table.write_text("file,place,score\na/1.png,sea,0.5\nb/2.png,lake,\n")  # the one of text
    images = open_images(table)
    assert (labels(images), images.classes) == ([1, 0], ["lake", "sea"])  # type: ignore[attr-defined]
    said = check(table, "tiny_cpu").text()
    assert "no labels: score; labels are whole numbers, or named class" in said
    table.write_text("file,count,score\na/1.png,3,0.5\nb/2.png,4,1.5\n")
    assert {k: v.tolist() for k, v in open_images(table).labels.items()} == {"count": [3, 4]}
    # Of two columns of text neither is called a label, and folders were not asked for.
    table.write_text("file,site,name\na/1.png,x,p\nb/2.png,y,q\n")
    assert open_images(table).labels == {}


def test_the_fingerprint_of_a_list_is_that_of_the_chosen_files(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png", "a/2.png", "a/3.png")
    marks = set()
    for text in ("a/1.png\na/2.png", "a/2.png\na/1.png", "a/1.png\na/3.png", "a/1.png"):
        (tmp_path / "list.txt").write_text(text)
        marks.add(open_images(tmp_path / "list.txt").fingerprint)
    assert len(marks) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a/1.png\na/8.png\na/9.png\n", r"2 of 3 files are missing, first a/8\.png"),
        ("a/1.png\na/1.png\n", r"a/1\.png is listed 2 times"),
        ("../a/1.png\n", r"\.\./a/1\.png: not a path below"),
        ("/etc/x.png\n", "not a path below"),
        ("a/1.png\na/2\n", "a/2: not an image file; every line"),
        ("\n\n", "an empty list"),
        ("path,label\na/1.png,x,y\n", "3 values in row 2, but 2 in the header; quote"),
        ("path,label\na/1.png,x\nb/2,y\n", "in none of the columns path, class is every value"),
        ("pipe.png\n", "1 of 1 files are missing, first pipe"),  # it would block forever
        ("n01440764_1.JPEG\n", r"first n01440764/n01440764_1\.JPEG"),
    ],
)
def test_a_list_that_cannot_be_right_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    put(tmp_path, "a/1.png", "b/2.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        open_images(f"{tmp_path}@{tmp_path}/list.txt")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------ arrays


def test_an_npz_of_images_with_any_integer_labels(tmp_path: Path) -> None:
    images = np.arange(5 * 4 * 6 * 3, dtype=np.uint8).reshape(5, 4, 6, 3)
    y, colour, mean = np.arange(5, dtype=np.uint8), np.arange(5)[:, None], np.ones(5)
    np.savez(tmp_path / "a.npz", x=images, y=y, colour=colour, mean=mean, other=np.arange(6))
    found = open_images(tmp_path / "a.npz")
    assert np.array_equal(found.read(3), images[3])
    assert {k: v.tolist() for k, v in found.labels.items()} == {
        "class": [0, 1, 2, 3, 4],
        "colour": [0, 1, 2, 3, 4],
    }
    assert all(v.dtype == np.int64 for v in found.labels.values())
    np.savez_compressed(tmp_path / "b.npz", anything=images)
    assert open_images(tmp_path / "b.npz").fingerprint == found.fingerprint
    images[0, 0, 0, 0] += 1
    np.savez(tmp_path / "b.npz", x=images)
    assert open_images(tmp_path / "b.npz").fingerprint != found.fingerprint


def test_an_npz_in_the_layout_of_medmnist_has_its_splits(tmp_path: Path) -> None:
    parts = {"train": 6, "val": 2, "test": 3}
    arrays = {f"{p}_images": np.full((n, 28, 28), n, np.uint8) for p, n in parts.items()}
    arrays |= {f"{p}_labels": np.arange(n, dtype=np.uint8)[:, None] for p, n in parts.items()}
    np.savez(tmp_path / "pathmnist.npz", **arrays)  # type: ignore[arg-type]
    train, test = (
        open_images(tmp_path / "pathmnist.npz"),
        open_images(tmp_path / "pathmnist.npz", "test"),
    )
    assert (len(train), len(test)) == (6, 3)
    assert train.read(0).shape == (28, 28, 3)  # grey
    assert labels(test) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros((4, 8, 8, 3), np.complex64)}, "0 arrays of images"),
        ({"x": np.zeros((4, 3, 8, 8), np.uint8)}, "0 arrays of images"),
        ({"x": np.zeros((4, 8, 8), np.uint8), "z": np.zeros((4, 8, 8), np.uint8)}, "2 arrays"),
        ({"x": np.array([{}, []], object)}, "cannot|safely"),
    ],
)
def test_an_npz_without_images_is_refused(
    tmp_path: Path, arrays: dict[str, Any], said: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=said):
        open_images(tmp_path / "a.npz")


def test_a_damaged_npz_is_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 8, 8, 3), np.uint8))
    data = (tmp_path / "a.npz").read_bytes()
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "a.npz").write_bytes(data[:cut])
        with pytest.raises(DataError, match="not a NumPy archive"):
            open_images(tmp_path / "a.npz")


# --------------------------------------------------------------------- CIFAR-100

NAMES = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
tulip turtle wardrobe whale willow_tree wolf woman worm"""
SUPER_NAMES = """aquatic_mammals fish flowers food_containers fruit_and_vegetables
household_electrical_devices household_furniture insects large_carnivores
large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1
vehicles_2"""
FINE, COARSE = NAMES.split(), SUPER_NAMES.split()


class Python2:
    """Writes what cPickle of Python 2 wrote, protocol 2."""

    def __init__(self) -> None:
        self.out, self.memo = b"\x80\x02", 0

    def put(self) -> None:
        self.memo += 1
        small = self.memo < 256
        self.out += b"q" + bytes([self.memo]) if small else b"r" + struct.pack("<I", self.memo)

    def text(self, value: bytes) -> None:
        small = len(value) < 256
        self.out += b"U" + bytes([len(value)]) if small else b"T" + struct.pack("<i", len(value))
        self.out += value
        self.put()

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        else:
            small = 0 <= value < 65536
            self.out += (
                b"M" + struct.pack("<H", value) if small else b"J" + struct.pack("<i", value)
            )

    def name(self, module: str, attribute: str) -> None:
        self.out += f"c{module}\n{attribute}\n".encode()
        self.put()

    def code(self, code: bytes) -> None:
        self.out += code
        self.put()

    def array(self, value: np.ndarray) -> None:
        self.name("numpy.core.multiarray", "_reconstruct")
        self.name("numpy", "ndarray")
        self.integer(0)
        self.code(b"\x85")
        self.text(b"b")
        self.code(b"\x87")
        self.code(b"R")
        self.out += b"("
        self.integer(1)
        for n in value.shape:
            self.integer(n)
        self.code(b"\x86")
        self.name("numpy", "dtype")
        self.text(b"u1")
        self.integer(0)
        self.integer(1)
        self.code(b"\x87")
        self.code(b"R")
        self.out += b"("
        self.integer(3)
        self.text(b"|")
        self.out += b"NNN"
        self.integer(-1)
        self.integer(-1)
        self.integer(0)
        self.code(b"t")
        self.out += b"b\x89"
        self.text(value.tobytes())
        self.code(b"t")
        self.out += b"b"

    def dump(self, value: dict[str, Any]) -> bytes:
        self.code(b"}")
        self.out += b"("
        for key, item in value.items():
            self.text(key.encode())
            if isinstance(item, np.ndarray):
                self.array(item)
            elif isinstance(item, str):
                self.text(item.encode())
            else:
                self.code(b"]")
                self.out += b"("
                for entry in item:
                    self.text(entry.encode()) if isinstance(entry, str) else self.integer(entry)
                self.out += b"e"
        return self.out + b"u."


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
PIXELS[0, :, :2] = 10  # bytes that text would take for ends of lines
CLASSES, SUPERS = [3, 99, 0, 41, 7, 3], [19, 0, 4, 11, 7, 19]


def cifar_python(root: Path) -> Path:
    meta = Python2().dump({"fine_label_names": FINE, "coarse_label_names": COARSE})
    # The file of the release, as torchvision and others know it.
    assert hashlib.md5(meta).hexdigest() == "7973b15100ade9c7d40fb424638fde48"
    root.mkdir()
    (root / "meta").write_bytes(meta)
    for part, rows in (("train", slice(0, 4)), ("test", slice(4, 6))):
        batch = {
            "filenames": [f"image_{i}.png" for i in range(6)][rows],
            "batch_label": f"{part}ing batch 1 of 1",
            "fine_labels": CLASSES[rows],
            "coarse_labels": SUPERS[rows],
            "data": PIXELS[rows].reshape(-1, 3072),
        }
        (root / part).write_bytes(Python2().dump(batch))
    return root


def cifar_binary(root: Path) -> Path:
    root.mkdir()
    (root / "fine_label_names.txt").write_text("\n".join(FINE) + "\n")
    for part, rows in (("train", range(4)), ("test", range(4, 6))):
        records = (bytes([SUPERS[i], CLASSES[i]]) + PIXELS[i].tobytes() for i in rows)
        (root / f"{part}.bin").write_bytes(b"".join(records))
    return root


@pytest.mark.parametrize("write", [cifar_python, cifar_binary])
def test_both_releases_of_cifar100_give_the_same_images_and_labels(
    tmp_path: Path, write: Any
) -> None:
    root = write(tmp_path / "cifar-100")
    train, test = open_images(root), open_images(root, "test")
    assert isinstance(train, Arrays)
    assert isinstance(test, Arrays)
    for i in range(6):
        image = train.read(i) if i < 4 else test.read(i - 4)
        assert np.array_equal(image, PIXELS[i].transpose(1, 2, 0))
    assert labels(train) == CLASSES[:4]
    assert labels(test) == CLASSES[4:]
    assert train.labels["coarse"].tolist() == SUPERS[:4]
    assert train.classes == FINE
    assert len({train.fingerprint, test.fingerprint}) == 2


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("owned",)


def test_a_pickle_that_is_more_than_data_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = cifar_python(tmp_path / "cifar-100")
    whole = (root / "train").read_bytes()
    evil = [pickle.dumps(Evil(), protocol=p) for p in range(6)]
    evil += [
        b"cos\nsystem\n(S'touch owned'\ntR.",
        whole.replace(b"_reconstruct\n", b"frombuffer\n"),
    ]
    evil += [
        whole.replace(b"u1", b"O8"),
        whole[:100],
        whole[:-1],
        b"",
        b"\x80\x02K\x01.",
        b".",
        b"0",
    ]
    evil += [pickle.dumps({"data": np.array([Evil()], object)}, protocol=2)]
    for data in evil:
        (root / "train").write_bytes(data)
        with pytest.raises(DataError, match="not the pickle of CIFAR-100"):
            open_images(root)
    assert capsys.readouterr().out == ""


def test_pickles_of_the_oldest_protocol_are_data_too() -> None:
    assert interpret(b"(dp1\nS'a'\np2\n(lp3\nI1\naL22L\nasS'b'\nS'x'\ns.") == {
        "a": [1, 22],
        "b": "x",
    }


def test_a_truncated_binary_of_cifar_is_refused(tmp_path: Path) -> None:
    root = cifar_binary(tmp_path / "cifar-100")
    (root / "train.bin").write_bytes(b"\0" * 3075)
    with pytest.raises(DataError, match="3074-byte records"):
        open_images(root)


# ------------------------------------------------------------- iNaturalist, CLEVR


def test_inaturalist_is_numbered_by_the_third_part_of_the_path_over_train(tmp_path: Path) -> None:
    parts = {"train": ["Aves/2761/a.png", "Plantae/31/b.png", "Aves/300/c.png"]}
    parts["val"] = ["Aves/300/d.png"]
    for part, paths in parts.items():
        paths[:] = [f"train_val2018/{p}" for p in paths]
        put(tmp_path, *paths)
        about = {"images": [{"id": i, "file_name": p} for i, p in enumerate(paths)]}
        (tmp_path / f"{part}2018.json").write_text(json.dumps(about))
    train, test = open_images(tmp_path), open_images(tmp_path, "test")
    assert names(train) == parts["train"]
    assert labels(train) == [0, 2, 1]  # "2761" < "300" < "31"
    assert labels(test) == [1]


def test_clevr_has_the_classes_of_count_and_distance_with_their_exact_bounds(
    tmp_path: Path,
) -> None:
    depths = [7.0, 8.0, 8.0001, 8.5, 9.0, 9.5, 10.0, 10.1, 99.0]
    for part in ("train", "val"):
        paths = [f"CLEVR_{part}_{i:06d}.png" for i in range(len(depths))]
        put(tmp_path, *(f"images/{part}/{p}" for p in paths))
        scenes = [
            {
                "image_filename": p,
                "objects": [{"pixel_coords": [1, 2, d + more]} for more in range(3 + i % 8)][::-1],
            }
            for i, (p, d) in enumerate(zip(paths, depths, strict=True))
        ]
        (tmp_path / "scenes").mkdir(exist_ok=True)
        path = tmp_path / "scenes" / f"CLEVR_{part}_scenes.json"
        path.write_text(json.dumps({"info": {}, "scenes": scenes[: 9 if part == "train" else 2]}))
    train = open_images(tmp_path)
    assert train.labels["count"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert train.labels["distance"].tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 5]
    assert names(open_images(tmp_path, "test")) == [
        "images/val/CLEVR_val_000000.png",
        "images/val/CLEVR_val_000001.png",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"scenes": [{"image_filename": "x.png"}]}'])
def test_a_broken_file_of_scenes_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "scenes").mkdir()
    (tmp_path / "scenes/CLEVR_train_scenes.json").write_text(text)
    with pytest.raises(DataError, match=r"not (JSON|a file of CLEVR scenes)"):
        open_images(tmp_path)


# --------------------------------------------------------------------- in general


def test_the_test_split_of_scenes_has_the_next_seed() -> None:
    assert (
        open_images("scenes:4:24:6", "test").fingerprint == open_images("scenes:4:24:7").fingerprint
    )
    assert open_images("scenes:4:24:6", "train").fingerprint.endswith("-6")


def test_a_backup_beside_images_does_not_turn_them_into_shards(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png", "b/2.png")
    for name in ("backup.tar", "metadata.parquet", "a/metadata.parquet"):
        (tmp_path / name).touch()
    assert len(open_images(tmp_path)) == 2
    put(tmp_path / "a", "3.png")
    assert len(open_images(tmp_path / "a")) == 2


def test_a_run_on_shards_names_a_damaged_one_and_is_the_same_after_an_interruption(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [shard(tmp_path / f"set/train-{i}.tar", 20 * i, 20) for i in range(3)]
    paths[2].write_bytes(paths[2].read_bytes()[:100])
    whole = pretrain(tmp_path / "set", tmp_path / "whole", tiny())
    assert whole.about["data"]["images"] == 40
    assert (
        "1 folders or files cannot be read in full, such as train-2.tar" in capfd.readouterr().err
    )
    pretrain(tmp_path / "set", tmp_path / "cut", tiny(), stop_at=3)
    cut = pretrain(tmp_path / "set", tmp_path / "cut", tiny(runtime={"workers": 2}))
    assert_same_run(cut, whole)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{}/nothing", "no such folder or file"),
        (
            "{}/file.xyz",
            "not a source of images; give a folder, or a file that ends in .parquet, .tar",
        ),
        ("{}", "no images in this folder"),
        ("cifar100:{}", "not CIFAR-100; looked for train.bin"),
        ("tar:{}", "no file that ends in .tar"),
        ("parquet:{}", "no file that ends in .parquet"),
        ("clevr:{}", "CLEVR_train_scenes.json: No such file"),
        ("inat2018:{}", "train2018.json: No such file"),
        ("npz:{}/file.xyz", "not a NumPy archive"),
        ("list:{}/nothing.txt", "cannot be read: No such file"),
        ("{}/nothing@{}/list.txt", "cannot be read: No such file"),
        ("splits:{}", "train: no such folder"),
        ("davis:{}", "JPEGImages: no such folder"),
        ("{}/*.tar", "1 of 1 names lead to no file"),
    ],
)
def test_an_unknown_thing_is_one_line_that_says_what_was_looked_for(
    tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "file.xyz").write_bytes(b"?")
    with pytest.raises(UserError, match=said) as caught:
        open_images(source.replace("{}", str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_run_on_a_list_goes_on_from_the_source_that_run_json_names(tmp_path: Path) -> None:
    put(tmp_path / "set", *(f"{c}/{i}.png" for c in "ab" for i in range(12)))
    chosen = "\n".join(f"{c}/{i}.png" for c in "ba" for i in range(10))
    (tmp_path / "list.txt").write_text(chosen)
    source = f"{tmp_path}/set@{tmp_path}/list.txt"
    run = pretrain(source, tmp_path / "run", tiny(), stop_at=1)
    data = run.about["data"]
    assert data["images"] == 20
    assert open_images(data["source"]).fingerprint == data["fingerprint"]
    (tmp_path / "list.txt").write_text(chosen.replace("a/9.png", "a/11.png"))
    with pytest.raises(DataError):
        pretrain(source, tmp_path / "run", tiny(), stop_at=2)


def test_pixels_of_arrays_are_shared_and_not_copied_when_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.savez(out, images=np.zeros((4, 8, 8, 3), np.uint8))
    (tmp_path / "a.npz").write_bytes(out.getvalue())
    images = open_images(tmp_path / "a.npz")
    assert isinstance(images, Arrays)
    assert np.shares_memory(images.read(2), images.pixels)
