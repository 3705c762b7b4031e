"""Lines that say when they are damaged, and files that are never written through a link."""

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from stopmim.base.errors import StorageError
from stopmim.base.files import (
    Count,
    append_jsonl,
    count_lines,
    holes,
    leftovers,
    open_to_read,
    own_folder,
    parse_jsonl,
    read_jsonl,
    replaced,
    sweep,
    write_whole,
)

TREES = [{"step": i, "loss": 0.1 * i, "name": f'a "~" é {i}'} for i in range(8)] + [{}]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for tree in TREES:
        append_jsonl(tmp_path / "log.jsonl", tree)
    return tmp_path / "log.jsonl"


# ------------------------------------------------------------------------------ lines


def test_lines_come_back_and_are_json_for_anyone(log: Path) -> None:
    assert list(read_jsonl(log)) == TREES
    for i, line in enumerate(log.read_text().splitlines()):
        tree = json.loads(line)
        assert list(tree)[-1] == "~"
        assert tree.pop("~").startswith(f"{i}:")
        assert tree == TREES[i]
    assert count_lines(parse_jsonl(log)) == (0, 0, len(TREES), 0)


def test_no_flipped_bit_changes_a_line_unnoticed(log: Path) -> None:
    data = log.read_bytes()
    for at in range(8 * len(data) - 1, 0, -7):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        log.write_bytes(changed)
        lines = parse_jsonl(log)
        found = [line.tree for line in lines if line.tree is not None]
        if found == TREES:  # a digit of the place of a line in the file
            assert [line.number for line in lines] != list(range(len(TREES))), at
        else:
            assert all(tree in TREES for tree in found), at
            count = count_lines(lines)
            assert count.damaged + count.missing >= 1, at


def test_lines_that_were_cut_out_are_counted(log: Path) -> None:
    text = log.read_text().splitlines(keepends=True)
    log.write_text("".join(text[:2] + text[4:]))
    assert count_lines(parse_jsonl(log)) == (0, 2, len(TREES), 0)
    append_jsonl(log, {"more": 1})
    assert count_lines(parse_jsonl(log)) == (0, 2, len(TREES) + 1, 0)  # still known later
    log.write_text("".join(text[3:]))
    assert count_lines(parse_jsonl(log)).missing == 3


def test_other_ends_of_lines_are_no_damage(log: Path) -> None:
    text = log.read_bytes()
    log.write_bytes(text.replace(b"\n", b"\r\n"))
    append_jsonl(log, {"more": 1})
    assert list(read_jsonl(log)) == [*TREES, {"more": 1}]
    assert count_lines(parse_jsonl(log)) == (0, 0, len(TREES) + 1, 0)


