"""How many calls lie between a command and what it is about: a reader follows each of them."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from stopmim.cli import main
from stopmim.evals import linear
from stopmim.method.loss import masked_loss
from stopmim.train import step

SOURCE = str(Path(__file__).parents[1] / "src" / "stopmim")


def walked(function: Callable[..., Any], way: list[str]) -> Callable[..., Any]:
    """`function`, which notes in `way` the calls of ours that led to its first call."""

    def noting(*args: Any, **options: Any) -> Any:
        if not way:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                name = frame.f_code.co_qualname
                # A comprehension is a frame before Python 3.12, and no call to a reader.
                if frame.f_code.co_filename.startswith(SOURCE) and not name.endswith("comp>"):
                    way.insert(0, name)
                frame = frame.f_back
            way.append(function.__name__)
        return function(*args, **options)

    return noting


def test_six_calls_from_the_command_to_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way: list[str] = []
    monkeypatch.setattr(step, "masked_loss", walked(masked_loss, way))
    words = ["--optim.batch_size", "16", "--optim.epochs", "1", "--optim.warmup_epochs", "0"]
    run = str(tmp_path / "run")
    assert main(["pretrain", "scenes:16:48", "--preset", "tiny_cpu", "--out", run, *words]) == 0
    # A GPU records a step part by part: `work` is what a recording takes the place of.
    step_of = ["Step.__call__", "Step.work", "masked_loss"]
    assert way == ["main", "Pretrain.__call__", "pretrain", "train", *step_of]


def test_eight_calls_from_the_command_to_the_accuracy_of_a_linear_classifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way: list[str] = []
    monkeypatch.setattr(linear, "linear_probe", walked(linear.linear_probe, way))
    options = ["--data", "scenes:40:24", "--label", "count", "--layers", "last"]
    assert main(["eval", "linear", "random:vit_micro6@24", *options]) == 0
    assert len(way) - 1 <= 8, way
