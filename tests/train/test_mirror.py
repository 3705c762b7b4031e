"""metrics.jsonl a second time, read back from the files of TensorBoard and of W&B."""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stopmim.base.errors import UserError
from stopmim.base.files import append_jsonl
from stopmim.config.schema import Config
from stopmim.runs.run import Run
from stopmim.train import mirror as module
from stopmim.train.loop import pretrain
from stopmim.train.mirror import Kind, mirror
from tiny import NoiseImages, tiny


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may keep all cores busy."""
    monkeypatch.setattr(module, "CLOSING", 60.0)


def stopped(path: Path, kind: Kind) -> Config:
    """A run that was stopped after step 6, its last checkpoint; step 7 was logged in vain."""
    config = tiny(runtime={"health_every": 4, "mirror": kind})
    run = pretrain(NoiseImages(), path, tiny(runtime={"health_every": 4}), stop_at=6)
    append_jsonl(path / "metrics.jsonl", run.metrics[-1] | {"step": 7, "loss": -1.0})
    with contextlib.suppress(ZeroDivisionError), mirror(kind, path, 0) as show:
        for line in run.metrics if kind == "tensorboard" else []:  # W&B's is written anew anyway
            show(line)
        _ = 1 / 0
    return config


def logged(run: Run, key: str) -> list[tuple[int, Any]]:
    """What metrics.jsonl has, with the untrained network at step 0."""
    rows = [(row["step"], row[key]) for row in run.metrics if key in row]
    untrained = run.metrics[0]["random_init"]
    rows = [(0, untrained[key]), *rows] if key in untrained else rows
    return [(step, pytest.approx(value, rel=1e-5)) for step, value in rows]


def test_tensorboard_shows_what_metrics_has(tmp_path: Path) -> None:
    run = pretrain(NoiseImages(), tmp_path / "run", stopped(tmp_path / "run", "tensorboard"))
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for key in ("loss", "norm_A", "skill"):
        assert [(e.step, e.value) for e in events.Scalars(key)] == logged(run, key)


def closed(path: Path) -> list[Any]:
    """All that a .wandb file says; a process of W&B ends it, milliseconds after `finish`."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = list(records(path))
        if found and found[-1].HasField("exit"):
            return found
        time.sleep(0.01)
    raise TimeoutError(path)


def records(path: Path) -> Iterator[Any]:
    """What a .wandb file says; a log as LevelDB has it, in blocks of 32 KiB after a header."""
    from wandb.proto.wandb_internal_pb2 import Record  # half a second

    data, at, pieces = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := -at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            return  # still being written
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(pieces)
            pieces = b""


def history(known: list[Any]) -> list[dict[str, float]]:
    found = [record.history.item for record in known if record.HasField("history")]
    return [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in row} for row in found]


def test_wandb_shows_what_metrics_has_in_one_offline_run_however_often_it_was_started(
    tmp_path: Path,
) -> None:
    config = stopped(tmp_path / "run", "wandb")
    (failed,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    known = closed(failed)
    assert [row["_step"] for row in history(known)] == list(range(8))
    assert known[-1].exit.exit_code == 1

    run = pretrain(NoiseImages(), tmp_path / "run", config)
    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    assert file.name == failed.name  # its id
    known = closed(file)
    rows = history(known)
    assert [row["_step"] for row in rows] == list(range(11))
    for key in ("loss", "norm_A", "skill"):
        assert [(row["_step"], row[key]) for row in rows if key in row] == logged(run, key)
    assert known[-1].exit.exit_code == 0
    assert not any(record.HasField("stats") for record in known)  # of the machine
    (about,) = (record.run for record in known if record.HasField("run"))
    assert (about.display_name, about.project) == ("run", "stopmim")


@pytest.mark.parametrize(
    ("kind", "module"), [("tensorboard", "tensorboard.compat.proto.event_pb2"), ("wandb", "wandb")]
)
def test_without_the_extra_the_error_names_it(
    kind: Kind, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UserError, match=rf'{kind} is not installed; pip .*"stopmim\[{kind}\]"'):
        pretrain(NoiseImages(), tmp_path / "run", tiny(runtime={"mirror": kind}))


# ------------------------------------------------------------------------------ what goes wrong


def warned(capsys: pytest.CaptureFixture[str]) -> str:
    """The one warning of a run that continues without its mirror."""
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("warning: ") == said.count("the run continues without it") == 1
    return said


def test_numbers_alone_are_shown_whatever_a_line_holds(tmp_path: Path) -> None:
    """Somebody else may have written metrics.jsonl."""
    odd: list[dict[str, Any]] = [
        {"step": 3, "random_init": {"a": [1], "loss": 0.5}},
        {"loss": 1},
        {"step": 4, "random_init": [1], "loss": {"_type": "image-file", "path": "/etc/passwd"}},
        {"step": 1e300, "loss": 1},
        {"step": -5, "loss": 1},
        {"step": 2**70, "loss": 1},
        {"step": True, "loss": 1},
        {"step": 5, "loss": float("nan"), "norm": 10**400, "text": "x", "on": True, "none": None},
        {"step": 6, "loss": 2},
    ]
    with mirror("tensorboard", tmp_path, 0) as show:
        for line in odd:
            show(line)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.5), (6, 2.0)]


