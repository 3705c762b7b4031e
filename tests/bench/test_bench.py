"""Benchmarks measure what they say."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stopmim.base.errors import UserError
from stopmim.bench import growth as bench_growth
from stopmim.bench import run as bench_run
from stopmim.bench import saving as bench_saving
from stopmim.bench.accounting import account, operations
from stopmim.bench.step import bench_masks, bench_step, published_masks, tokens_of
from stopmim.bench.timing import Line, record
from stopmim.cli import main
from stopmim.method.build import configure

QUICK = {"optim.batch_size": 4, "runtime.device": "cpu"}


@pytest.fixture(autouse=True)
def _a_clock_is_read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stopmim.bench.timing.CALLS", 2)


def test_operations_are_those_of_the_architecture() -> None:
    config = configure("vit_b16_stop", {"optim.batch_size": 2})
    masks = published_masks(config, 2, torch.Generator())
    assert masks.context.shape == (2, 52)
    assert masks.targets.shape == (4, 2, 33)

    def block(tokens: int, queries: int, width: int) -> int:
        """qkv; scores and their use; projection and MLP of the queries."""
        return 6 * tokens * width**2 + 4 * tokens * queries * width + 18 * queries * width**2

    patch = 2 * 3 * 16 * 16 * 768
    # The last block of the target encoder goes on with the patches of the targets alone.
    fewer = 18 * (196 - 4 * 33) * 768**2
    target = 196 * patch + 12 * block(196, 196, 768) - fewer
    context = 52 * patch + 12 * block(52, 52, 768)
    both = 52 + 33
    one = 5 * block(both, both, 384) + block(both, 33, 384) + 33 * 2 * 384 * 768
    # A projects 52 tokens of the context and the noise of 4 x 33 masked ones.
    embed = 2 * 768 * 384 * (52 + 4 * 33)
    forward = context + 4 * one + embed
    # Backward costs twice the forward, less the gradients nobody needs: of pixels and of noise.
    unneeded = 52 * patch + 2 * 768 * 384 * 4 * 33
    expected = target + 3 * forward - unneeded
    assert operations(account(config, tokens_of(masks), 2)) / 2 == pytest.approx(expected, rel=1e-3)


def test_figures_of_one_day_are_in_one_file_and_none_is_lost(tmp_path: Path) -> None:
    line: Line = {"bench": "step", "arch": "vit_b16", "device": "NVIDIA H200", "date": "2026-11-16"}
    for masks in ("own", "published"):
        made = [line | {"masks": masks}, {"more": 1}]
        assert [*record(made, "step", tmp_path, by_arch=True)] == made
    (file,) = tmp_path.iterdir()
    assert file.name == "step_vit_b16_nvidia-h200_2026-11-16.md"
    title, _, opened, *lines, closed = file.read_text().splitlines()
    assert (title[0], opened, closed) == ("#", "```json", "```")
    drawn = [json.loads(one).get("masks") for one in lines]
    assert drawn == ["own", None, "published", None]


def test_the_lines_of_a_benchmark_that_is_ended_remain(tmp_path: Path) -> None:
    def ended() -> Iterator[Line]:
        yield {"bench": "masks", "device": "x", "date": "2026-11-16"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(record(ended(), "masks", tmp_path))
    assert (tmp_path / "masks_x_2026-11-16.md").read_text().splitlines()[-1] == "```"


def test_published_masks_are_of_published_architectures() -> None:
    config = configure("tiny_cpu", {})
    with pytest.raises(UserError, match="no published masks for vit_micro6"):
        published_masks(config, 2, torch.Generator())


def test_a_step_is_judged_by_a_product_measured_in_the_same_run() -> None:
    line, *account = bench_step("tiny_cpu", QUICK, rounds=1, twin=False)
    rounding = 0.001 / line["matmul_tflops"] + 0.001  # three digits each: much on a busy machine
    assert line["of_matmul"] == pytest.approx(line["tflops"] / line["matmul_tflops"], abs=rounding)
    assert line["tflops"] * 1e12 == pytest.approx(
        line["gflop_per_image"] * 1e9 * line["images_per_s"], rel=0.05, abs=6e8
    )
    assert line["copy_gb_per_s"] > 0
    flops = sum(sum(one["gflop"].values()) for one in account)  # two digits each
    assert flops == pytest.approx(line["gflop_per_image"] * line["batch_size"], abs=0.1)
    assert sum(one["floor_ms"] for one in account) > 0


def test_masks_are_timed_alone() -> None:
    (line,) = bench_masks("tiny_cpu", QUICK, rounds=2)
    assert 0 < line["ms_min"] <= line["ms"] <= line["ms_max"]


def test_growth_has_a_line_for_every_value_and_a_plot_for_every_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = {"optim.batch_size": [2, 4], "predictor.depth": [1, 2]}
    monkeypatch.setattr(bench_growth, "GROWTH", growth)
    small = {"arch": "vit_micro16", "image_size": 96, "masking.context_length": 8}
    changes = QUICK | small | {"predictor.width": 24, "predictor.depth": 2}
    lines = list(bench_growth.bench_growth(changes, rounds=1, out=tmp_path))
    assert [(x["varied"], x["value"]) for x in lines] == [(k, v) for k in growth for v in growth[k]]
    assert lines[1]["ms"] == lines[3]["ms"]  # the same step, measured once
    figure = (tmp_path / "growth.svg").read_text()
    assert figure.count("<!-- ms per step -->") == 2
    assert "<!-- optim.batch size -->" in figure
    assert "<!-- predictor.depth -->" in figure


def test_saves_are_timed_with_and_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("EPOCHS", 4), ("EVERY", 3)):  # 8 updates, and two saves before the end
        monkeypatch.setattr(bench_saving, name, value)
    small = {"arch": "vit_micro16", "image_size": 96, "masking.context_length": 8}
    waits, beside = bench_saving.bench_saving("tiny_cpu", QUICK | small)
    assert (waits["bench"], beside["bench"]) == ("saving, training waits", "saving, a thread saves")
    for line in (waits, beside):
        assert line["saves"] == 2
        assert line["update_ms"] > 0
        assert line["megabytes"] > 1
    assert waits["longest_pause_ms"] > 0


def test_a_run_is_timed_beside_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "FILES", {"cpu": 6})
    monkeypatch.setattr(bench_run, "UPDATES", {"cpu": 6})
    several = {"masking.target_scale": (0.06, 0.3), "optim.batch_size": 2, "runtime.log_every": 1}
    (line,) = bench_run.bench_run("tiny_cpu", QUICK | several)
    assert line["files"] == 6
    assert line["epochs"] == 2
    assert line["of_step"] == pytest.approx(
        line["images_per_s"] / line["step_images_per_s"], abs=0.01
    )


def test_a_step_is_timed_in_turn_with_other_configs() -> None:
    other = "runtime.recompute=on,optim.lr=1e-3"
    lines = bench_step("tiny_cpu", QUICK, rounds=1, twin=False, versus=(other,))
    first, second, ratio, *_ = lines
    assert "with" not in first
    assert second["with"] == other
    assert ratio["bench"] == f"step ratio to {other}"
    assert ratio["time"] == pytest.approx(first["ms"] / second["ms"], rel=0.01)
    with pytest.raises(UserError, match="expected KEY=VALUE"):
        list(bench_step("tiny_cpu", QUICK, versus=("runtime.recompute",)))


def test_kernels_are_timed_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stopmim.bench.kernels.HAVE_TRITON", False)
    assert main(["bench", "kernels"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "bench kernels: needs a GPU" in told
