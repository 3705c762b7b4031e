"""A reference is compared with runs of its own kind only, at the same share of training."""

import json
from pathlib import Path
from typing import Any

import pytest

from stopmim.config.schema import Config
from stopmim.health.doctor import diagnose, examine
from stopmim.health.reference import (
    FILES,
    KEYS,
    LINES,
    find_reference,
    rounded,
    thinned,
    training_share,
    write_reference,
)
from stopmim.insight.report.page import write_report
from stopmim.method.build import configure
from stopmim.runs.run import Run

WRITTEN = sorted(FILES.glob("*.jsonl"))
SCENES = {"source": "scenes:64:48"}  # as run.json has it


def half_done(path: Path) -> Run:
    """A run directory of `tiny_cpu` with another number of epochs, halfway through."""
    config = configure("tiny_cpu", {"optim.epochs": 8})
    ours = find_reference(config, SCENES)
    assert ours is not None
    health = ours.at(0.5)
    start = {key: value for key, value in ours.rows[0].items() if key != "share"}
    lines: list[dict[str, Any]] = [
        {"step": 1, "epoch": 0.01, "loss": 0.4, "random_init": start},
        {"step": 400, "epoch": 4.0, **{key: 2 * health[key] for key in KEYS}},
    ]
    path.mkdir()
    about = {"config": config.model_dump(mode="json"), "data": SCENES}
    (path / "run.json").write_text(json.dumps(about))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(path)


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.stem)
def test_a_reference_is_a_healthy_run_in_a_hundred_lines(file: Path) -> None:
    about, *rows = map(json.loads, file.read_text().splitlines())
    assert len(rows) < LINES
    images = about["kind"]["images"]
    data = SCENES if images == "scenes" else {"source": "images", "fingerprint": images}
    ours = find_reference(configure(file.stem), data)
    assert ours is not None
    assert (ours.name, ours.rows) == (about["name"], rows)
    shares = [row["share"] for row in rows]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    measured = [row | {"step": row["share"]} for row in rows if "skill" in row]
    assert diagnose([{"random_init": measured[0]}, *measured[1:]]).verdict == "not collapsed"


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "vit_ti6"},
        {"image_size": 60},
        {"positions.kind": "sincos"},
        {"masking.context_length": 12},
        {"masking.targets": 3},
        {"predictor.depth": 2},
    ],
)
def test_a_run_of_another_kind_has_no_reference(change: dict[str, Any]) -> None:
    assert find_reference(configure("tiny_cpu"), SCENES) is not None
    assert find_reference(configure("tiny_cpu", {"optim.lr": 1e-3, "seed": 5}), SCENES) is not None
    assert find_reference(configure("tiny_cpu", change), SCENES) is None


@pytest.mark.parametrize("data", [{"source": "my_photos", "fingerprint": "x"}, {}, None, "torn"])
def test_a_run_on_images_of_another_or_of_no_known_kind_has_no_reference(data: object) -> None:
    assert find_reference(configure("tiny_cpu"), data) is None


def test_the_doctor_shows_what_the_reference_had_at_the_same_share(tmp_path: Path) -> None:
    run = half_done(tmp_path / "run")
    found = examine(run.path)
    assert found.reference == "tiny_cpu on scenes"
    for e in found.evidence:
        assert e.reference is not None
        assert e.value == pytest.approx(2 * e.reference)
    assert "reference: tiny_cpu on scenes, at the same share" in str(found)
    assert diagnose(run.metrics).reference is None
    assert diagnose(run.metrics, run.config, {"source": "my_photos"}).reference is None
    assert "reference" not in str(diagnose(run.metrics))


def test_the_report_draws_the_reference_to_the_length_of_the_whole_run(tmp_path: Path) -> None:
    page = write_report(half_done(tmp_path / "run")).read_text()
    assert "reference: tiny_cpu on scenes" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (loss,) = (chart for chart in data["charts"] if chart["title"] == "Loss")
    assert [line["run"] for line in loss["lines"]] == [0, -1]
    assert loss["lines"][1]["step"][-1] == 800  # 8 epochs of 100 updates


def test_a_reference_made_of_a_run_has_its_measurements_and_no_more_than_its_share_of_lines(
    tmp_path: Path,
) -> None:
    config = configure("tiny_cpu", {"optim.epochs": 2})
    lines: list[dict[str, Any]] = [{"step": 1, "epoch": 0.002, "random_init": {"skill": -3.0}}]
    for step in range(2, 1001):
        measured = {"skill": step / 1000} if step % 100 == 0 else {}
        lines.append({"step": step, "epoch": step / 500, "loss": 1 / step, **measured})
    about = {"config": config.model_dump(mode="json"), "data": SCENES}
    tmp_path.joinpath("run.json").write_text(json.dumps(about))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    tmp_path.joinpath("metrics.jsonl").write_text(text)
    write_reference(Run(tmp_path), tmp_path / "made.jsonl", "made")
    head, *rows = map(json.loads, (tmp_path / "made.jsonl").read_text().splitlines())
    assert head["name"] == "made"
    assert head["kind"]["images"] == "scenes"
    assert len(rows) < LINES
    assert [row["share"] for row in rows if "skill" in row] == [k / 10 for k in range(11)]


def test_a_thinned_curve_keeps_its_end_and_its_measurements_but_never_too_many() -> None:
    for measured in (0, 7, 60, 61, 500):
        lines = [{"step": i} | ({"skill": 0.1} if i < measured else {}) for i in range(1000)]
        kept = thinned(lines, LINES)
        assert LINES / 2 < len(kept) <= LINES
        assert kept[-1]["step"] == 999
        steps = [row["step"] for row in kept]
        assert steps == sorted(set(steps))
        health = sum("skill" in row for row in kept)
        assert health == measured if measured <= 60 else 30 <= health <= 60
    assert thinned([], LINES) == []
    short = [{"step": i, "loss": 1 / 3} for i in range(3)]
    assert thinned(short, LINES) == short
    assert rounded({"step": 123456, "loss": 1 / 3, "host": "x"}, ("step", "loss")) == {
        "step": 123456,
        "loss": 0.3333,
    }


def test_the_share_of_a_run_that_was_trained_on_is_all_of_it() -> None:
    assert training_share(Config(), {"epoch": 10 * Config().optim.epochs}) == 1
    assert training_share(Config(), {}) == 0
