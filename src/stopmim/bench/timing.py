"""Shared parts of all benchmarks: the clock, the machine, and the lines they print and write."""

import datetime
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from stopmim._version import __version__
from stopmim.base.console import say
from stopmim.base.errors import StorageError
from stopmim.base.files import write_whole
from stopmim.config.schema import Config
from stopmim.gpu.devices import choose_device, choose_precision

CALLS = 10  # timed together, so that reading the clock costs nothing

Line = dict[str, Any]  # one result, printed as JSON


def seconds_per_call(work: Callable[[], Any], device: torch.device) -> float:
    """Mean over CALLS calls, GPU work included."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(CALLS):
        work()
    wait(device)
    return (time.perf_counter() - begin) / CALLS


def wait(device: torch.device) -> None:
    """Waits until the GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def speed(times: list[float], batch_size: int) -> dict[str, float]:
    """Throughput, and median, minimum and maximum of `times` in milliseconds."""
    median = statistics.median(times)
    return {
        "images_per_s": round(batch_size / median, 1),
        "ms": round(1e3 * median, 3),
        "ms_min": round(1e3 * min(times), 3),
        "ms_max": round(1e3 * max(times), 3),
    }


def sizes(config: Config) -> Line:
    """The sizes that decide how long a step takes."""
    batch_size = config.optim.batch_size
    return {"arch": config.arch, "image_size": config.image_size, "batch_size": batch_size}


def circumstances(config: Config) -> Line:
    """Precision, the way it is computed, and the machine."""
    device = choose_device(config.runtime.device)
    runtime = config.runtime
    said: Line = {"precision": str(choose_precision(runtime.precision, device) or torch.float32)}
    said |= {"compile": runtime.compile, "kernels": runtime.kernels, "residual": runtime.residual}
    return said | machine(device)


def machine(device: torch.device) -> Line:
    """Machine, date and versions with which a line was measured."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "stopmim": __version__,
        "date": datetime.date.today().isoformat(),
    }


def check_folder(folder: Path) -> None:
    """Raises StorageError unless `folder` is writable; called before minutes of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(f"{folder}: cannot write here: {error.strerror}") from None


def record_each(lines: Iterable[Line], folder: Path | None, what: str) -> str:
    """`record_lines` of each line as soon as there is one: if a command is ended, they remain."""
    text, about = list[str](), Line()
    for line in lines:
        about = about or line
        say(json.dumps(line))
        text.append(record_lines([line], folder, what, about))
    return "\n".join(text)


def record_lines(
    lines: list[Line], folder: Path | None, what: str, about: Line | None = None
) -> str:
    """Returns `lines` as JSON, and appends them to `what`_MACHINE_DATE.md in `folder`, if given.

    `about` has the machine and the date; by default the first line.
    """
    text, about = "\n".join(json.dumps(line) for line in lines), about or lines[0]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        device, date, end = about["device"], about["date"], "```\n"
        slug = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
        path = folder / f"{what}_{slug}_{date}.md"
        title = f"# `stopmim bench {about['bench'].split()[0]}` on {device}, {date}"
        before = path.read_text("utf-8") if path.exists() else f"{title}\n\n```json\n{end}"
        write_whole(path, f"{before.removesuffix(end)}{text}\n{end}")
    return text
