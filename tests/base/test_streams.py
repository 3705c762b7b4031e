"""Commands whose stdout or stderr is closed, full or broken, in processes of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stopmim import Run, pretrain
from tiny import assert_same_run, tiny, write_folder

COMMAND = f"{sys.executable} -m stopmim"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The whole of a run, and its beginning."""
    root = tmp_path_factory.mktemp("streams")
    images = write_folder(root / "images")
    return pretrain(images, root / "whole", tiny()), pretrain(
        images, root / "half", tiny(), stop_at=6
    )


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("presets", 0, ""),
        ("presets > /dev/full", 5, "stopmim: error: stdout: cannot write: No space left on device"),
        ("presets >&-", 0, ""),
        ("presets nothing > /dev/full", 2, "stopmim: error: "),
        ("presets nothing 2> /dev/full", 2, ""),
        ("presets nothing 2>&-", 2, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_a_code(
    line: str, code: int, said: str
) -> None:
    done = shell(f"{COMMAND} {line}")
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == bool(said)


def test_a_command_leaves_nothing_in_tmpdir(runs: tuple[Run, Run], tmp_path: Path) -> None:
    done = shell(f"TMPDIR={tmp_path} {COMMAND} inspect {runs[0].path}")  # torch makes a folder
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())


NO_TMPDIR = "import tempfile, sys; tempfile._candidate_tempdir_list = lambda: ['/proc/none']"


def test_no_folder_for_temporary_files_is_one_line(runs: tuple[Run, Run]) -> None:
    program = f"{NO_TMPDIR}; from stopmim.__main__ import run; run()"
    words = [sys.executable, "-c", program, "inspect", str(runs[0].path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.splitlines() == [
        "stopmim: error: no folder for temporary files can be written to: set TMPDIR to one"
    ]


def test_nobody_who_reads_on_is_no_error() -> None:
    done = shell(f"set -o pipefail; {COMMAND} presets | true")
    assert (done.returncode, done.stderr) == (0, "")


HARMLESS = ("2> /dev/full", "2> >(true)")


@pytest.mark.parametrize(
    "how", [*(pytest.param(one, marks=pytest.mark.slow) for one in HARMLESS), "<&- >&- 2>&-"]
)
def test_a_run_whose_messages_are_lost_is_trained_to_its_end(
    runs: tuple[Run, Run], tmp_path: Path, how: str
) -> None:
    """A closed stderr was once the next file to be opened; a full one ended the run."""
    whole, half = runs
    run = shutil.copytree(half.path, tmp_path / "run")
    images = whole.path.parent / "images"
    done = shell(f"{COMMAND} pretrain {images} --out {run} {how}")
    assert done.returncode == 0
    assert_same_run(Run(run), whole)


def test_a_name_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    script = "from stopmim.base import streams; streams.prepare(); print('\\udcff\\u2502')"
    env = os.environ | {"PYTHONIOENCODING": "latin-1:strict"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, check=False, env=env)
    assert done.returncode == 0
    assert done.stdout == b"\\udcff\\u2502\n"
