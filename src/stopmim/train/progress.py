"""Progress of a run on the terminal: what it will do, how far it is, when it will end."""

import datetime
import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stopmim.base.console import Ticker, say, warn
from stopmim.base.memory import main_memory
from stopmim.base.tables import counted, spoken
from stopmim.config.architectures import printed
from stopmim.config.schema import Config
from stopmim.data.images import Images
from stopmim.data.loading import steps_per_epoch

REFRESH = 2.0  # seconds between two readings of the loss, which wait for a GPU
SURE = 5.0  # seconds of updates before the end is predicted
WORTH = 60.0  # seconds; the end of a shorter run is not announced
FULL = 0.95  # share of main memory in use above which a warning is due


def announce(
    path: Path,
    images: Images,
    config: Config,
    preset: str | Path | Config | None,
    device: torch.device,
    ranks: int,
) -> None:
    """Prints images, network, preset, updates and device; nothing if the run is finished."""
    updates = config.optim.epochs * steps_per_epoch(images, config)
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    named = f" ({Path(preset).name})" if isinstance(preset, str | Path) else ""
    if not (path / "checkpoints" / f"step-{updates:08d}").exists():
        say(
            f"{counted(len(images), 'image')}, {printed(config.arch)} at "
            f"{config.image_size} px{named}, {counted(updates, 'update')} on "
            f"{f'{ranks} x ' if ranks > 1 else ''}{chip}"
        )


class Progress:
    """Keeps a ticker up to date with the updates, and predicts the end once."""

    def __init__(self, ticker: Ticker, config: Config, per_epoch: int) -> None:
        self.ticker, self.config, self.per_epoch = ticker, config, per_epoch
        self.step, self.time = ticker.done, ticker.start  # of the last reading
        self.rate = 0.0  # images per second since the reading before
        self.begun = self.predicted = False

    def show(
        self, step: int, values: Mapping[str, Tensor], lr: float | Tensor, *, read: bool
    ) -> None:
        """Shows update `step`; `read` means that its loss can be read without waiting."""
        now = time.monotonic()
        is_old = now - self.time > REFRESH
        if is_old or not self.rate:
            self.rate = (step - self.step) * self.config.optim.batch_size / (now - self.time)
            self.step, self.time = step, now
        if is_old or read:
            numbers = (
                f"epoch {math.ceil(step / self.per_epoch)}/{self.config.optim.epochs}",
                f"{self.rate:.{0 if self.rate >= 10 else 1}f} img/s",
                f"loss {float(values['loss']):.4f}",
            )
            extra = (f"lr {lr:.1e}", f"target std {float(values['target_std']):.3f}")
            self.ticker.update(step, *numbers, extra=extra)
        else:
            self.ticker.update(step)
        if not self.begun:
            self.begun = True
            self._look_at_memory()
        elif not self.predicted and self.ticker.mark and now - self.ticker.mark[1] > SURE:
            self.predicted = True
            if (left := self.ticker.seconds_left) and left > WORTH:
                say(f"about {spoken(left)} left, until {time_of_day(left)}")

    def _look_at_memory(self) -> None:
        """Warns if the system may soon kill the process, which then gets no chance to say why."""
        memory = main_memory()
        if memory and memory.free < (1 - FULL) * memory.total:
            warn(
                f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory are left: "
                f"the system may kill this run (exit code 137); try --runtime.accumulate 2"
            )


def time_of_day(seconds: float) -> str:
    """The time `seconds` from now, with the date if it is not today."""
    now = datetime.datetime.now()
    then = now + datetime.timedelta(seconds=seconds)
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M}"


class Clock:
    """Images per second since it was last read; `seconds` per update, of the last reading."""

    def __init__(self, step: int) -> None:
        self.step, self.time, self.seconds = step, time.monotonic(), 0.0

    def read(self, step: int, batch_size: int) -> dict[str, float]:
        now = time.monotonic()
        self.seconds = max(1e-9, now - self.time) / (step - self.step)
        self.step, self.time = step, now
        return {"images_per_s": batch_size / self.seconds}


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of a GPU so far: allocated by tensors, and reserved by torch."""
    if device.type != "cuda":
        return {}
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return dict(zip(("memory_mib", "memory_held_mib"), (n / 2**20 for n in peaks), strict=True))
