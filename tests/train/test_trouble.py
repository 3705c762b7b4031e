"""Updates that would do harm are skipped, batches that do not fit are cut, and nothing is lost."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks import complaints, together
from stopmim import Run, pretrain
from stopmim.base.errors import CheckpointError, NonFiniteError, ResourceError
from stopmim.config.schema import Config, OptimConfig
from stopmim.method.loss import Loss, masked_loss
from stopmim.train import guard as guards
from stopmim.train import step as update
from stopmim.train.guard import MOST, Guard
from tiny import NoiseImages, assert_same_run, tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stopmim.train.distributed.GRACE", 1.0)


class Spoilt:
    """`masked_loss` whose results at some calls, counted from 1, are multiplied by a factor.

    `before` calls were made by the runs that this one continues.
    """

    def __init__(self, at: set[int], factor: float, before: int = 0) -> None:
        self.at, self.factor, self.calls = at, factor, before

    def __call__(self, *args: Any) -> Loss:
        self.calls += 1
        found = masked_loss(*args)
        return found._replace(loss=found.loss * self.factor) if self.calls in self.at else found


def spoilt(
    monkeypatch: pytest.MonkeyPatch, out: Path, config: Config, loss: Spoilt, **options: Any
) -> Run:
    monkeypatch.setattr(update, "masked_loss", loss)
    return pretrain(NoiseImages(), out, config, **options)


SKIP = {"on_nonfinite": "skip"}
NAN = float("nan")


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_an_update_that_is_not_finite_is_skipped_counted_and_resumed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    config = tiny(optim=SKIP, runtime={"precision": precision})
    whole = spoilt(monkeypatch, tmp_path / "a", config, Spoilt({3, 4, 7}, NAN))
    assert [line["skipped"] for line in whole.metrics] == [0, 0, 1, 2, 2, 2, 3, 3, 3, 3]
    before, after = (whole.metrics[i]["norm_A"] for i in (1, 3))
    assert before == after  # nothing was made of updates 3 and 4
    assert whole.metrics[4]["norm_A"] != after
    spoilt(monkeypatch, tmp_path / "b", config, Spoilt({3, 4, 7}, NAN), stop_at=3)
    assert_same_run(spoilt(monkeypatch, tmp_path / "b", config, Spoilt({4, 7}, NAN, 3)), whole)


def test_a_run_that_has_only_skipped_updates_has_no_optimizer_state_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With loss scaling AdamW is not even called."""
    config = tiny(optim=SKIP, runtime={"precision": "fp16"})
    whole = spoilt(monkeypatch, tmp_path / "a", config, Spoilt({1, 2}, NAN), stop_at=4)
    cut = spoilt(monkeypatch, tmp_path / "b", config, Spoilt({1, 2}, NAN), stop_at=2)
    assert load_file(cut.checkpoint / "optimizer.safetensors") == {}
    spoilt(monkeypatch, tmp_path / "b", config, Spoilt(set(), NAN), stop_at=4)
    assert_same_run(cut, whole)


