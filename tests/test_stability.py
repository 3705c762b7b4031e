"""The analysis of the study of stability: pairs, rates and their difference."""

import itertools
from typing import Any

import numpy as np
import pytest

import stability
from stability import One, Pairs
from stopmim.ablations.record import outcome_of
from stopmim.evals.paired import mcnemar

GRID = [*itertools.product((1e-3, 2e-3), (0.9, 0.99), (0, 1))]


def one(position: str, verdict: str, at: tuple[float, float, int] = (1e-3, 0.9, 0)) -> One:
    kept = {"collapse": 0.1, "partial collapse": 0.3}.get(verdict, 0.8)
    return One(position, *at, verdict, kept, 30.0 * kept, 28.0)


def split(both: int, first: int, second: int, neither: int) -> Pairs:
    """So many pairs in which both runs, one of them, or none has collapsed."""
    ill, well = one("a", "collapse"), one("a", "not collapsed")
    kinds = [(ill, ill), (ill, well), (well, ill), (well, well)]
    counts = (both, first, second, neither)
    return Pairs([kind for kind, n in zip(kinds, counts, strict=True) for _ in range(n)])


def test_a_run_of_the_grid_is_read_from_its_record() -> None:
    tree: dict[str, Any] = {
        "row": "any name",
        "seed": 1,
        "run": "r",
        "problem": "",
        "verdict": "partial collapse",
        "updates": 250,
        "seconds": 1.0,
        "config": {
            "positions": {"kind": "stochastic", "sigma": 0.25},
            "optim": {"lr": 0.002, "ema": [0.97, 1.0]},
        },
        "random_init": {"target_rank": 20.0},
        "curve": [{"step": 250, "target_rank": 5.0}],
        "answers": [
            {"name": "accuracy", "protocol": p, "value": v, "random_init": 28.0}
            for p, v in (("lowshot", 15.0), ("knn", 21.0))
        ],
    }
    (run,) = stability.grid([tree], [outcome_of(tree)])
    assert run == One("StoP-0.25", 0.002, 0.97, 1, "partial collapse", 0.25, 21.0, 28.0)


def test_runs_are_paired_at_the_same_place_of_the_grid_whatever_their_order() -> None:
    ill = {(2e-3, 0.9, 0), (2e-3, 0.9, 1), (2e-3, 0.99, 0)}
    runs = [one("sine-cosine", "collapse" if at in ill else "not collapsed", at) for at in GRID]
    noisy = [
        one("StoP-0.25", "partial collapse" if at == (2e-3, 0.9, 1) else "too early to say", at)
        for at in reversed(GRID)
    ]
    both = stability.paired([*runs, *noisy[:-1]])["StoP-0.25"]  # a run is missing
    assert len(both.pairs) == 7
    assert all(a.place == b.place for a, b in both.pairs)
    assert (both.count(True, False), both.count(False, True), both.count(True, True)) == (2, 0, 1)
    assert both.p == mcnemar(2, 0) == 0.5
    assert both.difference[0] == pytest.approx(-2 / 7)
    (line,) = stability.differences([*runs, *noisy])
    assert line["collapse rate, points"].startswith("-25 (")
    rates = stability.rates([*runs, *noisy])
    assert [(row["collapsed"], row["of these in full"]) for row in rates] == [
        ("3", "3"),
        ("1", "0"),
    ]


def test_the_interval_of_the_difference_has_its_coverage_and_a_width_where_all_agree() -> None:
    gain, low, high = split(8, 0, 0, 16).difference
    assert (gain, low < -0.05, high > 0.05) == (0.0, True, True)
    gain, low, high = split(6, 7, 1, 10).difference
    assert (gain, high < 0.0) == (-0.25, True)
    assert split(6, 1, 7, 10).difference == pytest.approx((-gain, -high, -low))
    share, n = [0.3, 0.2, 0.05, 0.45], 24
    draws = np.random.default_rng(0).multinomial(n, share, size=1000).tolist()
    intervals = [split(*draw).difference for draw in draws]
    covered = np.mean([low <= share[2] - share[1] <= high for _, low, high in intervals])
    assert 0.93 < covered < 0.99


def test_every_verdict_has_its_line_and_every_run_its_dot() -> None:
    verdicts = itertools.cycle(["collapse", "not collapsed", "over-training"])
    positions = ("sine-cosine", "StoP-0.0625", "StoP-0.25")
    runs = [one(p, next(verdicts), at) for p in positions for at in GRID]
    found = [(row["verdict"], row["runs"]) for row in stability.verdicts(runs)]
    assert found == [("not collapsed", "8"), ("collapse", "8"), ("over-training", "8")]
    picture = stability.figure(runs)
    drawn = {axes.get_title(): len(axes.lines) for axes in picture.axes if axes.get_title()}
    assert drawn == dict.fromkeys(positions, len(GRID))
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == [name for name, _ in found]
