"""``stopmim demo``: pretrain on embedded scenes, evaluate, report; five minutes on two cores."""

import time
from pathlib import Path
from textwrap import fill
from typing import Any

from stopmim.base.console import duration, say
from stopmim.data.sources.scenes import Scenes
from stopmim.evals import table
from stopmim.evals.protocols import Knn, Linear, RankMe
from stopmim.evals.request import ImageRequest
from stopmim.evals.results import record
from stopmim.evals.suite import evaluate
from stopmim.insight.report.page import write_report
from stopmim.method.build import configure
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain

TRAIN, PROBE, TEST = 8192, 4096, 8192  # scenes to pretrain on, to fit probes on, to test on
# Seeds of the last two. Not 2: the recipe of `tiny_cpu` was tuned on those scenes.
SEEDS = 1, 3
PROTOCOLS = (Knn(), Linear(layers="last"), RankMe())
QUESTIONS = ("count", "distance", "shape")  # objects; depth and shape of the nearest one


def demo(out: Path, changes: dict[str, Any]) -> Run:
    """Pretrains, evaluates by protocols of the suite, and prints the path of the report."""
    begin, config = time.monotonic(), configure("tiny_cpu", changes)
    say(f"rendering {TRAIN} scenes to learn from")
    images = Scenes(TRAIN, size=48, seed=0)
    run = pretrain(images, out, config)
    say(f"evaluating frozen features on {TEST} new scenes, {PROBE} labelled ones to fit on")
    counts = zip((PROBE, TEST), SEEDS, strict=True)
    train, test = (f"scenes:{n}:{run.config.image_size}:{seed}" for n, seed in counts)
    seed = run.config.seed
    request = ImageRequest(train=train, test=test, label=QUESTIONS, seed=seed, device="cpu")
    results, facts = evaluate(str(out), PROTOCOLS, request)
    lines = out / "results.jsonl"
    lines.unlink(missing_ok=True)  # of an earlier demo in this folder
    record(lines, [result.as_dict() for result in results], facts)
    page = write_report(run, images)
    ends = [fill(line, 80, break_on_hyphens=False) for line in table.conclusions(results, facts)]
    for part in (table.text(table.rows(results)), table.LEGEND, *ends):
        say(*part.splitlines())
    say(f"finished in {duration(time.monotonic() - begin)}; open the report: {page}")
    return run
