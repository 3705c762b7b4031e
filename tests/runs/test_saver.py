"""A thread writes what training had at one step, while it goes on; nothing is lost on the way."""

import errno
import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ranks import together
from stopmim import Run, pretrain
from stopmim.base import faults
from stopmim.base.errors import NonFiniteError, StorageError
from stopmim.gpu import copies
from stopmim.method.build import build, configure
from stopmim.runs import checkpoint, saver
from stopmim.runs.saver import Saver
from stopmim.train import loop
from stopmim.train.optimizer import adamw
from stopmim.train.rates import Rates
from tiny import NoiseImages, assert_same_run, tiny, writing_threads

PATIENCE = 20.0  # seconds; a test that needs them has failed


class Gate:
    """Notes every fault point that is passed, and holds the thread that saves at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: str, until: str = "") -> None:
        self.passed: list[str] = []
        self.held, self.until, self.open = held, until, threading.Event()
        for module in (loop, saver, checkpoint):
            monkeypatch.setattr(module, "faultpoint", self)
        if held:  # else it would hold training as well, on a machine without memory to spare
            monkeypatch.setattr(copies, "SPARE", 0.0)

    def __call__(self, name: str) -> None:
        self.passed.append(name)
        if self.until == f"{name}@{self.passed.count(name)}":
            self.open.set()
        if name == self.held:
            assert self.open.wait(PATIENCE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("whole"), tiny())


def some_saver(run: Path, **more: Any) -> Saver:
    """Of a model whose moments exist."""
    config = configure(tiny())
    model = build(config)
    optimizer = adamw(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return Saver(run, model, optimizer, more.pop("scaler", None), config, **more)


def stored(path: Path) -> dict[str, torch.Tensor]:
    files = ("model.safetensors", "optimizer.safetensors")
    return {name: x for file in files for name, x in load_file(path / file).items()}


# ------------------------------------------------------------------------------ while it trains


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(NoiseImages(), tmp_path / "short", tiny(), stop_at=3)
    gate = Gate(monkeypatch, held="save.begin", until="step.end@6")
    many = tiny(runtime={"keep": 9})
    run = pretrain(NoiseImages(), tmp_path / "run", many)
    assert_same_run(run, whole)
    third = sorted((run.path / "checkpoints").iterdir())[0]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (third / name).read_bytes() == (
            Run(tmp_path / "short").checkpoint / name
        ).read_bytes()
    # The next save waits for this one, and the end of the run for the last.
    order = [name for name in gate.passed if name in ("save.copied", "save.renamed")]
    assert order == ["save.copied", "save.renamed"] * 4
    assert not writing_threads()


def test_everything_that_is_saved_is_of_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, held="save.begin")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # it exists from its first use on
    one = some_saver(tmp_path, scaler=scaler)
    before = [
        {name: x.clone() for name, x in state.items()}
        for state in checkpoint.live(one.model, one.optimizer)
    ]
    one.save(3, final=False)
    for state in checkpoint.live(one.model, one.optimizer):
        for x in state.values():
            x.add_(1)
    scaler.update(new_scale=4.0)
    gate.open.set()
    one.finish(final=True)
    path = tmp_path / "checkpoints" / "step-00000003"
    assert checkpoint.verify(path) is None
    found = stored(path)
    expected = before[0] | before[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert checkpoint.state(path)["scaler"]["scale"] == 8.0


def test_where_memory_has_no_room_for_a_copy_training_waits(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SPARE", 1.0)  # all of it must stay free
    gate = Gate(monkeypatch, held="")
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)
    points = ["step.end", "save.renamed"]
    order = [name for name in gate.passed if name in points]
    assert order == [*points[:1] * 2, *points] * 3 + points


def test_a_copy_that_does_not_fit_after_all_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    one = some_saver(tmp_path)
    monkeypatch.setattr(torch.Tensor, "clone", full)
    one.save(3, final=False)
    assert one.thread is None  # it is written already
    assert checkpoint.latest(tmp_path)[0] == tmp_path / "checkpoints" / "step-00000003"


def test_a_run_that_fails_keeps_the_checkpoint_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Counter[str]()

    def slow(tensors: Any, path: Path) -> None:
        failed.wait(PATIENCE)
        save_file(tensors, path)

    def fail(name: str) -> None:
        steps[name] += 1
        if steps[name] == 5:
            failed.set()
            raise ValueError("a bug")

    failed = threading.Event()
    monkeypatch.setattr(saver, "save_file", slow)
    monkeypatch.setattr(loop, "faultpoint", fail)
    with pytest.raises(ValueError, match="a bug"):
        pretrain(NoiseImages(), tmp_path, tiny())
    assert not writing_threads()  # nothing writes when the lock is released
    assert Run(tmp_path).checkpoint.name == "step-00000003"


# ------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    "point",
    [
        "save.host@2",
        *(
            pytest.param(f"save.{name}@{1 + i % 3}", marks=pytest.mark.slow)
            for i, name in enumerate(("begin", "model", "optimizer", "hashed", "synced", "moved"))
        ),
    ],
)
def test_a_full_disk_in_the_thread_is_said_at_once_and_survived(
    whole: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    point: str,
) -> None:
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv("STOPMIM_FAULT", f"{point}:full")
    run = pretrain(NoiseImages(), tmp_path, tiny())
    assert_same_run(run, whole)
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert "could not be written: [Errno 28] No space left on device" in said[0]
    assert said[0].endswith("; training continues")
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_the_last_save_must_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv("STOPMIM_FAULT", "save.hashed@1:full")
    with pytest.raises(StorageError, match=r"No space left on device.*; make room") as caught:
        pretrain(NoiseImages(), tmp_path, tiny(), stop_at=2)
    assert caught.value.exit_code == 5


def test_the_third_failure_in_a_row_ends_a_run_without_waiting_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(saver, "save_file", full)
    one = some_saver(tmp_path)
    one.save(1, final=False)
    one.save(2, final=False)
    one.save(3, final=False)
    assert one.thread
    one.thread.join(PATIENCE)
    with pytest.raises(StorageError, match="step 3 could not be written"):
        one.finish(wait=False)  # as after every update


def test_a_bug_in_the_thread_is_a_bug_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(tensors: Any, path: Path) -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr(saver, "save_file", bug)
    with pytest.raises(KeyError, match="unexpected"):
        pretrain(NoiseImages(), tmp_path, tiny())
    assert "in bug" in (tmp_path / "crash-rank0.txt").read_text()


# ------------------------------------------------------------------------------ when


def test_checkpoints_are_due_by_the_clock_unless_a_number_of_updates_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "SECONDS", 0.0)
    found = {}
    for every in (None, 2):
        config = tiny(runtime={"save_every": every, "keep": 9}, optim={"epochs": 1})
        run = pretrain(NoiseImages(), tmp_path / str(every), config)
        paths = sorted((run.path / "checkpoints").iterdir())
        found[every] = [int(path.name[5:]) for path in paths]
    assert found[2] == [2, 4, 5]
    assert (found[None][0], found[None][-1]) == (1, 5)  # 2 to 4: if the one before was written


def test_a_run_of_an_older_version_goes_on(whole: Run, tmp_path: Path) -> None:
    """Its run.json may say null, which was one epoch: five updates."""
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=4)
    text = (tmp_path / "run.json").read_text()
    assert '"save_every": 3' in text
    (tmp_path / "run.json").write_text(text.replace('"save_every": 3', '"save_every": null'))
    assert_same_run(pretrain(NoiseImages(), tmp_path), whole)
    last = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert last == ["step-00000004", "step-00000010"]


def clocked(out: Path, rank: int) -> None:
    """Only the first rank believes that time flies."""
    saver.__dict__["SECONDS"] = 0.0 if rank == 0 else 1e9
    timed = {"save_every": None, "parallel": "fsdp", "log_every": 2, "keep": 99}
    pretrain(NoiseImages(), out, tiny(runtime=timed))


@pytest.mark.slow
def test_the_clock_of_the_first_rank_decides_for_all(tmp_path: Path) -> None:
    ended = together(2, tmp_path / "logs", partial(clocked, tmp_path / "run"))
    assert [rank.code for rank in ended] == [0, 0], ended
    steps = [int(path.name[5:]) for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert {1, 2, 4, 6, 8, 10} <= set(steps)  # where they log, or everywhere if they are slow


def test_files_have_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    usual = os.umask(0o027)
    try:
        some_saver(tmp_path).save(1, final=True)
    finally:
        os.umask(usual)
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


# ------------------------------------------------------------------------------ non-finite weights


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, value: float, final: bool
) -> None:
    one = some_saver(tmp_path)
    one.save(1, final=True)
    with torch.no_grad():
        next(one.model.parameters()).view(-1)[0] = value
    if not final:
        one.save(2, final=False)  # training goes on meanwhile
    with pytest.raises(NonFiniteError, match=r"not finite at step 2, as .*; nothing was") as caught:
        one.save(2, final=True) if final else one.finish()
    assert caught.value.exit_code == 6
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_run_whose_last_update_overflows_ends_with_its_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of an update is of the weights before it: the next one would have noticed."""
    monkeypatch.setattr(loop, "rates", lambda *_: Rates(1e39, 0.0, 1.0))  # no config allows it
    with pytest.raises(NonFiniteError, match="at step 1, as"):
        pretrain(NoiseImages(8), tmp_path / "huge", tiny(optim={"epochs": 1}))
    assert not list((tmp_path / "huge" / "checkpoints").glob("step-*"))
