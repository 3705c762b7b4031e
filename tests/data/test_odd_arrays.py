"""Hostile and odd files of arrays: one line each, nothing executed, time and memory bounded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import odd_arrays
import pytest
from odd_arrays import HOSTILE, MARK, ODD


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """What a process of limited memory says of each file, and the CPU seconds it took."""
    folder = tmp_path_factory.mktemp("odd")
    command = [sys.executable, odd_arrays.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr, done.stderr
    assert not (folder / MARK).exists()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (text, seconds) for name, text, seconds in found}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(
    name: str, answers: dict[str, tuple[str, float]]
) -> None:
    text, seconds = answers[name]
    assert re.search(HOSTILE[name][1], text), text
    assert "\n" not in text
    assert len(text) < 150
    assert seconds < 3


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_read(name: str, answers: dict[str, tuple[str, float]]) -> None:
    text, seconds = answers[name]
    assert text.startswith("read (")
    assert seconds < 3


def test_there_are_many_of_every_kind() -> None:
    assert len(HOSTILE) >= 60
    kinds = {Path(name).suffix for name in HOSTILE}
    assert kinds == {".npy", ".npz", ".tif", ".zarr", ".dcm", ".png", ".pgm"}
