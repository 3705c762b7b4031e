"""Benchmarks how long a save delays training.

Two runs of the same config, one after the other: in one, training waits for every save, as it does
where memory has no room for a copy; in the other, a thread saves beside it. Both log every update,
so that metrics.jsonl has the time of each.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from stopmim.bench.step import usual
from stopmim.bench.timing import Line, circumstances, sizes
from stopmim.config.schema import Config
from stopmim.data.sources.scenes import Scenes
from stopmim.gpu import copies
from stopmim.method.build import configure
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain

EPOCHS, PER_EPOCH = 100, 2  # updates
EVERY = 60  # updates between two saves; enough to write a ViT-B
ALL = 2.0  # fraction of memory to stay free: there is never room for a copy


def bench_saving(preset: str | None, changes: dict[str, Any]) -> Iterator[Line]:
    """Times the updates around saves.

    Nothing is compiled unless `changes` say so: it takes a minute, and the pauses are the same.
    """
    config = usual(preset, {"runtime.compile": "off"} | changes)
    length = {"optim.epochs": EPOCHS, "optim.warmup_epochs": 0}
    often = {"runtime.log_every": 1, "runtime.health_every": 0, "runtime.save_every": EVERY}
    config = configure(config, length | often)
    images = Scenes(PER_EPOCH * config.optim.batch_size, 64)
    with tempfile.TemporaryDirectory() as folder:
        for name, spare in (("training waits", ALL), ("a thread saves", copies.SPARE)):
            with mock.patch.object(copies, "SPARE", spare):
                run = pretrain(images, Path(folder) / name, config)
            line = {"bench": f"saving, {name}"} | _pauses(run, config)
            yield line | sizes(config) | circumstances(config)


def _pauses(run: Run, config: Config) -> Line:
    """Extra time of updates right after a save."""
    batch, middle = config.optim.batch_size, EVERY // 2
    seconds = [batch / line["images_per_s"] for line in run.metrics]
    # The time from one line of the log to the next counts for the second: a save for what follows.
    after = [seconds[i : i + middle] for i in range(EVERY, len(seconds), EVERY)]
    others = [x for i in range(0, len(seconds), EVERY) for x in seconds[i + middle : i + EVERY]]
    usual_one = statistics.median(others)
    lost = [sum(times) - len(times) * usual_one for times in after]
    size = sum(file.stat().st_size for file in run.checkpoint.iterdir())
    return {
        "longest_pause_ms": _ms(max(map(max, after)) - usual_one),
        "lost_per_save_ms": _ms(statistics.median(lost)),
        "longest_elsewhere_ms": _ms(max(others) - usual_one),
        "update_ms": _ms(usual_one),
        "saves": len(after),
        "megabytes": round(size / 1e6, 1),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
