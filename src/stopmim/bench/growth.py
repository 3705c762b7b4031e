"""Benchmarks how step time grows with batch, tokens, target blocks, depth and image size."""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from stopmim.base.files import replaced
from stopmim.bench.step import prepare
from stopmim.bench.timing import Line, circumstances, seconds_per_call, sizes, speed
from stopmim.config.schema import Config
from stopmim.gpu.devices import choose_device
from stopmim.method.build import configure

# Config keys and their values. Everything else is as in `vit_s16`, batch 128.
GROWTH: dict[str, list[Any]] = {
    "optim.batch_size": [64, 128, 256, 512],
    "masking.context_length": [28, 55, 82],
    "masking.targets": [2, 4, 6],
    "predictor.depth": [3, 6, 12],
    "image_size": [160, 224, 288],
}


def bench_growth(
    changes: dict[str, Any], *, rounds: int = 3, out: Path | None = None
) -> Iterator[Line]:
    """Times steps that differ from a baseline in one key, and draws them in `out`."""
    own = {"arch": "vit_s16", "optim.batch_size": 128, "masking.context_scale": (1.0, 1.0)}
    known: dict[str, Line] = {}  # the baseline is in every series, but measured once
    lines = []
    for key, values in GROWTH.items():
        for value in values:
            config = configure("vit_b16_stop", own | changes | {key: value})
            name = config.model_dump_json()
            if name not in known:
                known[name] = _measure(config, rounds)
            lines.append({"bench": "growth", "varied": key, "value": value} | known[name])
            yield lines[-1]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with replaced(out / "growth.svg") as temporary:
            draw_growth(lines).savefig(temporary)


def _measure(config: Config, rounds: int) -> Line:
    device = choose_device(config.runtime.device)
    step = prepare(config, "own")
    times = [seconds_per_call(step.update, device) for _ in range(rounds)]
    line = sizes(config) | speed(times, config.optim.batch_size)
    line |= {"peak_memory_mib": step.memory, "context": step.tokens.context}
    line |= {"target": step.tokens.target, **circumstances(config)}
    del step
    torch._dynamo.reset()  # it limits the recompilations of one function
    gc.collect()
    return line


def draw_growth(lines: Sequence[Line]) -> Figure:
    """Draws the lines of `bench_growth`: one small plot per varied key."""
    names = list(dict.fromkeys(line["varied"] for line in lines))
    figure = Figure(figsize=(3 * len(names), 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [line for line in lines if line["varied"] == name]
        x, y = [line["value"] for line in own], [line["ms"] for line in own]
        axes.plot(x, y, marker="o", color="#0072b2")
        axes.set(xlabel=name.replace("_", " "), ylabel="ms per step")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.suptitle(f"{own[0]['arch']}, {own[0]['device']}, {own[0]['date']}")
    return figure
