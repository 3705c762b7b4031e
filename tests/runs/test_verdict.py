"""Verdicts rest on intervals, are counted by data set, and are read from files of any age."""

from pathlib import Path
from typing import Any

import pytest

from stopmim.runs.run import Run
from stopmim.runs.verdict import (
    ABOVE,
    BELOW,
    EQUAL,
    Tally,
    in_percent,
    judge,
    newest,
    of_run,
    resolution,
    tallies,
    verdict,
)

NEW: dict[str, Any] = {"name": "accuracy", "protocol": "knn", "label": "a", "unit": "percent"}
NEW |= {"value": 50.0, "random_init": 40.0, "test_data": "birds (9 images)", "step": 5}


def judged(low: float, high: float, **more: Any) -> dict[str, Any]:
    return NEW | {"difference_low": low, "difference_high": high} | more


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.1, 3, ABOVE), (-0.1, 30, EQUAL), (0, 30, EQUAL), (0, 0, EQUAL), (-3, -0.1, BELOW)],
)
def test_the_verdict_is_where_the_interval_is_and_not_how_large_the_difference(
    low: float, high: float, word: str
) -> None:
    assert judge(low, high) == word
    assert verdict(judged(low, high)) == f"{word} random init"
    assert judge(-high, -low, lower_is_better=True) == word


def test_without_an_interval_there_is_no_verdict() -> None:
    assert verdict(NEW) == ""
    assert verdict(NEW | {"low": 45.0}) == ""
    assert verdict({"name": "rankme", "unit": "", "value": 600.0, "random_init": 200.0}) == ""
    assert tallies([NEW]) == []


def test_a_line_of_an_old_version_is_a_line_in_percent() -> None:
    old = {"name": "accuracy", "protocol": "knn", "value": 0.41, "low": 0.39, "high": 0.43}
    old |= {"random_init": 0.22, "test_data": "birds", "videos": "films", "n": 1}
    found = in_percent(old)
    assert (found["value"], found["low"], found["random_init"]) == (41, 39, 22)
    assert (found["n"], found["unit"]) == (1, "percent")
    assert "videos" not in found  # of the suite's tracking
    assert in_percent(found) == found
    assert verdict(found) == "above random init"
    # Twice the interval of the value: random init has one too, and 99 % are wanted.
    assert (
        verdict(in_percent(old | {"random_init": 0.375})) == "not distinguishable from random init"
    )
    rank = in_percent({"name": "rankme", "protocol": "rankme", "value": 1.0, "random_init": 0.5})
    assert (rank["value"], rank["unit"]) == (1.0, "")
    decay = in_percent({"name": "J decay", "protocol": "tracking", "value": -0.02})
    assert decay["value"] == -2


@pytest.mark.parametrize(
    "line",
    [{}, {"value": "x", "low": [], "high": {}}, {"value": float("nan"), "random_init": 10**400}],
)
def test_a_line_that_holds_anything_has_no_verdict(line: dict[str, Any]) -> None:
    assert verdict(in_percent(line)) == ""


def test_questions_are_counted_for_each_data_set_by_itself() -> None:
    lines = [
        judged(1, 2),
        judged(-1, 2, label="b"),
        judged(-2, -1, label="c"),
        judged(1, 2, selection="paper"),  # chosen on the test split, where others were not
        judged(-1, 2, test_data="bees"),
        judged(1, 2, protocol="tracking", name="J&F", videos="films"),
        judged(1, 2, protocol="tracking", name="J", videos="films"),  # a part of J&F
    ]
    birds, bees, films = tallies(lines)
    assert birds == Tally("birds (9 images)", 1, 1, 1)
    assert birds.sentence == (
        "On birds (9 images), the encoder is above random init in 1 of 3 questions, "
        "not distinguishable from random init in 1, below random init in 1."
    )
    assert str(bees) == "not distinguishable from random init in the one question"
    assert films == Tally("films", 1, 0, 0)


def test_a_null_result_is_put_into_words_without_the_word_above() -> None:
    for equal in (1, 2, 9):
        assert "above" not in Tally("birds", 0, equal, 0).sentence


def test_a_verdict_of_nothing_says_what_could_not_be_seen() -> None:
    wide, narrow = judged(-4, 24, n=84), judged(2, 18, n=84)
    (said,) = resolution([wide, narrow])
    assert "differences below about 14 points" in said  # of the open question alone
    assert "with 84 test images" in said
    assert resolution([narrow]) == []


def test_a_question_asked_again_counts_once_with_its_newest_answer() -> None:
    old = {"name": "accuracy", "protocol": "knn", "label": "a", "step": 5}
    old |= {"value": 0.5, "low": 0.45, "high": 0.55, "random_init": 0.2}
    again = in_percent(old) | {"value": 21.0, "difference_low": -2.0, "difference_high": 4.0}
    assert newest([in_percent(old), again]) == [again]
    assert tallies([in_percent(old), again]) == [Tally("", 0, 1, 0)]


def test_of_a_run_only_its_newest_step_and_its_own_encoder_count() -> None:
    lines = [
        judged(1, 2, step=4),
        judged(-1, 2),
        judged(1, 2, branch="context"),
        judged(1, 2, step=None, encoder="random:vit_b16@224"),
        judged(1, 2, A="x", B="y"),
    ]
    assert of_run(lines) == lines[1:2]
    assert of_run(lines[2:3]) == lines[2:3]  # nothing but the context encoder was evaluated
    old = [{key: value for key, value in NEW.items() if key != "step"}]
    assert of_run(old) == old


def test_the_results_of_a_run_are_in_percent(tmp_path: Path) -> None:
    Run(tmp_path).add_result(protocol="knn", value=0.5)
    Run(tmp_path).add_result(protocol="knn", value=50.0, unit="percent")
    assert [line["value"] for line in Run(tmp_path).results] == [50.0, 50.0]
