"""Whatever happens to a run directory: what is intact is found, the rest restored or put aside."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stopmim import Run, pretrain
from stopmim.base.errors import CheckpointError, RunInUseError, StorageError, UserError
from stopmim.base.files import write_whole
from stopmim.cli import main
from stopmim.runs.identity import planned
from stopmim.runs.lock import claimed
from stopmim.runs.repair import repair
from tiny import NoiseImages, tiny, weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("whole"), tiny())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = pretrain(NoiseImages(), tmp_path_factory.mktemp("begun"), tiny(), stop_at=6)
    run.add_result(protocol="knn", value=50.0, unit="percent")
    return run


@pytest.fixture
def copy(begun: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(begun.path, tmp_path / "run"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def spoil(file: Path) -> None:
    """Changes a letter of the first key of the last line."""
    *before, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join(before) + last.replace('{"', '{"_', 1))


def edit(run: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    about["starts"][0]["threads"] = 7
    (run / "run.json").write_text(json.dumps(about))


def stranger(run: Path) -> None:
    """The checkpoints of a run that differs in nothing but its id, beside our own."""
    other = pretrain(NoiseImages(), run.parent / "other", tiny(), stop_at=7)
    shutil.copytree(other.checkpoint, run / "checkpoints" / other.checkpoint.name)


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def linked(run: Path) -> None:
    (run.parent / "victim").write_text("precious")
    for name in ("run.lock", "metrics.jsonl", "results.jsonl"):
        (run / name).unlink()
        (run / name).symlink_to(run.parent / "victim")


def leave(run: Path) -> None:
    (run / "checkpoints" / ".tmp-00000007-abc").mkdir()
    (run / ".new-0123").write_text("half")
    (run / ".report.html.tmp").write_text("half")


def no_folder(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(run / "checkpoints")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


DAMAGE: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "nothing": (lambda run: None, "intact    run.json", 6),
    "run.json missing": (lambda run: (run / "run.json").unlink(), "restored  run.json from", 6),
    "run.json empty": (lambda run: (run / "run.json").write_text(""), "restored  run.json", 6),
    "run.json a list": (lambda run: (run / "run.json").write_text("[]"), "restored  run.json", 6),
    "run.json cut": (
        lambda run: cut(run / "run.json"),
        "moved     run.json to damaged/run.json",
        6,
    ),
    "threads edited": (edit, "restored  run.json", 6),
    "weights": (lambda run: flip(newest(run) / "model.safetensors"), "sha256 is not", 3),
    "state": (lambda run: flip(newest(run) / "state.json"), "moved     checkpoints/step-", 3),
    "manifest": (lambda run: (newest(run) / "manifest.json").unlink(), "FileNotFoundError", 3),
    "empty checkpoint": (
        lambda run: (run / "checkpoints" / "step-00000009").mkdir(),
        "moved     checkpoints/step-00000009 to damaged/step-00000009",
        6,
    ),
    "an old checkpoint under a later name": (
        lambda run: shutil.copytree(newest(run), run / "checkpoints" / "step-99999999"),
        "moved     checkpoints/step-99999999 to damaged/step-99999999: holds step 6",
        6,
    ),
    "no folder of checkpoints": (no_folder, "moved     checkpoints to damaged/checkpoints", 0),
    "another run's checkpoint": (stranger, "of another run: its run id is", 6),
    "all checkpoints": (
        lambda run: list(map(flip, run.glob("checkpoints/*/model.safetensors"))),
        "no checkpoint is left: the command that started the run starts it again",
        0,
    ),
    "metrics line": (lambda run: spoil(run / "metrics.jsonl"), "1 damaged line of metrics", 6),
    "metrics gone": (
        lambda run: (run / "metrics.jsonl").unlink(),
        "6 lines of metrics.jsonl are",
        6,
    ),
    "results line": (lambda run: spoil(run / "results.jsonl"), "1 damaged line of results", 6),
    "links": (linked, "moved     run.lock to damaged/run.lock: is not a regular file", 6),
    "leftovers": (
        leave,
        "removed   .new-0123, left by a killed process",
        6,
    ),
    "lock of the dead": (
        lambda run: (run / "run.lock").write_text("process 1 on a since b\n"),
        "removed   run.lock of a process that has ended",
        6,
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_repaired_run_resumes_bit_by_bit(whole: Run, copy: Run, kind: str) -> None:
    damage, said, step = DAMAGE[kind]
    damage(copy.path)
    before = contents(copy.path)
    assert said in str(repair(copy.path, dry_run=True)), kind
    assert contents(copy.path) == before
    found = repair(copy.path)
    assert said in str(found)
    assert found.resumes_at == step
    run = pretrain(NoiseImages(), copy.path, tiny())
    assert run.about["id"] == json.loads((run.checkpoint / "state.json").read_text())["run"]["id"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (run.checkpoint / name).read_bytes() == (whole.checkpoint / name).read_bytes()
    assert {verdict for verdict, _ in repair(copy.path).found} <= {"intact", "lost"}
    assert not list(copy.path.rglob(".new-*")) + list(copy.path.rglob(".tmp-*"))
    if kind == "links":
        assert (copy.path.parent / "victim").read_text() == "precious"


def contents(folder: Path) -> dict[Path, bytes | str]:
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_nothing_that_is_damaged_is_deleted(copy: Run) -> None:
    flip(newest(copy.path) / "model.safetensors")
    damaged = (newest(copy.path) / "model.safetensors").read_bytes()
    (copy.path / "run.json").write_text("{")
    line = (copy.path / "metrics.jsonl").read_text().splitlines()[2]
    text = (copy.path / "metrics.jsonl").read_text()
    (copy.path / "metrics.jsonl").write_text(text.replace(line, line[5:]))
    repair(copy.path)
    aside = copy.path / "damaged"
    assert (aside / "step-00000006" / "model.safetensors").read_bytes() == damaged
    assert (aside / "run.json").read_text() == "{"
    assert (aside / "metrics.jsonl").read_text() == line[5:] + "\n"
    (copy.path / "run.json").write_text("[")
    repair(copy.path)
    assert (aside / "run.json.2").read_text() == "["


def test_checkpoints_on_another_disk_stay_on_it(whole: Run, copy: Run) -> None:
    """Where a link of checkpoints/ leads."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        assert os.stat(disk).st_dev != copy.path.stat().st_dev
        shutil.move(copy.path / "checkpoints", f"{disk}/checkpoints")
        (copy.path / "checkpoints").symlink_to(f"{disk}/checkpoints")
        flip(newest(copy.path) / "model.safetensors")
        found = repair(copy.path)
        assert "moved     checkpoints/step-00000006 to checkpoints/damaged/step-0" in str(found)
        assert Path(disk, "checkpoints", "damaged", "step-00000006", "state.json").exists()
        assert found.resumes_at == 3
        assert weights(pretrain(NoiseImages(), copy.path, tiny())).keys() == weights(whole).keys()


