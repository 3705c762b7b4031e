import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stopmim.base.errors import DataError
from stopmim.data.decode import MAX_BYTES, BadImageError
from stopmim.data.sources.folder import Folder
from stopmim.data.sources.scanning import class_folders, describe_others
from stopmim.data.sources.source import printable
from stopmim.data.subset import without_loose


def put(path: Path, colour: tuple[int, int, int] = (9, 9, 9)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        Image.new("RGB", (4, 3), colour).save(file, "PNG")


def names(folder: Folder) -> list[str]:
    return [folder.name(i) for i in range(len(folder))]


def test_images_are_found_at_any_depth_and_sorted_by_path(tmp_path: Path) -> None:
    for name in ("z.png", "b/c/d/e.png", "a/2.png", "a-b/1.png", "a/10.png", "B/x.png"):
        put(tmp_path / name)
    folder = Folder(tmp_path)
    assert names(folder) == sorted(names(folder))
    assert set(names(folder)) == {
        "z.png",
        "b/c/d/e.png",
        "a/2.png",
        "a-b/1.png",
        "a/10.png",
        "B/x.png",
    }
    assert folder.classes == ["B", "a", "a-b", "b"]


def test_an_image_is_read_by_its_number(tmp_path: Path) -> None:
    for i in range(5):
        put(tmp_path / f"{i}.png", (i, 0, 0))
    folder = Folder(str(tmp_path))
    assert [folder.read(i)[0, 0, 0] for i in range(5)] == [0, 1, 2, 3, 4]
    assert folder.read(3).shape == (3, 4, 3)
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            folder.read(outside)


def test_a_relative_root_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "set/1.png")
    monkeypatch.chdir(tmp_path)
    folder = Folder("set")
    monkeypatch.chdir("/")
    assert folder.read(0).shape == (3, 4, 3)


def test_known_extensions_count_in_any_case_and_hidden_files_do_not(tmp_path: Path) -> None:
    wanted = ["a.JPEG", "b.jpg", "c.PnG", "d.webp", "e.BMP", "f.gif", "g.tif", "h.tiff", "i.ppm"]
    wanted += ["j.pgm", "k.jpe", "l.HEIC", "m.heif", "n.avif"]
    for name in (*wanted, "x.txt", "jpg", ".hidden.png", "._b.jpg", ".git/y.png", "png/readme.md"):
        put(tmp_path / name)
    assert names(Folder(tmp_path)) == wanted


