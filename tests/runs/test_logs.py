"""A damaged log costs the lines that are damaged, and no more; and it is said."""

import json
import random
import shutil
from pathlib import Path

import pytest

from stopmim import Run, pretrain
from stopmim.cli import main
from stopmim.runs.logs import Metrics
from tiny import NoiseImages, assert_same_run, curve, tiny

MEASURED = {"runtime.health_every": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("whole"), tiny(**MEASURED))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("begun"), tiny(**MEASURED), stop_at=6)


@pytest.fixture
def copy(begun: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(begun.path, tmp_path / "run"))


def assert_same_weights(a: Run, b: Run) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (a.checkpoint / name).read_bytes() == (b.checkpoint / name).read_bytes()


def resume(run: Run) -> Run:
    return pretrain(NoiseImages(), run.path, tiny(**MEASURED))


@pytest.mark.parametrize(
    "line",
    [
        '{"loss": 0.5}',
        '{"step": "three"}',
        '{"step": null, "target_rank": 1.0}',
        '{"step": 2, "target_rank": "x", "skill": [], "random_init": 7}',
        '{"step": 1e999}',
        "[[[[",
        '{"step": 2, "target_rank": 3.0}',
        "\x00\x00\x00",
    ],
)
def test_a_line_that_holds_anything_does_not_block_resume(whole: Run, copy: Run, line: str) -> None:
    """In a log of an old version, whose lines have no checks."""
    file = copy.path / "metrics.jsonl"
    old = [json.dumps(tree) for tree in copy.metrics]
    file.write_text("\n".join([*old[:3], line, *old[3:]]) + "\n")
    assert main(["doctor", str(copy.path)]) in (0, 10, 11, 12, 13)
    run = resume(copy)
    steps = [tree for tree in curve(run) if tree in curve(whole)]
    assert steps == curve(whole)
    assert_same_weights(run, whole)


def test_a_damaged_line_is_skipped_and_counted_and_the_others_stay(
    whole: Run, copy: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy.path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[3] = lines[3].replace('"loss": 0', '"loss": 9', 1)
    file.write_text("\n".join(lines) + "\n")
    run = resume(copy)
    assert "metrics.jsonl: 1 damaged of 6 lines; training continues" in capsys.readouterr().err
    assert curve(run) == [line for line in curve(whole) if line["step"] != 4]
    assert run.lost_lines == ["metrics.jsonl: 1 damaged of 10 lines"]
    assert main(["doctor", str(run.path)]) in (0, 10, 11, 12, 13)
    assert "lost: metrics.jsonl: 1 damaged of 10 lines" in capsys.readouterr().out
    assert main(["report", str(run.path)]) == 0
    assert "Lost: metrics.jsonl: 1 damaged of 10 lines." in (run.path / "report.html").read_text()


@pytest.mark.parametrize("gone", [slice(2, 4), slice(0, 1), slice(4, 6), slice(0, 6)], ids=str)
def test_missing_lines_are_noticed_wherever_they_were(whole: Run, copy: Run, gone: slice) -> None:
    file = copy.path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    n = len(lines[gone])
    del lines[gone]
    file.write_text("".join(lines))
    assert copy.lost_lines == [f"metrics.jsonl: {n} missing of 6 lines"]
    run = resume(copy)
    assert run.lost_lines == [f"metrics.jsonl: {n} missing of 10 lines"]
    assert_same_weights(run, whole)


@pytest.mark.parametrize("first", [0, 4])
def test_damaged_lines_at_the_end_stay_as_well(whole: Run, copy: Run, first: int) -> None:
    """They were there when the checkpoint was saved, so none of them is torn by a kill."""
    file = copy.path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    damaged = [line[:20] for line in lines[first:]]
    file.write_text("\n".join([*lines[:first], *damaged, '{"step": 7, "lo']))
    run = resume(copy)
    assert file.read_text().splitlines()[first:6] == damaged
    assert run.lost_lines == [f"metrics.jsonl: {6 - first} damaged of 10 lines"]
    assert curve(run) == [line for line in curve(whole) if not first < line["step"] <= 6]


def test_a_log_without_damage_says_nothing_and_an_interruption_is_none(
    whole: Run, copy: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with (copy.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # torn by a kill, after the checkpoint
    assert_same_run(resume(copy), whole)
    assert copy.lost_lines == []
    assert "damaged" not in capsys.readouterr().err


def test_random_damage_of_logs_never_ends_a_run_and_is_always_said(
    begun: Run, tmp_path: Path
) -> None:
    rng, file = random.Random(1), tmp_path / "metrics.jsonl"
    data, intact = (begun.path / "metrics.jsonl").read_bytes(), begun.metrics
    for _ in range(300):
        a = rng.randrange(len(data))
        b = min(len(data), a + rng.choice([0, 1, 5, 300]))
        file.write_bytes(data[:a] + rng.randbytes(rng.randrange(1, 9)) + data[b:])
        log = Metrics(tmp_path, 6, logged=6)
        found = Run(tmp_path).metrics
        assert all(line in intact for line in found)
        log.write({"step": 7})
        said = Run(tmp_path).lost_lines
        assert said or found == intact


def test_a_run_without_checkpoints_says_what_its_log_had_reached(
    whole: Run, copy: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the disk that `checkpoints` leads to is not mounted."""
    shutil.rmtree(copy.path / "checkpoints")
    (copy.path / "checkpoints").mkdir()
    assert_same_run(resume(copy), whole)
    assert "begins again at its first update, as does its log, which had reached 6" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_bad_files_that_hold_anything_do_not_block_resume(tmp_path: Path) -> None:
    images, config = NoiseImages(broken=(3, 17)), tiny(data={"max_bad": 0.2})
    pretrain(images, tmp_path, config, stop_at=3)
    file = tmp_path / "bad_files.jsonl"
    file.write_text('{"reason": "no name"}\n{"name": ["x"]}\n[]\n' + file.read_text())
    run = pretrain(images, tmp_path, config)
    listed = [json.loads(line)["name"] for line in file.read_text().splitlines()[3:]]
    assert sorted(listed) == ["noise 17", "noise 3"]
    assert run.lost_lines


def test_a_folder_that_is_called_almost_like_a_checkpoint_costs_nothing(
    copy: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = copy.checkpoint
    newest.rename(newest.with_name("step-abcdefgh"))
    assert copy.lost_lines == []  # it still knows how many there were
    assert main(["doctor", str(copy.path)]) in (0, 10, 11, 12, 13)
    assert "error" not in capsys.readouterr().err
