"""The benchmark of evaluations reports every part. Speeds depend on the machine: not tested."""

from collections.abc import Iterator

import pytest

from stopmim.bench import evals as bench_evals
from stopmim.bench.timing import Line
from stopmim.evals.features import extract

TINY = bench_evals.Size("random:vit_micro32@64", "random:vit_micro32@224", 120, 16, 16, 8)


@pytest.mark.parametrize(
    ("part", "stages"),
    [
        ("memory", ["plain", "views alone", "encoder alone"]),
        pytest.param(
            "jpeg",
            ["plain", "views alone", "encoder alone", "decoded alone"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_features_have_a_rate_beside_that_of_every_stage(
    part: bench_evals.Part, stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    monkeypatch.setattr(bench_evals, "PHOTOS", 2)
    measured = bench_evals.bench_evals([part], device="cpu", rounds=1)
    lines = {line["bench"]: line for line in measured}
    assert next(iter(lines)) == "evals"
    assert set(lines) == {"evals", part, *(f"{part}, {stage}" for stage in stages)}
    assert all(line["images_per_s"] > 0 for name, line in lines.items() if name != "evals")


def test_features_that_are_not_those_of_the_plain_way_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    monkeypatch.setattr(bench_evals, "extract", lambda *a, **b: extract(*a, **b).flip(0))
    with pytest.raises(RuntimeError, match="features differ from those of the plain way by"):
        list(bench_evals.bench_evals(["memory"], device="cpu", rounds=1))


@pytest.mark.slow
def test_a_suite_is_timed_twice_and_by_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    _, first, second, steps = bench_evals.bench_evals(["suite"], device="cpu")
    assert first["networks"] == second["networks"] == 9
    assert {"features", "knn", "linear", "lowshot"} <= set(steps)


def test_goals_stand_beside_their_figures_and_only_where_there_are_any() -> None:
    lines: list[Line] = [
        {"bench": "evals", "device": "H200"},
        {"bench": "memory", "images_per_s": 24_999.0},
        {"bench": "jpeg", "images_per_s": 3000.0},
        {"bench": "jpeg, decoded alone", "images_per_s": 3100.0},
        {"bench": "tracking", "frames_per_s": 40.0, "ratio": 3.9, "jf_difference": -0.06},
        {"bench": "suite, first time", "seconds": 20.0},
    ]
    found = bench_evals.goals(lines)
    told = [(line["bench"].removeprefix("goal: "), line["met"]) for line in found]
    tracked = [("tracking", True), ("tracking", False), ("tracking", False)]
    assert told == [("memory", False), ("jpeg", True), *tracked]  # no second suite: no line
    assert found[1]["at_least"] == 2945  # the decoder alone could do no more than 3100
    assert not bench_evals.goals(lines[:1])


def test_a_part_that_fails_leaves_the_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: object) -> Iterator[Line]:
        yield {"bench": "jpeg, plain", "images_per_s": 1.0}
        raise OSError("no space")

    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    monkeypatch.setattr(bench_evals, "jpeg", broken)
    lines: list[Line] = []
    with pytest.raises(OSError, match="no space"):
        lines.extend(bench_evals.bench_evals(["jpeg", "memory"], device="cpu", rounds=1))
    names = [line["bench"] for line in lines]  # the error comes after them
    assert names[:2] == ["evals", "jpeg, plain"]
    assert "memory" in names


def test_features_are_timed_where_the_plain_way_has_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_room(*arguments: object, **options: object) -> object:
        raise RuntimeError("DataLoader worker is killed by signal: Bus error")

    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    monkeypatch.setattr(bench_evals, "DataLoader", without_room)
    measured = bench_evals.bench_evals(["memory"], device="cpu", rounds=1)
    lines = {line["bench"]: line for line in measured}
    assert "Bus error" in lines["memory, plain"]["error"]
    assert lines["memory"]["images_per_s"] > 0