def test_folders_below_the_root_are_classes_whatever_lies_below_them(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/deep/2.png", "ant/3.png", "cat-fish/4.png"):
        put(tmp_path / name)
    (tmp_path / "empty").mkdir()
    folder = Folder(tmp_path)
    assert folder.classes == ["ant", "cat", "cat-fish"]
    assert list(folder.labels) == ["class"]
    assert folder.labels["class"].dtype == np.int64
    for i, label in enumerate(folder.labels["class"]):
        assert folder.name(i).split("/")[0] == folder.classes[label]


@pytest.mark.parametrize("files", [["a/1.png", "a/2.png"], ["a/1.png", "2.png"], ["1.png"]])
def test_fewer_than_two_folders_mean_no_labels(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        put(tmp_path / name)
    folder = Folder(tmp_path)
    assert (folder.labels, folder.classes, folder.loose) == ({}, [], 0)


def test_loose_images_have_no_class_and_take_none_from_the_others(tmp_path: Path) -> None:
    for name in ("3.png", "a/1.png", "b/2.png", "z.png"):
        put(tmp_path / name)
    folder = Folder(tmp_path)
    assert names(folder) == ["3.png", "a/1.png", "b/2.png", "z.png"]
    assert folder.labels["class"].tolist() == [-1, 0, 1, -1]
    assert (folder.classes, folder.loose) == (["a", "b"], 2)
    assert class_folders(tmp_path) == ["a", "b"]
    tested = Folder(tmp_path, ["z", "b", "a"])  # numbered as in training
    assert tested.labels["class"].tolist() == [-1, 2, 1, -1]
    rest = without_loose(folder)
    assert [rest.name(i) for i in range(len(rest))] == ["a/1.png", "b/2.png"]
    assert without_loose(rest) is not folder
    (tmp_path / "3.png").unlink()
    (tmp_path / "z.png").unlink()
    assert without_loose(whole := Folder(tmp_path)) is whole


def test_files_that_are_not_read_are_counted_by_extension(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/2.CR2", "b/3.cr2", "b/4.txt", "README", "b/.5.cr2", "x.tar.gz"):
        put(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.txt")
    folder = Folder(tmp_path)
    assert folder.others == {"cr2": 2, "txt": 1, "": 1, "gz": 1}
    said = describe_others(folder.others)
    assert said.startswith("2 .cr2, 1 without extension, 1 .gz, 1 .txt; convert .cr2 to JPEG")
    (tmp_path / "a/1.png").unlink()
    with pytest.raises(DataError, match=r"no images in this folder .*; found 2 \.cr2, "):
        Folder(tmp_path)


def test_a_folder_of_countless_kinds_of_files_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stopmim.data.sources.scanning.KINDS", 5)
    put(tmp_path / "1.png")
    for i in range(20):
        (tmp_path / f"file.{i}").touch()
    folder = Folder(tmp_path)
    assert len(folder.others) <= 6
    assert sum(folder.others.values()) == 20
    assert "others" in describe_others({str(i): 1 for i in range(20)})


def test_the_fingerprint_knows_names_and_sizes_and_not_the_place(tmp_path: Path) -> None:
    for root in ("here", "there"):
        for name in ("a/1.png", "a/2.png"):
            put(tmp_path / root / name)
    here = Folder(tmp_path / "here").fingerprint
    assert here == Folder(tmp_path / "there").fingerprint
    assert len(here) == 64
    (tmp_path / "there/a/2.png").rename(tmp_path / "there/a/3.png")
    renamed = Folder(tmp_path / "there").fingerprint
    with (tmp_path / "here/a/2.png").open("ab") as file:
        file.write(b"!")
    grown = Folder(tmp_path / "here").fingerprint
    assert len({here, renamed, grown}) == 3


def test_a_looping_link_is_visited_once(tmp_path: Path) -> None:
    put(tmp_path / "a/1.png")
    put(tmp_path / "b/2.png")
    (tmp_path / "a/loop").symlink_to("..")
    (tmp_path / "a/again").symlink_to("../b")  # earlier in the order than the real b
    (tmp_path / "self.png").symlink_to("self.png")
    (tmp_path / "broken.png").symlink_to("nowhere.png")
    folder = Folder(tmp_path)
    assert names(folder) == ["a/1.png", "b/2.png"]
    assert folder.unreadable == ["self.png"]


def test_links_out_of_the_root_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/1.png")
    put(tmp_path / "elsewhere/more/2.png")
    root = tmp_path / "root"
    root.mkdir()
    (root / "one.png").symlink_to(tmp_path / "elsewhere/1.png")
    (root / "more").symlink_to(tmp_path / "elsewhere/more")
    (root / "twice").symlink_to(tmp_path / "elsewhere/more")
    folder = Folder(root)
    assert names(folder) == ["more/2.png", "one.png"]
    assert folder.read(0).shape == folder.read(1).shape == (3, 4, 3)


@pytest.mark.timeout(10)
def test_pipes_sockets_and_devices_are_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "1.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.png")
        assert names(Folder(tmp_path)) == ["1.png"]


HOSTILE = [
    b"new\nline.png",
    b"\x1b]0;owned\x07.png",
    b"<img onerror=alert(1)>.png",
    b"\xff\xfe not utf-8.png",
    b"-rf.png",
    b"~..png..png",
    b"back\\slash.png",
    b"new\\nline.png",
    "\u202egnp.exe.png".encode(),
    "\u00e9t\u00e9.png".encode(),
    b" .png",
    b"x" * 251 + b".png",
]


def test_hostile_names_are_read_and_named_in_one_printable_line(tmp_path: Path) -> None:
    for name in HOSTILE:
        put(Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))))
    folder = Folder(tmp_path)
    assert len(folder) == len(HOSTILE) == len(set(names(folder)))
    for i, line in enumerate(names(folder)):
        assert folder.read(i).shape == (3, 4, 3)
        assert line.isprintable()
        assert line.encode("utf-8")  # a lone surrogate would raise
    assert {"new\\nline.png", "new\\\\nline.png"} < set(names(folder))
    assert "\\udcff\\udcfe not utf-8.png" in names(folder)
    assert "\u00e9t\u00e9.png" in names(folder)
    assert "<img onerror=alert(1)>.png" in names(folder)