def test_a_log_that_is_too_large_to_be_read_is_moved(copy: Run) -> None:
    os.truncate(copy.path / "metrics.jsonl", 2**28 + 1)  # zeros at its end that take no room
    with pytest.raises(StorageError, match="more than"):
        pretrain(NoiseImages(), copy.path, tiny())
    said = "moved     metrics.jsonl to damaged/metrics.jsonl: cannot read: more than"
    assert said in str(repair(copy.path, dry_run=True))
    assert said in str(repair(copy.path))
    assert pretrain(NoiseImages(), copy.path, tiny()).checkpoint.name == "step-00000010"


def test_the_checkpoints_of_another_run_behind_a_link_stay_where_they_are(
    whole: Run, copy: Run, tmp_path: Path
) -> None:
    """Whoever packed the run may have known where those of whoever unpacks it lie."""
    mine = shutil.copytree(whole.path, tmp_path / "mine")
    (mine / "checkpoints" / ".tmp-00000011-abc").mkdir()  # it is saving
    before = sorted(path.name for path in (mine / "checkpoints").iterdir())
    shutil.rmtree(copy.path / "checkpoints")
    (copy.path / "checkpoints").symlink_to(mine / "checkpoints")
    for dry in (True, False):
        with pytest.raises(CheckpointError, match=r"a link to another run's: run id .*remove the"):
            repair(copy.path, dry_run=dry)
    assert sorted(path.name for path in (mine / "checkpoints").iterdir()) == before
    (copy.path / "checkpoints").unlink()
    assert repair(copy.path).resumes_at == 0


