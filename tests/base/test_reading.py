"""Files of others are opened as regular files of a bounded size, or not at all."""

import os
from pathlib import Path

import pytest

from stopmim.base.errors import StorageError
from stopmim.base.files import MOST_LINE, open_to_read, parse_jsonl, read_regular


def test_a_regular_file_is_read_through_links_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b", 3) == b"abc"
    assert read_regular(os.fsencode(tmp_path / "a")) == b"abc"
    with open_to_read(tmp_path / "a") as file:
        assert file.read() == b"abc"


@pytest.mark.timeout(10)
def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zeros"):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(path)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_a_larger_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 2**40)
    with pytest.raises(OSError, match="more than 1073741824 bytes"):
        read_regular(tmp_path / "a")


def test_of_our_own_files_much_less_is_read(tmp_path: Path) -> None:
    """Sparse ones take nothing on the disk, and a reader takes several times their size."""
    for name, most in {"run.json": 64, "run.lock": 64, "metrics.jsonl": 256}.items():
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, (most << 20) + 1)
        with pytest.raises(OSError, match=f"more than {most << 20} bytes"):
            read_regular(tmp_path / name)
    with pytest.raises(StorageError, match="more than"):
        parse_jsonl(tmp_path / "metrics.jsonl")


def test_a_line_that_is_too_long_is_damaged_without_a_copy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"b": "' + b"c" * MOST_LINE + b'"}\n')
    assert [line.tree for line in parse_jsonl(tmp_path / "a.jsonl")] == [{"a": 1}, None]


def test_names_that_no_file_can_have_are_errors_of_the_system() -> None:
    for name in ("n" * 300, "a\0b"):
        with pytest.raises(OSError):  # noqa: PT011 - the text is that of the system
            read_regular(name)


def test_a_descriptor_is_closed_if_the_file_is_refused(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(IsADirectoryError):
            open_to_read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
