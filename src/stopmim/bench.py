"""How long one training step takes, measured so that the number can be believed.

StoP and sine-cosine are timed in turn within one run: their ratio is then free of what the machine
does to both. Every line names the machine, so that two lines can be compared later.
"""

import datetime
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stopmim import masking
from stopmim._version import __version__
from stopmim.config import Config
from stopmim.data import shares
from stopmim.keys import torch_generator
from stopmim.mim import Batch, build
from stopmim.optim import adamw, rates, set_rates
from stopmim.plan import configure, size_options
from stopmim.runtime import choose_device, choose_precision, should_compile
from stopmim.train import compare, draw_masks, draw_noise, train_step

STEPS = 10  # updates timed together, so that starting and stopping the clock costs nothing


def bench_step(
    preset: str | None, changes: dict[str, Any], *, rounds: int = 10, out: Path | None = None
) -> str:
    """Times one training step of StoP and of its sine-cosine twin; JSON lines, one for each."""
    on_gpu = torch.cuda.is_available() and changes.get("runtime.device") != "cpu"
    usual = {"optim.batch_size": 256} if on_gpu and preset is None else {}
    base = configure(preset or ("vit_b16_stop" if on_gpu else "tiny_cpu"), usual | changes)
    torch.set_num_threads(base.runtime.threads or torch.get_num_threads())
    twin = base.positions.model_validate({"kind": "sincos"})
    variants = {"stop": base, "sincos": configure(base.model_copy(update={"positions": twin}))}
    memory = {name: _peak_memory(config) for name, config in variants.items()}
    steppers = {name: stepper(config) for name, config in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name in [*variants] * 2:
        _seconds(steppers[name])  # warm up, compile
    for _ in range(rounds):
        for name in variants:
            times[name].append(_seconds(steppers[name]))
    lines = [
        {
            "bench": "step",
            "positions": name,
            "arch": config.arch,
            "image_size": config.image_size,
            "batch_size": config.optim.batch_size,
            **_spread(times[name], config.optim.batch_size),
            "peak_memory_mib": memory[name],
            **_machine(config),
        }
        for name, config in variants.items()
    ]
    ratios = [a / b for a, b in zip(times["stop"], times["sincos"], strict=True)]
    ratio = {
        "bench": "step ratio stop / sincos",
        "time": round(statistics.median(ratios), 4),
        "time_min": round(min(ratios), 4),
        "time_max": round(max(ratios), 4),
        "memory": memory["stop"] and memory["sincos"] and memory["stop"] / memory["sincos"],
        "rounds": rounds,
    }
    text = "\n".join(json.dumps(line) for line in [*lines, ratio])
    if out is not None:
        _write(out, "step", text)
    return text


def stepper(config: Config) -> Callable[[], None]:
    """A function that makes one update, with the masks of the likeliest block size."""
    device = choose_device(config.runtime.device)
    amp = choose_precision(config.runtime.precision, device)
    model = build(config).to(device).train()
    optimizer = adamw(model, config.optim)
    loss = torch.compile(compare, dynamic=False) if should_compile(config, device) else compare
    parts = shares(config.optim.batch_size, config.runtime.accumulate)
    step = likeliest_step(config)
    shape = (parts[0].stop, 3, config.image_size, config.image_size)
    images = torch.randn(shape, generator=torch_generator("bench", device=device), device=device)
    masks = draw_masks(config, step, parts, device)
    set_rates(optimizer, rates(config.optim, 0, 1000))

    def update() -> None:
        train_step(
            model,
            (
                (
                    Batch(images, *m),
                    draw_noise(model.predictor, m, part, config, step, amp or torch.float32),
                )
                for m, part in zip(masks, parts, strict=True)
            ),
            optimizer,
            n_parts=len(parts),
            momentum=0.996,
            amp=amp,
            clip=config.optim.clip_grad,
            compare=loss,
        )

    return update


def likeliest_step(config: Config) -> int:
    """A step whose target blocks have the likeliest size, so that one shape is compiled."""
    if config.masking.kind == "random":
        return 0
    options = size_options(config.masking)
    blocks = masking.possible_blocks(
        config.side, options["target_scale"], options["target_aspect"], compat=options["compat"]
    )
    likeliest = max(blocks, key=lambda block: blocks[block])
    for step in range(10_000):
        generator = torch_generator("sizes", config.seed, step)
        if masking.draw_sizes(config.side, generator=generator, **options).target == likeliest:
            return step
    raise ValueError(f"no step draws blocks of {likeliest}")


def _peak_memory(config: Config) -> float | None:
    """MiB that three updates need at most, alone on the GPU; None on a CPU."""
    if choose_device(config.runtime.device).type != "cuda":
        return None
    torch.cuda.empty_cache()
    update = stepper(config)
    for _ in range(3):
        update()
    torch.cuda.reset_peak_memory_stats()
    update()
    return round(torch.cuda.max_memory_allocated() / 2**20, 1)


def _seconds(update: Callable[[], None]) -> float:
    """Seconds per update, GPU work included."""
    _wait()
    begin = time.perf_counter()
    for _ in range(STEPS):
        update()
    _wait()
    return (time.perf_counter() - begin) / STEPS


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _spread(times: list[float], batch_size: int) -> dict[str, float]:
    median = statistics.median(times)
    return {
        "images_per_s": round(batch_size / median, 1),
        "ms": round(1e3 * median, 3),
        "ms_min": round(1e3 * min(times), 3),
        "ms_max": round(1e3 * max(times), 3),
    }


def _machine(config: Config) -> dict[str, Any]:
    device = choose_device(config.runtime.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return {
        "precision": str(choose_precision(config.runtime.precision, device) or torch.float32),
        "compile": config.runtime.compile,
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "stopmim": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _write(folder: Path, what: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = json.loads(text.splitlines()[0])
    machine = re.sub(r"[^A-Za-z0-9]+", "-", first["device"]).strip("-").lower()
    name = f"{what}_{first['arch']}_{machine}_{first['date']}.md"
    body = (
        f"# `stopmim bench {what}` on {first['device']}, {first['date']}\n\n```json\n{text}\n```\n"
    )
    (folder / name).write_text(body, encoding="utf-8")
