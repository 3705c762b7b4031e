"""One process has a run, while its directory is where it was; whatever happens, it saves."""

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stopmim import Run, pretrain
from stopmim.base.errors import RunInUseError, StorageError
from stopmim.runs import lock, saver
from stopmim.runs.lock import claimed, owner_of
from stopmim.train import loop
from tiny import NoiseImages, assert_same_run, tiny, weights, writing_threads


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("whole"), tiny())


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], object]) -> None:
    """Does something after an update; checkpoints are saved by a thread after 3, 6, 9 and 10."""
    passed = Counter[str]()

    def point(name: str) -> None:
        passed[name] += 1
        if passed["step.end"] == step and name == "step.end":
            do()

    monkeypatch.setattr(loop, "faultpoint", point)


def removed(out: Path) -> None:
    """Removes a folder in which a run may be writing: again, while there is something new."""
    while out.exists():
        shutil.rmtree(out, ignore_errors=True)


def ended(out: Path) -> str:
    """What a run says that has to end with exit code 5."""
    with pytest.raises(StorageError) as caught:
        pretrain(NoiseImages(), out, tiny())
    assert caught.value.exit_code == 5
    assert not writing_threads()
    return str(caught.value)


# ------------------------------------------------------------------------------ moved, removed


def test_a_directory_that_is_renamed_gets_the_next_save_and_resumes_there(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, moved = tmp_path / "run", tmp_path / "moved"
    at_step(monkeypatch, 4, lambda: out.rename(moved))
    said = ended(out)
    assert f"run: was moved to {moved} while it ran; saved step 6 in {moved}" in said
    assert said.endswith(f"continue with --out {moved}")
    assert not out.exists()
    assert Run(moved).checkpoint.name == "step-00000006"
    assert_same_run(pretrain(NoiseImages(), moved, tiny()), whole)  # and no line was lost


def test_a_directory_that_is_removed_is_not_made_again_and_the_run_is_rescued(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def remove() -> None:
        for thread in threading.enumerate():  # two that remove a save in flight disturb each other
            if thread.name == "save":
                thread.join()
        removed(out)

    at_step(monkeypatch, 4, remove)
    said = ended(out)
    assert not out.exists()
    (rescued,) = tmp_path.iterdir()
    assert rescued.name.startswith("run.rescued-")
    assert f"was removed while it ran; saved step 6 in {rescued}" in said
    run = pretrain(NoiseImages(), rescued, tiny())
    expected = weights(whole)
    assert all(x.equal(expected[name]) for name, x in weights(run).items())
    # Those after the removal were kept; the others are known to be missing.
    assert [line["step"] for line in run.metrics] == list(range(4, 11))
    assert run.lost_lines == ["metrics.jsonl: 3 missing of 10 lines"]


def test_a_run_is_rescued_though_the_folder_of_all_runs_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs" / "tiny" / "run"
    at_step(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "runs"))
    said = ended(out)
    (rescued,) = tmp_path.iterdir()
    assert rescued.name.startswith("run.rescued-")
    assert f"was removed while it ran; saved step 3 in {rescued}" in said
    assert pretrain(NoiseImages(), rescued, tiny()).checkpoint.name == "step-00000010"


def test_a_second_run_in_the_place_of_the_first_is_not_touched(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, first = tmp_path / "run", tmp_path / "first"

    def replace() -> None:
        out.rename(first)
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            return
        loop.__dict__["faultpoint"] = lambda name: None
        pretrain(NoiseImages(), out, tiny(seed=1), stop_at=2)
        os._exit(0)

    at_step(monkeypatch, 4, replace)
    ended(out)
    second = Run(out)
    assert [line["step"] for line in second.metrics] == [1, 2]
    assert second.checkpoint.name == "step-00000002"
    assert_same_run(pretrain(NoiseImages(), first, tiny()), whole)


@pytest.mark.parametrize("point", ["save.begin", "save.model", "save.synced"])
def test_a_directory_that_goes_while_the_thread_writes_costs_that_save_alone(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    out, passed = tmp_path / "run", Counter[str]()

    def remove(name: str) -> None:
        passed[name] += 1
        if name == point and passed[name] == 1:
            removed(out)

    monkeypatch.setattr(saver, "faultpoint", remove)
    ended(out)
    assert not out.exists()
    (rescued,) = tmp_path.iterdir()
    run = pretrain(NoiseImages(), rescued, tiny())
    expected = weights(whole)
    assert all(x.equal(expected[name]) for name, x in weights(run).items())


def test_the_last_save_of_a_run_is_rescued_as_well(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, passed = tmp_path / "run", Counter[str]()

    def remove(name: str) -> None:
        passed[name] += 1
        if name == "save.host" and passed[name] == 7:  # of the fourth and last save
            out.rename(tmp_path / "moved")

    monkeypatch.setattr(saver, "faultpoint", remove)
    assert "saved step 10 in" in ended(out)
    assert_same_run(Run(tmp_path / "moved"), whole)


def test_a_lock_that_is_removed_ends_the_run_after_a_save(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 4, lambda: (tmp_path / "run.lock").unlink())
    said = ended(tmp_path)
    assert "run.lock was removed while it ran; saved step 6" in said
    assert said.endswith("the same command continues")
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)


def test_a_run_that_another_one_took_over_saves_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def taken() -> None:
        owner = owner_of(out) | {"claim": "theirs", "host": "node7"}
        (out / "run.lock").write_text(json.dumps(owner))

    at_step(monkeypatch, 4, taken)
    assert "was taken over by process" in ended(out)
    theirs = [path.name for path in (out / "checkpoints").glob("step-*")]
    assert theirs in ([], ["step-00000003"])  # which may have been in flight
    (rescued,) = tmp_path.glob("run.rescued-*")
    assert Run(rescued).checkpoint.name == "step-00000006"


def test_links_to_a_run_and_to_its_checkpoints_work(whole: Run, tmp_path: Path) -> None:
    """As of people whose large disk is elsewhere."""
    (tmp_path / "large" / "checkpoints").mkdir(parents=True)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "checkpoints").symlink_to(tmp_path / "large" / "checkpoints")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=4)
    (tmp_path / "real" / ".new-0123.json").write_text("half")  # left by a kill
    assert_same_run(pretrain(NoiseImages(), tmp_path / "run", tiny()), whole)
    assert len(list((tmp_path / "large" / "checkpoints").iterdir())) == 2
    assert not list((tmp_path / "real").glob(".*"))


# ------------------------------------------------------------------------------ other machines


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Claims the run on another machine, with a heartbeat so many seconds ago."""
    monkeypatch.setattr(lock, "POLL", 0.01)
    monkeypatch.setattr(lock, "WATCH", 0.3)

    def write(age: float) -> None:
        beat = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
        owner = {"claim": "x", "pid": 7, "host": "node7", "boot": "other", "since": "noon"}
        (tmp_path / "run.lock").write_text(json.dumps(owner | {"beat": beat}) + "\n")

    return write


@pytest.mark.parametrize("behind", [0, 3600, -3600])
def test_a_heartbeat_from_another_machine_keeps_the_run(
    tmp_path: Path, elsewhere: Callable[[float], None], behind: int
) -> None:
    elsewhere(behind + 20)
    beat = threading.Timer(0.1, elsewhere, [behind + 10])
    beat.start()
    with pytest.raises(RunInUseError, match="in use by process 7 on node7 since noon") as caught:
        pretrain(NoiseImages(), tmp_path, tiny())
    beat.join()
    assert caught.value.exit_code == 8
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


@pytest.mark.parametrize("age", [20, -9999, 3600])
def test_a_machine_that_shows_no_sign_of_life_loses_the_run(
    tmp_path: Path,
    elsewhere: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
    age: float,
) -> None:
    """Whatever its clock says."""
    elsewhere(age)
    with claimed(tmp_path):
        assert owner_of(tmp_path)["pid"] == os.getpid()
    said = capsys.readouterr().err
    assert "no sign of life from process 7 on node7" in said.replace("\n", " ")
    assert "waiting" in said


def test_a_machine_that_ends_in_the_meantime_leaves_the_run(
    tmp_path: Path, elsewhere: Callable[[float], None]
) -> None:
    elsewhere(5)
    end = threading.Timer(0.1, (tmp_path / "run.lock").write_text, [""])
    end.start()
    with claimed(tmp_path):
        pass
    end.join()


def test_the_heart_beats_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.02)
    monkeypatch.setattr(lock, "now", lambda: f"{time.monotonic():20.9f}")
    with claimed(tmp_path):
        seen = set[str | None]()
        until = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < until:
            seen.add(owner_of(tmp_path).get("beat"))
            time.sleep(0.01)
        assert len(seen - {None}) >= 2
        (tmp_path / "run.json").write_text("{}")
    assert not writing_threads()
    assert owner_of(tmp_path) == {}  # another machine need not wait