@pytest.mark.parametrize("where", ["opening", "logging", "closing"])
def test_a_library_that_fails_costs_the_mirror_and_not_the_run(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextlib.contextmanager
    def failing(path: Path, step: int) -> Iterator[Callable[[Any], None]]:
        def fail(now: str) -> None:
            if now == where:
                raise OSError(f"no luck while {now}")

        fail("opening")
        yield lambda line: fail("logging")
        fail("closing")

    monkeypatch.setattr(module, "_tensorboard", failing)
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(runtime={"mirror": "tensorboard"}))
    assert run.checkpoint.name == "step-00000010"
    assert f"tensorboard: OSError: no luck while {where}" in warned(capsys)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("x\n" * 9000)])
def test_a_library_that_exits_or_says_too_much_is_one_line(
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextlib.contextmanager
    def exiting(path: Path, step: int) -> Iterator[Callable[[Any], None]]:
        def write(line: Any) -> None:
            raise error

        yield write

    monkeypatch.setattr(module, "_tensorboard", exiting)
    with mirror("tensorboard", tmp_path, 0) as show:
        show({"step": 1})
    [said] = capsys.readouterr().err.splitlines()
    assert f"tensorboard: {type(error).__name__}" in said
    assert len(said) < 700


def test_a_library_that_hangs_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on = threading.Event()

    @contextlib.contextmanager
    def hanging(path: Path, step: int) -> Iterator[Callable[[Any], None]]:
        def write(line: Any) -> None:
            go_on.wait(60)

        yield write

    monkeypatch.setattr(module, "_tensorboard", hanging)
    monkeypatch.setattr(module, "CLOSING", 0.1)
    monkeypatch.setattr(module, "MOST_LINES", 3)
    begin = time.monotonic()
    with mirror("tensorboard", tmp_path, 0) as show:
        show({"step": 1})
    assert "tensorboard: does not end within 0.1 s" in warned(capsys)
    with mirror("tensorboard", tmp_path, 0) as show:
        for step in range(9):
            show({"step": step})
    assert "tensorboard: 3 lines wait for it" in warned(capsys)
    assert time.monotonic() - begin < 30
    go_on.set()


def test_a_folder_that_is_removed_costs_the_mirror(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mirror("tensorboard", tmp_path, 0) as show:
        shutil.rmtree(tmp_path / "tensorboard")
        show({"step": 1, "loss": 1.0})
    assert "is gone" in warned(capsys)


DISTURBED = """
import os, signal, subprocess, sys
from pathlib import Path
from stopmim.train import mirror as module

module.CLOSING = 0.5
for name in sys.argv[2:]:
    with module.mirror("wandb", Path(sys.argv[1]), 1) as show:
        line = ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())]
        rows = subprocess.run(line, capture_output=True, text=True).stdout.splitlines()
        process = max(int(row.split()[0]) for row in rows if "wandb-core" in row)
        os.kill(process, getattr(signal, name))
        show({"step": 2, "loss": 1.0})
    print(process)
"""


@pytest.mark.slow
def test_a_process_of_wandb_that_is_killed_or_stopped_costs_the_mirror(tmp_path: Path) -> None:
    """Python, too, then ends without it."""
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=1)
    line = [sys.executable, "-c", DISTURBED, str(run.path), "SIGKILL", "SIGSTOP"]
    own = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}  # not the one of pytest
    out, err = tmp_path / "out", tmp_path / "err"  # a process that is stopped never closes a pipe
    with out.open("w") as stdout, err.open("w") as stderr:
        code = subprocess.run(line, stdout=stdout, stderr=stderr, timeout=60, env=own).returncode
    left = [pid for pid in out.read_text().split() if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    said = err.read_text().splitlines()
    assert (code, len(said)) == (0, 2), said
    assert all("stopmim: warning: runtime.mirror: wandb: " in row for row in said)
    assert left == []
