"""Shared parts of all benchmarks: the clock, the machine, and the lines they print and write."""

import datetime
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stopmim._version import __version__
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


def timed(work: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    work(*arguments, **options)
    return time.perf_counter() - begin


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch to one thread, so that rates are those of a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def record(
    lines: Iterable[Line], what: str, folder: Path | None, *, by_arch: bool = False
) -> Iterator[Line]:
    """Yields `lines`, each once it is at the end of `what`_MACHINE_DATE.md in `folder`.

    The first line says on which machine and day. `by_arch` adds its network to the name of the
    file. If a benchmark is ended, the lines that it has measured remain.
    """
    end, path, text = "```\n", None, ""
    for line in lines:
        if folder is not None:
            if path is None:
                device, date = line["device"], line["date"]
                slug = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
                name = f"{what}_{line['arch']}" if by_arch else what
                path = folder / f"{name}_{slug}_{date}.md"
                title = f"# `stopmim bench {what}` on {device}, {date}"
                text = path.read_text("utf-8") if path.exists() else f"{title}\n\n```json\n{end}"
            text = f"{text.removesuffix(end)}{json.dumps(line)}\n{end}"
            write_whole(path, text)
        yield line
