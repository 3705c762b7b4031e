"""Five minutes on two CPU cores: pretrain on embedded scenes, evaluate, write a report."""

import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from stopmim.base.console import console, duration, say
from stopmim.data.sources.scenes import Scenes
from stopmim.evals.features import extract, rankme
from stopmim.evals.knn import knn_accuracy
from stopmim.evals.linear import linear_probe
from stopmim.evals.results import Result, wilson_interval
from stopmim.insight.report.page import write_report
from stopmim.method.build import build, configure
from stopmim.method.encoder import Encoder
from stopmim.runs import checkpoint
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain

TRAIN, PROBE, TEST = 8192, 4096, 8192  # scenes to pretrain on, to fit probes on, to test on
# Seeds of those two. Not 2: the recipe of `tiny_cpu` was chosen by its accuracy on those scenes.
SEEDS = 1, 3
QUESTIONS = ("count", "distance", "shape")  # objects; depth and shape of the nearest one


def demo(out: Path, changes: dict[str, Any]) -> Run:
    """Runs everything and says where the report is."""
    begin, config = time.monotonic(), configure("tiny_cpu", changes)
    say(f"rendering {TRAIN} scenes to learn from")
    images = Scenes(TRAIN, size=48, seed=0)
    run = pretrain(images, out, config)
    say(f"evaluating frozen features on {TEST} new scenes, {PROBE} labelled ones to learn from")
    results = evaluate(run)
    (out / "results.jsonl").unlink(missing_ok=True)
    size = run.config.image_size
    data = [
        f"scenes:{n}:{size}:{s} ({n} images)" for n, s in zip((PROBE, TEST), SEEDS, strict=True)
    ]
    facts: dict[str, Any] = {"branch": "target", "train_data": data[0], "test_data": data[1]}
    facts["step"] = checkpoint.state(run.checkpoint)["step"]
    for result in results:
        run.add_result(**facts, **result.as_dict())
    page = write_report(run, images)
    console.print(table(results))
    say(f"finished in {duration(time.monotonic() - begin)}; open the report: {page}")
    return run


def evaluate(run: Run) -> list[Result]:
    """What k-NN and a linear classifier read off the features, against the untrained network's."""
    size, seed = run.config.image_size, run.config.seed
    probe, test = (Scenes(n, size, seed=s) for n, s in zip((PROBE, TEST), SEEDS, strict=True))
    untrained = build(run.config).branch().eval()

    def features(encoder: Encoder) -> tuple[Tensor, Tensor]:
        return extract(encoder, probe, size=size), extract(encoder, test, size=size)

    before, after = features(untrained), features(run.encoder())
    results = []
    for label in QUESTIONS:
        y, test_y = (torch.from_numpy(scenes.labels[label]) for scenes in (probe, test))

        def knn(x: tuple[Tensor, Tensor], y: Tensor = y, test_y: Tensor = test_y) -> float:
            return knn_accuracy(x[0], y, x[1], test_y)

        def linear(x: tuple[Tensor, Tensor], y: Tensor = y, test_y: Tensor = test_y) -> float:
            return linear_probe(x[0], y, x[1], test_y, seed=seed).accuracy

        for protocol, accuracy in (("knn", knn), ("linear", linear)):
            value = accuracy(after)
            results.append(
                Result(
                    name="accuracy",
                    protocol=protocol,
                    label=label,
                    value=value,
                    interval=wilson_interval(round(value * TEST), TEST),
                    n=TEST,
                    selection="held-out" if protocol == "linear" else "none",
                    seed=seed,
                    random_init=accuracy(before),
                )
            )
    results.append(
        Result(
            name="rankme",
            protocol="rankme",
            label="",
            value=rankme(after[1]),
            interval=None,
            n=TEST,
            selection="none",
            seed=seed,
            random_init=rankme(before[1]),
        )
    )
    return results


def table(results: list[Result]) -> Table:
    shown = Table("protocol", "question", "random init", "trained", "95 % interval")
    for result in results:
        low, high = result.interval or (float("nan"), float("nan"))
        percent = result.name == "accuracy"
        shown.add_row(
            result.protocol,
            result.label,
            f"{result.random_init:.1%}" if percent else f"{result.random_init:.1f}",
            f"{result.value:.1%}" if percent else f"{result.value:.1f}",
            f"{low:.1%} to {high:.1%}" if percent else "",
        )
    return shown
