"""The benchmark of evaluations reports every part. Speeds depend on the machine: not tested."""

import json
from pathlib import Path

import pytest

from stopmim.bench import evals as bench_evals
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
    part: bench_evals.Part, stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    monkeypatch.setattr(bench_evals, "PHOTOS", 2)
    text = bench_evals.bench_evals([part], device="cpu", rounds=1, out=tmp_path)
    lines = {line["bench"]: line for line in map(json.loads, text.splitlines())}
    assert next(iter(lines)) == "evals"
    assert set(lines) == {"evals", part, *(f"{part}, {stage}" for stage in stages)}
    assert all(line["images_per_s"] > 0 for name, line in lines.items() if name != "evals")
    assert [path.name.startswith("evals_") for path in tmp_path.iterdir()] == [True]


def test_features_that_are_not_those_of_the_plain_way_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    monkeypatch.setattr(bench_evals, "extract", lambda *a, **b: extract(*a, **b).flip(0))
    with pytest.raises(RuntimeError, match="features differ from those of the plain way by"):
        bench_evals.bench_evals(["memory"], device="cpu", rounds=1)


@pytest.mark.slow
def test_a_suite_is_timed_twice_and_by_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_evals, "ON_CPU", TINY)
    text = bench_evals.bench_evals(["suite"], device="cpu")
    _, first, second, steps = map(json.loads, text.splitlines())
    assert first["networks"] == second["networks"] == 9
    assert {"features", "knn", "linear", "lowshot"} <= set(steps)