def test_the_names_of_classes_are_printable_too(tmp_path: Path) -> None:
    put(tmp_path / "a\nb/1.png")
    put(tmp_path / "c/2.png")
    assert Folder(tmp_path).classes == ["a\\nb", "c"]
    assert printable("a\x1b") == "a\\x1b"


def test_a_bad_file_is_an_error_of_that_image_alone(tmp_path: Path) -> None:
    put(tmp_path / "good.png")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.png").write_text("hello")
    put(tmp_path / "vanished.png")
    with (tmp_path / "vast.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    folder = Folder(tmp_path)
    (tmp_path / "vanished.png").unlink()
    reasons = {}
    for i in range(len(folder)):
        try:
            folder.read(i)
        except BadImageError as error:
            reasons[folder.name(i)] = str(error)
    assert reasons == {
        "empty.jpg": "empty file",
        "text.png": "not an image of a known format",
        "vanished.png": "No such file or directory",
        "vast.png": f"more than {MAX_BYTES} bytes",
    }


@pytest.mark.parametrize(
    ("name", "what"),
    [("missing\n", "no such folder"), ("file.png", "not a folder"), ("empty", "no images")],
)
def test_a_useless_root_is_one_line_that_says_what_and_where(
    tmp_path: Path, name: str, what: str
) -> None:
    put(tmp_path / "file.png")
    (tmp_path / "empty/sub").mkdir(parents=True)
    (tmp_path / "empty/notes.txt").touch()
    with pytest.raises(DataError, match=what) as caught:
        Folder(tmp_path / name)
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith(printable(str(tmp_path / name)) + ": ")
    assert "\n" not in str(caught.value)


AS_NOBODY = """
import os, sys
from stopmim.data import open_images
from stopmim.data.decode import BadImageError
from stopmim.data.sources.folder import Folder
from stopmim.base.errors import DataError
if os.getuid() == 0:  # root may read everything
    os.setresuid(65534, 65534, 65534)
folder = Folder(sys.argv[1])
print([folder.name(i) for i in range(len(folder))], folder.unreadable)
try:
    folder.read(1)
except BadImageError as error:
    print(error)
for closed in ("closed", "only_closed"):
    try:
        open_images(os.path.join(sys.argv[1], closed))
    except DataError as error:
        print(str(error).split(": ")[1])
"""


def test_what_may_not_be_read_is_named_and_only_a_closed_root_is_fatal() -> None:
    # Not tmp_path, which pytest makes for its owner alone.
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for name in ("1.png", "2.png", "closed/3.png", "only_closed/closed/4.png"):
            put(root / name)
        closed = [root / "2.png", root / "closed", root / "only_closed/closed"]
        root.chmod(0o755)
        for path in closed:
            path.chmod(0)
        command = [sys.executable, "-c", AS_NOBODY, place]
        child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        for path in closed:
            path.chmod(0o755)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == [
        "['1.png', '2.png'] ['closed/', 'only_closed/closed/']",
        "Permission denied",
        "this folder cannot be read; check its permissions",
        "no images in this folder or below (unreadable folders",  # cut at the next colon
    ]


def test_five_thousand_paths_cost_their_bytes_and_no_objects(tmp_path: Path) -> None:
    for c in range(5):
        (tmp_path / f"class{c}").mkdir()
        for i in range(1000):
            (tmp_path / f"class{c}/{i:06d}.jpeg").touch()
    folder = Folder(tmp_path)
    assert len(folder) == 5000
    held = pickle.dumps(folder)  # what a spawned worker receives
    characters = sum(map(len, names(folder)))
    assert len(held) < characters + 5000 * (8 + 8) + 2000
    assert not any(len(value) > 10 for value in vars(folder).values() if isinstance(value, list))
    again: Folder = pickle.loads(held)  # noqa: S301
    assert again.name(4321) == folder.name(4321) == "class4/000321.jpeg"
    assert again.fingerprint == folder.fingerprint


@pytest.mark.timeout(20)
def test_an_image_that_becomes_a_device_or_a_pipe_is_a_bad_image(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"x")
    folder = Folder(tmp_path)
    for name in ("a.png", "b.png"):
        (tmp_path / name).unlink()
    (tmp_path / "a.png").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "b.png")
    for i in range(2):
        with pytest.raises(BadImageError, match="not a regular file"):
            folder.read(i)