def test_leftovers_that_are_nested_too_deep_are_moved(copy: Run) -> None:
    """As a received run directory may have; Python removes folders by recursion."""
    where = os.open(copy.path / "checkpoints", os.O_RDONLY)
    os.mkdir(name := ".tmp-deep", dir_fd=where)
    for _ in range(2 * sys.getrecursionlimit()):
        inner = os.open(name, os.O_RDONLY, dir_fd=where)
        os.close(where)
        where, name = inner, "x"
        os.mkdir(name, dir_fd=where)
    os.close(where)
    found = str(repair(copy.path))
    subprocess.run(["rm", "-r", copy.path / "damaged"], check=True)
    assert "moved     checkpoints/.tmp-deep to damaged/.tmp-deep: cannot be removed" in found


def test_names_forge_no_lines(copy: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (copy.path / "checkpoints" / ".tmp-\x1b[2J\nforged").mkdir()
    assert main(["repair", str(copy.path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "removed   checkpoints/.tmp-\\x1b[2J\\nforged, left by" in said


def test_a_result_that_is_added_meanwhile_is_kept(
    copy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation ends between the moment a log is read and the moment it is rewritten."""
    spoil(copy.path / "results.jsonl")
    adding = threading.Thread(target=lambda: copy.add_result(protocol="linear", value=1.0))

    def late(path: Path, text: bytes) -> None:
        if path.name == "results.jsonl":
            adding.start()
            adding.join(0.3)  # it waits for its turn
        write_whole(path, text)

    monkeypatch.setattr("stopmim.runs.repair.write_whole", late)
    repair(copy.path)
    adding.join()
    assert [line["protocol"] for line in copy.results] == ["linear"]


def test_a_run_in_use_is_left_alone(copy: Run) -> None:
    with claimed(copy.path):
        for dry in (True, False):
            with pytest.raises(RunInUseError):
                repair(copy.path, dry_run=dry)


def test_an_intact_run_that_is_finished_is_said_to_be(whole: Run) -> None:
    said = "nothing is damaged; the run is finished, all 10 updates are done"
    for dry in (True, False):
        assert str(repair(whole.path, dry_run=dry)).splitlines()[-1] == said


def test_crops_of_an_image_count_as_images() -> None:
    config = tiny(data={"crops_per_image": 3}).model_dump(mode="json")
    assert planned({"config": config, "data": {"images": 40}}) == 2 * 15
    assert planned({"config": config, "data": {"images": "many"}}) is None


def test_the_command_says_what_it_did_and_fails_if_nothing_helps(
    copy: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repair", str(copy.path), "--dry-run"]) == 0
    assert "nothing is damaged; the run resumes at step 6" in capsys.readouterr().out
    flip(Run(copy.path).checkpoint / "model.safetensors")
    assert main(["repair", str(copy.path), "--dry-run"]) == 0
    assert "nothing was changed (--dry-run); after the repair, the run" in capsys.readouterr().out
    assert main(["repair", str(copy.path)]) == 0
    assert "the run resumes at step 3: give the command" in capsys.readouterr().out
    shutil.rmtree(copy.path / "checkpoints")
    (copy.path / "run.json").write_text("{}")
    assert main(["repair", str(copy.path)]) == 4
    assert "this run cannot be resumed" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        assert main(["repair", str(tmp_path / name)]) == 4


def test_without_a_repair_each_of_these_is_refused_or_harmless(whole: Run, begun: Run) -> None:
    """A damaged run.json is never replaced by an empty start."""
    folder = begun.path.parent / "refused"
    shutil.copytree(begun.path, folder)
    (folder / "run.json").unlink()
    with pytest.raises(CheckpointError, match="stopmim repair"):
        pretrain(NoiseImages(), folder, tiny())
    edit(begun.path)
    with pytest.raises(UserError, match="stopmim repair"):
        pretrain(NoiseImages(), begun.path, tiny())
    assert weights(whole)
