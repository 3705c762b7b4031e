"""The commands that a run ends with are complete: they can be pasted as they are."""

import shlex
from pathlib import Path

import pytest

from stopmim import pretrain
from stopmim.cli import main
from stopmim.cli.run import parse
from stopmim.runs.next_commands import next_commands
from tiny import NoiseImages, tiny, write_folder


def commands(data: str, run: str = "runs/my first") -> list[str]:
    measured = tiny(**{"runtime.health_every": None})
    _, *lines = next_commands(pretrain(data, run, measured, stop_at=1)).splitlines()
    for line in lines:
        assert line.startswith("  stopmim ")
        assert parse(shlex.split(line, comments=True)[1:]) is not None
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("photos", "--data photos --hold-out 0.2"),  # one folder per class
        ("parts", "--data parts"),  # train and val
        ("parts/train", "--data parts"),
        ("scenes:16:24", "--data scenes:16:24"),
    ],
)
def test_a_run_is_evaluated_on_its_own_images_if_they_have_labels(
    data: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(Path("photos"))
    write_folder(Path("parts/train"))
    write_folder(Path("parts/val"))
    run = "'runs/my first'"
    assert commands(data) == [
        f"stopmim doctor {run}",
        f"stopmim eval suite {run} {options}",
        f"stopmim report {run}",
    ]


def test_without_labels_there_are_pictures_and_what_an_evaluation_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(Path("photos"))
    run = "'runs/my first'"
    assert commands("photos/part0") == [
        f"stopmim doctor {run}",
        f"stopmim report {run}",
        f"stopmim analyse neighbours {run}",
        f"stopmim eval suite {run} --data FOLDER --hold-out 0.2  # with labels",
    ]


def test_images_that_training_could_not_read_are_left_out_of_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(Path("photos"))
    broken = sorted(Path("photos/part0").iterdir())[0]
    broken.write_bytes(broken.read_bytes()[:60])
    said = next_commands(pretrain("photos", "run", tiny(**{"data.max_bad": 1.0})))
    (command,) = [line for line in said.splitlines() if "eval suite" in line]
    assert command.endswith("--skip run/bad_files.jsonl")
    assert main(shlex.split(command.replace("suite", "knn"))[1:]) == 0


def test_images_that_are_gone_or_were_never_on_a_disk_have_no_command(tmp_path: Path) -> None:
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=1)
    assert "--data FOLDER" in next_commands(run)


def test_a_run_that_measured_nothing_is_diagnosed_on_its_images(tmp_path: Path) -> None:
    run = pretrain("scenes:16:24", tmp_path / "run", tiny(), stop_at=1)
    line = next_commands(run).splitlines()[1]
    assert line == f"  stopmim doctor {tmp_path / 'run'} --data scenes:16:24"
    assert main(shlex.split(line)[1:]) == 0


@pytest.mark.slow
def test_the_commands_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in commands("scenes:256:24"):
        assert main(shlex.split(line)[1:]) == 0, line
    assert (tmp_path / "runs/my first/report.html").exists()