def test_lines_of_old_versions_count_as_intact_and_new_ones_follow(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"st')
    append_jsonl(log, {"step": 3})
    assert [line["step"] for line in read_jsonl(log)] == [1, 2, 3]
    assert count_lines(parse_jsonl(log)) == (1, 0, 4, 2)
    log.write_text(log.read_text() + '{"step": 4}\n')  # its check is lost, and who knows what else
    assert count_lines(parse_jsonl(log)).damaged == 2


@pytest.mark.parametrize("line", ["[1]", "3", "[" * 9999, '{"a": ' * 9999, '{"~": 1}', "9" * 5000])
def test_a_line_that_holds_anything_is_damaged(log: Path, line: str) -> None:
    log.write_text(line + "\n" + log.read_text())
    assert list(read_jsonl(log)) == TREES
    assert count_lines(parse_jsonl(log)).damaged == 1


def test_random_damage_is_never_read_as_something_else(log: Path) -> None:
    rng, data = random.Random(0), log.read_bytes()
    for _ in range(500):
        a = rng.randrange(len(data))  # the check of at least one other line survives
        b = min(len(data), a + rng.randrange(400))
        log.write_bytes(data[:a] + rng.randbytes(rng.randrange(9)) + data[b:])
        for tree in read_jsonl(log):
            assert tree in TREES


# ------------------------------------------------------------------------------ links


def victim(folder: Path) -> Path:
    file = folder / "victim"
    file.write_text("precious")
    return file


def test_a_file_is_replaced_and_a_link_in_its_place_not_followed(tmp_path: Path) -> None:
    target = victim(tmp_path)
    (tmp_path / "page.html").symlink_to(target)
    write_whole(tmp_path / "page.html", "new")
    assert not (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == "new"
    assert target.read_text() == "precious"


@pytest.mark.parametrize("kind", ["device", "link to a device", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    """``--out /dev/null`` by root took the device from the whole machine."""
    path = tmp_path / "out"
    match kind:
        case "device":
            path = Path(os.ttyname(os.openpty()[1]))
        case "link to a device":
            path.symlink_to("/dev/null")
        case _:
            os.mkfifo(path)
    before = path.lstat()
    with pytest.raises(StorageError, match="is a device or a pipe, so it is not replaced"):
        write_whole(path, "new")
    assert path.lstat() == before


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_nothing_is_appended_to_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    target, log = victim(tmp_path), tmp_path / "log.jsonl"
    match kind:
        case "link":
            log.symlink_to(target)
        case "dangling":
            log.symlink_to(tmp_path / "made")
        case "pipe":
            os.mkfifo(log)
        case _:
            log.mkdir()
    with pytest.raises(StorageError, match=r"log\.jsonl: (is a link|is not a regular|cannot read)"):
        append_jsonl(log, {"a": 1})
    with pytest.raises(StorageError, match=r"log\.jsonl: is (a link|not a regular file)"):
        append_jsonl(log, {"a": 1}, count=Count(0, 0, 0, 0))
    assert target.read_text() == "precious"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("path", ["", "/"])
def test_a_path_without_a_name_is_no_file_to_write(path: str) -> None:
    with pytest.raises(StorageError, match="cannot write: Is a directory"):
        write_whole(Path(path), "text")


@pytest.mark.parametrize("count", [None, Count(0, 0, 1, 1)], ids=["counted", "known"])
def test_a_file_of_another_name_as_well_is_copied_before_lines_are_appended(
    tmp_path: Path, count: Count | None
) -> None:
    other, log = tmp_path / "other", tmp_path / "log.jsonl"
    other.write_text('{"a": 1}\n')
    log.hardlink_to(other)
    for b in (2, 3):
        append_jsonl(log, {"b": b}, count=count)
    assert other.read_text() == '{"a": 1}\n'
    assert list(read_jsonl(log)) == [{"a": 1}, {"b": 2}, {"b": 3}]


def test_temporary_names_cannot_be_guessed_and_nothing_is_left(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with replaced(tmp_path / "a.png") as temporary:
            names.add(temporary.name)
            assert temporary.suffix == ".png"
            temporary.write_bytes(b"x")
    assert len(names) == 3
    with pytest.raises(RuntimeError), replaced(tmp_path / "a.png"):
        raise RuntimeError("a bug")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_only_the_leftovers_of_dead_processes_are_swept(tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    def slowly() -> None:
        with replaced(tmp_path / "report.html") as temporary:
            begun.set()
            assert end.wait(20)
            temporary.write_text("whole")

    writer = threading.Thread(target=slowly)
    writer.start()
    assert begun.wait(20)
    (tmp_path / ".new-dead").write_text("half")
    assert [path.name for path in leftovers(tmp_path)] == [".new-dead"]
    sweep(tmp_path)
    end.set()
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "whole"


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path, folder: bool) -> None:
    if (child := os.fork()) == 0:
        with replaced(tmp_path / "out", folder=folder) as temporary:
            (temporary / "weights" if folder else temporary).write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [path.name.startswith(".new-") for path in tmp_path.iterdir()] == [True]
    write_whole(tmp_path / "other", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_processes_that_write_into_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    children = []
    for number in range(4):
        if (child := os.fork()) == 0:
            try:
                for _ in range(300):
                    with replaced(tmp_path / f"{number}.txt") as temporary:
                        temporary.write_text("whole")
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{i}.txt" for i in range(4)]


def test_a_folder_of_a_run_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "figures").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="is a link"):
        own_folder(tmp_path / "figures")
    assert own_folder(tmp_path / "a" / "b").is_dir()


def test_holes_are_counted_wherever_they_are_and_reading_begins_at_the_start(
    tmp_path: Path,
) -> None:
    block = 2**20
    with (tmp_path / "a").open("wb") as file:
        for at in (0, 3, 6):
            file.seek(at * block)
            file.write(b"x" * block)
        file.truncate(16 * block)
    (tmp_path / "b").write_bytes(b"x" * block)
    (tmp_path / "c").write_bytes(b"")
    found = []
    for name in "abc":
        with open_to_read(tmp_path / name) as opened:
            found.append(holes(opened))
            assert opened.read(1) == b"x"[: name != "c"]
    assert found == [13 * block, 0, 0]