@pytest.mark.parametrize(
    "found",
    [
        *("x", {"a": 1}, [[1]], [1], [], None, False, 10**30, [1.0] * 4, [1.0] * 6, [10**400] * 5),
        *([None] * 5, [NAN] * 5, ["1"] * 5, [True] * 5, [0, 0, -1.0, 0, 0], [0, 0, 0, 0, 8.0]),
    ],
    ids=lambda found: str(found)[:30],
)
def test_the_state_of_a_guard_is_its_five_numbers_or_refused(found: Any) -> None:
    guard = Guard(OptimConfig(spike=2.0), CPU)
    about = json.loads(json.dumps({"step": 7, "guard": found}))
    with pytest.raises(CheckpointError, match=r"state.json: guard is .* expected the means") as e:
        guard.load(about, "state.json")
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("change", [None, "x", [1], -1, NAN, 10**400, {"more": 1}])
def test_the_state_of_a_scaler_is_its_numbers_or_refused(change: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    state = scaler.state_dict()
    guards.check_scaler(state, scaler, "state.json")
    state |= change if isinstance(change, dict) else {"scale": change}
    for found in (state, [state], 3):
        with pytest.raises(CheckpointError, match=r"state.json: scaler is .* expected numbers for"):
            guards.check_scaler(found, scaler, "state.json")


def test_a_guard_takes_its_state_and_starts_anew_without_one() -> None:
    guard = Guard(OptimConfig(spike=2.0), CPU)
    guard.load({"step": 7, "guard": [0.1, 2, 5.0, 1.0, 2.0]}, "state.json")
    assert guard.state.tolist() == [0.1, 2.0, 5.0, 1.0, 2.0]
    guard.load({"step": 7}, "state.json")
    assert guard.state.tolist() == [0.0] * 5


def test_a_spike_is_skipped_by_means_that_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update 6 is a spike only for means of the updates before the resume at 4."""
    monkeypatch.setattr(guards, "USUAL", 4)
    config = tiny(optim={"spike": 3.0})
    whole = spoilt(monkeypatch, tmp_path / "a", config, Spoilt({2, 6}, 50.0))
    assert [line["skipped"] for line in whole.metrics] == [0] * 5 + [1] * 5  # 2 came too early
    spoilt(monkeypatch, tmp_path / "b", config, Spoilt({2, 6}, 50.0), stop_at=5)
    assert_same_run(spoilt(monkeypatch, tmp_path / "b", config, Spoilt({6}, 50.0, 5)), whole)


def test_a_guard_that_has_nothing_to_do_changes_no_bit(tmp_path: Path) -> None:
    usual = pretrain(NoiseImages(), tmp_path / "a", tiny())
    guarded = pretrain(NoiseImages(), tmp_path / "b", tiny(optim={"spike": 1e6, **SKIP}))
    a, b = (run.model().state_dict() for run in (usual, guarded))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_too_many_skips_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(optim={"epochs": 4, **SKIP})
    with pytest.raises(NonFiniteError, match=f"{MOST} updates before step 14 were skipped"):
        spoilt(monkeypatch, tmp_path, config, Spoilt(set(range(4, 99)), NAN))
    assert all(x.isfinite().all() for x in Run(tmp_path).model().state_dict().values())


def test_a_spike_alone_does_not_forgive_what_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NonFiniteError, match="not finite at step 4"):
        spoilt(monkeypatch, tmp_path, tiny(optim={"spike": 9.0}), Spoilt({4}, NAN))


def test_means_follow_what_is_made_and_not_what_is_skipped() -> None:
    guard = Guard(OptimConfig(spike=2.0), CPU)
    true, one = torch.tensor(True), torch.tensor(1.0)
    for _ in range(guards.USUAL):
        assert not any(guard.judge(one, one, true))
    for loss, norm, want in ((1.9, 1.0, False), (2.2, 1.0, True), (1.0, 2.2, True)):
        skip, ends = guard.judge(torch.tensor(loss), torch.tensor(norm), true)
        assert (bool(skip), bool(ends)) == (want, False)
    assert guard.state[2:].tolist() == [guards.USUAL + 1, 2, 2]
    assert 1 < float(guard.state[0]) < 1.02


@pytest.mark.slow
def test_ranks_skip_the_same_updates(tmp_path: Path) -> None:
    config = tiny(optim=SKIP)

    def job(here: int) -> None:
        update.__dict__["masked_loss"] = Spoilt({3} if here else set(), NAN)
        pretrain(NoiseImages(), tmp_path / "run", config)

    assert [rank.code for rank in together(2, tmp_path / "logs", job)] == [0, 0]
    lines = Run(tmp_path / "run").metrics
    assert [line["skipped"] for line in lines] == [0, 0] + [1] * 8
    assert lines[1]["norm_A"] == lines[2]["norm_A"] != lines[3]["norm_A"]


# ------------------------------------------------------------------------------ memory


class Full:
    """`masked_loss` that has room for `most` images at a time."""

    def __init__(self, most: int) -> None:
        self.most, self.sizes = most, list[int]()

    def __call__(self, model: Any, target: Any, batch: Any, noise: Any) -> Loss:
        self.sizes.append(len(batch.images))
        if len(batch.images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return masked_loss(model, target, batch, noise)


HALVE = {"on_oom": "halve"}


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_batch_that_does_not_fit_is_cut_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    whole = pretrain(NoiseImages(), tmp_path / "a", tiny())
    full = Full(2)
    monkeypatch.setattr(update, "masked_loss", full)
    config = tiny(runtime={**HALVE, "workers": workers})
    run = pretrain(NoiseImages(), tmp_path / "b", config, stop_at=4)
    assert full.sizes == [8, 4] + 16 * [2]
    assert run.about["accumulate"] == 4
    assert {line["accumulate"] for line in run.metrics} == {4}
    full.sizes.clear()
    run = pretrain(NoiseImages(), tmp_path / "b", config)
    assert set(full.sizes) == {2}  # what was found out is not found out again
    for a, b in zip(run.metrics, whole.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_a_single_image_that_does_not_fit_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, config, said in (
        (0, tiny(runtime=HALVE), "with 1 images at a time: .* try --runtime.recompute on"),
        (4, tiny(), "with 8 images at a time: .* try --runtime.accumulate 2"),
    ):
        monkeypatch.setattr(update, "masked_loss", Full(most))
        with pytest.raises(ResourceError, match=said):
            pretrain(NoiseImages(), tmp_path / str(most), config)


@pytest.mark.slow
def test_ranks_start_again_with_smaller_parts(tmp_path: Path) -> None:
    config = tiny(runtime=HALVE)

    def job(here: int) -> None:
        update.__dict__["masked_loss"] = Full(2 if here else 8)
        pretrain(NoiseImages(), tmp_path / "run", config)

    ended = together(2, tmp_path / "logs", job)
    assert {rank.code for rank in ended} == {7}
    (line,) = complaints(ended)
    assert "the same command continues with 4 parts of a batch" in line
    assert [rank.code for rank in together(2, tmp_path / "logs", job)] == [0, 0]


# ------------------------------------------------------------------------------ lost ranks


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_fewer_ranks_continue_after_one_is_lost(tmp_path: Path, lost: int) -> None:
    """The rank that is left saves what it has, if it is the one that writes."""
    config = tiny(runtime={"log_every": 3, "save_every": 99})
    whole = pretrain(NoiseImages(), tmp_path / "whole", config)

    def job(here: int) -> None:
        if here == lost:
            os.environ["STOPMIM_FAULT"] = "step.end@5:kill"
        pretrain(NoiseImages(), tmp_path / "run", config)

    ended = together(2, tmp_path / "logs", job)
    assert ended[1 - lost].code == 7
    if lost:
        assert Run(tmp_path / "run").checkpoint.name in ("step-00000004", "step-00000005")
    run = pretrain(NoiseImages(), tmp_path / "run", config)
    assert [s["processes"] for s in run.about["starts"]] == [2, 1]
    assert [line["step"] for line in run.metrics] == [1, 3, 6, 9, 10]
    for a, b in zip(run.metrics, whole.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
