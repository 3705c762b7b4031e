"""The demo from end to end, smaller than in life; and a benchmark that can be read again."""

import json
from pathlib import Path

import pytest

from stopmim import Run
from stopmim.base.random_keys import torch_generator
from stopmim.cli import demo, main
from stopmim.insight.report import page as report
from stopmim.method import masks as masking
from stopmim.method.build import configure
from stopmim.train.cost import likeliest_step


def test_the_demo_pretrains_evaluates_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("TRAIN", 64), ("PROBE", 160), ("TEST", 128)):
        monkeypatch.setattr(demo, name, count)
    monkeypatch.setattr(demo, "QUESTIONS", ("distance",))
    monkeypatch.setattr(report, "PREVIEWS", 2)
    out = tmp_path / "demo"
    command = ["demo", "--out", str(out), "--optim.epochs", "1", "--optim.batch_size", "32"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert f"open the report: {out / 'report.html'}" in said
    assert "random init" in said
    results = Run(out).results
    shares = [r for r in results if r["name"] == "accuracy"]
    assert [(r["label"], r["protocol"]) for r in shares] == [
        (label, protocol) for label in demo.QUESTIONS for protocol in ("knn", "linear")
    ]
    for result in shares:
        assert result["low"] <= result["value"] <= result["high"]
        assert 1 < result["random_init"] < 100
    page = (out / "report.html").read_text()
    for result in shares:
        assert f"{result['value']:.1f} %" in page
    assert main(command) == 0  # again: it is finished, and evaluates once more
    assert len(Run(out).results) == len(results)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_beats_random_init_by_a_clear_margin(tmp_path: Path) -> None:
    """On two of three questions random init lies below the 95 % interval, for k-NN and linear."""
    assert main(["demo", "--out", str(tmp_path)]) == 0
    results = [r for r in Run(tmp_path).results if r["name"] == "accuracy"]
    clear = [r["label"] for r in results if r["random_init"] < r["low"]]
    assert sum(clear.count(label) == 2 for label in demo.QUESTIONS) >= 2, results


def test_a_benchmark_prints_json_and_writes_a_dated_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stopmim.bench.timing.CALLS", 2)
    command = ["bench", "step", "--rounds", "1", "--out", str(tmp_path)]
    assert main([*command, "--optim.batch_size", "4", "--runtime.device", "cpu"]) == 0
    stop, sincos, ratio, *account = map(json.loads, capsys.readouterr().out.splitlines())
    assert (stop["positions"], sincos["positions"]) == ("stochastic", "sincos")
    assert stop["ms_min"] <= stop["ms"] <= stop["ms_max"]
    assert ratio["time"] == pytest.approx(stop["ms"] / sincos["ms"], rel=1e-2)
    assert {line["bench"] for line in account} == {"step account"}
    (page,) = tmp_path.iterdir()
    assert stop["date"] in page.name
    assert json.dumps(stop) in page.read_text()


def test_a_benchmark_has_the_likeliest_block() -> None:
    """On a 14x14 grid that is 7x5, by the probabilities of the released sampler's sizes."""
    step = likeliest_step(configure("vit_b16_stop"))
    sizes = masking.draw_sizes(14, generator=torch_generator("sizes", 0, step))
    assert sizes.target == (7, 5)
