"""metrics.jsonl a second time, read back from the files of TensorBoard and of W&B."""

import contextlib
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from stopmim.base.errors import UserError
from stopmim.base.files import append_jsonl
from stopmim.config.schema import Config
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain
from stopmim.train.mirror import Kind, mirror
from tiny import NoiseImages, tiny


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


def closed(path: Path) -> list[Record]:
    """All that a .wandb file says; a process of W&B ends it, milliseconds after `finish`."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = list(records(path))
        if found and found[-1].HasField("exit"):
            return found
        time.sleep(0.01)
    raise TimeoutError(path)


def records(path: Path) -> Iterator[Record]:
    """What a .wandb file says; a log as LevelDB has it, in blocks of 32 KiB after a header."""
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


def history(known: list[Record]) -> list[dict[str, float]]:
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
    ("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_without_the_extra_the_error_names_it(
    kind: Kind, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UserError, match=rf'{kind} is not installed; pip .*"stopmim\[{kind}\]"'):
        pretrain(NoiseImages(), tmp_path / "run", tiny(runtime={"mirror": kind}))
