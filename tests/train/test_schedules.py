"""The schedules of the published runs, update by update, and where they begin and end."""

import itertools
import math

import pytest

from helpers import golden, golden_about
from stopmim.base import schedules
from stopmim.config.presets import PRESETS
from stopmim.config.schema import OptimConfig
from stopmim.train.rates import Rates, rates

PER_EPOCH = 10
RUNS = {
    "vit_b": PRESETS["vit_b16_stop_released"]().optim,
    "vit_l": PRESETS["vit_l16_stop_released"]().optim,
    "vit_h": PRESETS["vit_h16_stop_released"]().optim,
}


@pytest.mark.parametrize("run", RUNS)
def test_every_update_of_the_published_runs_has_the_recorded_rates(run: str) -> None:
    recorded, config = golden("schedules"), RUNS[run]
    ours = [rates(config, step, PER_EPOCH) for step in range(config.epochs * PER_EPOCH)]
    for name, column in zip(("lr", "wd", "ema"), zip(*ours, strict=True), strict=True):
        assert list(column) == pytest.approx(recorded[f"{run}.{name}"].tolist(), rel=1e-6, abs=0)


@pytest.mark.parametrize("run", RUNS)
def test_the_rates_are_those_of_the_float64_run_to_rounding(run: str) -> None:
    about = golden_about("schedules")["config"][run]
    assert RUNS[run].epochs * PER_EPOCH == about["updates"]
    for step, want in about["float64_at_update"].items():
        now = rates(RUNS[run], int(step), PER_EPOCH)
        assert now._asdict() == pytest.approx(
            {"lr": want["lr"], "weight_decay": want["wd"], "momentum": want["ema"]},
            rel=1e-12,
            abs=0,
        )
    every = [rates(RUNS[run], step, PER_EPOCH) for step in range(about["updates"])]
    sums = [sum(column) for column in zip(*every, strict=True)]
    assert sums == pytest.approx([about["sum_float64"][k] for k in ("lr", "wd", "ema")], rel=1e-12)


def test_an_update_takes_the_next_step_for_lr_and_decay_and_its_own_for_the_ema() -> None:
    config = OptimConfig(epochs=10, warmup_epochs=2, start_lr=0.0, lr=1.0, ema=(0.9, 1.0))
    first, last = rates(config, 0, 5), rates(config, 49, 5)
    assert first.lr == pytest.approx(0.1)  # one of ten warm-up steps is done, not none
    assert first.momentum == 0.9
    assert last.lr == config.final_lr
    assert last.weight_decay == config.weight_decay[1]
    assert last.momentum == pytest.approx(0.998)  # one step before the end


def test_a_frozen_schedule_stays_where_it_was_but_the_ema_goes_on() -> None:
    config = OptimConfig(epochs=10, warmup_epochs=1, freeze_epoch=6)
    free = config.model_copy(update={"freeze_epoch": None})
    at = 6 * PER_EPOCH - 1  # the update that uses schedule step 60
    assert rates(config, at, PER_EPOCH) == rates(free, at, PER_EPOCH)
    later = [rates(config, step, PER_EPOCH) for step in range(at, 100)]
    assert {(now.lr, now.weight_decay) for now in later} == {(later[0].lr, later[0].weight_decay)}
    assert [now.momentum for now in later] == [
        rates(free, step, PER_EPOCH).momentum for step in range(at, 100)
    ]


def test_the_end_points_are_exact() -> None:
    def lr(step: int) -> float:
        return schedules.warmup_cosine(step, total=100, warmup=20, start=0.1, peak=0.7, final=0.3)

    assert (lr(0), lr(20), lr(100), lr(150)) == (0.1, 0.7, 0.3, 0.3)
    assert lr(10) == pytest.approx(0.4)
    assert lr(60) == pytest.approx(0.5)  # half of the cosine
    assert schedules.cosine(25, total=100, start=1.0, final=0.0) == pytest.approx(
        0.5 + math.sqrt(0.5) / 2
    )
    assert [schedules.linear(s, total=4, start=2.0, final=4.0) for s in (0, 1, 4, 9)] == [
        2.0,
        2.5,
        4.0,
        4.0,
    ]


@pytest.mark.parametrize("warmup", [0, 100])
def test_a_run_may_be_all_cosine_or_all_warm_up(warmup: int) -> None:
    values = [
        schedules.warmup_cosine(i, total=100, warmup=warmup, start=0.0, peak=1.0, final=0.5)
        for i in range(101)
    ]
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert all(step < 0 for step in steps) if warmup == 0 else all(step > 0 for step in steps)
    assert values[0] == (1.0 if warmup == 0 else 0.0)
    assert values[-1] == (0.5 if warmup == 0 else 1.0)


def test_rates_depend_on_nothing_but_the_step() -> None:
    config = OptimConfig(epochs=4, warmup_epochs=1)
    forward = [rates(config, step, 7) for step in range(28)]
    backward = [rates(config, step, 7) for step in reversed(range(28))][::-1]
    assert forward == backward
    assert all(isinstance(now, Rates) and all(map(math.isfinite, now)) for now in forward)
