"""Benchmarks a whole run against its bare step, on a folder of JPEGs that it reads from disk.

The run is an ordinary one: it shuffles, decodes, crops, draws masks and noise, measures its health,
logs and saves. Only its targets have one size, the likeliest, so that one update is compiled. Its
first half is left out: it compiles, records and fills the queues.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stopmim.base.console import say
from stopmim.bench.loader import PHOTOS, write_photos
from stopmim.bench.step import prepare, usual
from stopmim.bench.timing import Line, circumstances, seconds_per_call, sizes
from stopmim.data.sources.open import open_images
from stopmim.gpu.devices import choose_device
from stopmim.method.build import build_sampler, configure
from stopmim.runs.run import Run
from stopmim.train.cost import likeliest_step
from stopmim.train.loop import pretrain

FILES = {"cuda": 6000, "cpu": 256}
UPDATES = {"cuda": 1000, "cpu": 32}


def bench_run(preset: str | None, changes: dict[str, Any]) -> Iterator[Line]:
    """Times a step and then a run of the same config."""
    config = usual(preset, changes)
    if drawn := build_sampler(config).sizes(config.seed, likeliest_step(config)):
        height, width = drawn.target
        area, aspect = height * width / config.side**2, height / width
        one = {"masking.target_scale": (area, area), "masking.target_aspect": (aspect, aspect)}
        config = configure(config, one)
    device = choose_device(config.runtime.device)
    batch, files = config.optim.batch_size, FILES[device.type]
    epochs = -(-UPDATES[device.type] // max(1, files // batch))
    config = configure(config, {"optim.epochs": epochs, "optim.warmup_epochs": 0})
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder) / "photos", files, PHOTOS)
        run = pretrain(open_images(Path(folder) / "photos"), Path(folder) / "run", config)
        rate, longest = _second_half(run, batch)
    say(f"run: {rate:.1f} images/s")
    step = prepare(config, "own")
    alone = batch / min(seconds_per_call(step.update, device) for _ in range(5))
    line: Line = {"bench": "run", **sizes(config), "files": files, "epochs": epochs}
    line |= {"images_per_s": round(rate, 1), "step_images_per_s": round(alone, 1)}
    line |= {"of_step": round(rate / alone, 3), "longest_s": round(longest, 3)}
    yield line | circumstances(config)


def _second_half(run: Run, batch: int) -> tuple[float, float]:
    """Images per second, and the longest time between two lines of the log, of updates."""
    lines = run.metrics
    later = lines[len(lines) // 2 :]
    before = [lines[len(lines) // 2 - 1], *later]
    images = [batch * (b["step"] - a["step"]) for a, b in zip(before, later, strict=False)]
    seconds = [n / line["images_per_s"] for n, line in zip(images, later, strict=True)]
    return sum(images) / sum(seconds), max(seconds)
