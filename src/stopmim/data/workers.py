"""Worker processes that read images, and what is said when one of them dies.

A worker notes in shared memory which image it is at, so that a message can name the one that killed
it, and sets an alarm that kills it should the image take too long.
"""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from stopmim.data.decode import BadImageError
from stopmim.errors import ResourceError

NOTHING = -1  # in the table, for a worker that is between two images


class Readable(Protocol):
    """What this module needs of `stopmim.data.Images`."""

    def read(self, i: int) -> np.ndarray: ...

    def name(self, i: int) -> str: ...


def cores() -> int:
    """Cores this process may use, which can be fewer than the machine has."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


class Watched:
    """The reading of `images`, by this process or by `workers` others: noted, and timed.

    Args:
        timeout: seconds that a worker may take for one image; 0 is as long as it likes.
    """

    def __init__(self, images: Readable, workers: int, timeout: float) -> None:
        self.images, self.workers, self.timeout = images, workers, timeout
        self.table = torch.full((workers, 2), NOTHING).share_memory_()  # process id, image number

    def read(self, i: int) -> np.ndarray:
        worker = get_worker_info()
        if worker is None:
            return self.images.read(i)
        self.table[worker.id, 0], self.table[worker.id, 1] = os.getpid(), i
        # Nothing handles this alarm, so it ends the process, even from within a hanging C library.
        signal.setitimer(signal.ITIMER_REAL, self.timeout)
        try:
            return self.images.read(i)
        except BadImageError:
            raise
        except Exception as error:
            error.add_note(f"while reading {self.images.name(i)}")
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.table[worker.id, 1] = NOTHING

    def read_by_the_dead(self) -> str:
        """Names of the images that workers were at when they died; empty if they were at none."""
        alive = {process.pid for process in multiprocessing.active_children()}
        rows = self.table.tolist()
        return ", ".join(
            self.images.name(number)
            for pid, number in rows
            if pid not in alive and number != NOTHING
        )


def batches(
    dataset: Dataset[Any],
    keys: Iterable[list[Any]],
    collate: Callable[[list[Any]], Any],
    watched: Watched,
    *,
    pin: bool = False,
) -> Iterator[Any]:
    """`collate` of the samples of `dataset` for each list of keys, in order.

    Raises:
        ResourceError: a worker died, hung or raised; it names the image that was being read.
    """
    workers = watched.workers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # more workers than cores: the user's choice
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=keys,  # type: ignore[arg-type]  # any iterable will do
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # the seeds of workers: the global one is the user's
        )
        parts = iter(loader)
    try:
        yield from parts
    except Exception as error:
        if "DataLoader worker" not in str(error):
            raise
        raise _explained(str(error), watched) from None


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """In a worker, `tensor` in shared memory, where it has to go anyway.

    Left to itself it goes there in a thread of the worker's queue, which prints a traceback when
    there is no room and lets the run wait for ever.
    """
    return tensor.share_memory_() if get_worker_info() else tensor


def _begin(_: int) -> None:
    # Ctrl-C reaches every process of a terminal: workers go on until the run has saved.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # libtiff reports every damaged file there; what a worker has to say comes back as an exception.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _explained(text: str, watched: Watched) -> ResourceError:
    """From what torch says of a failed worker to one line."""
    fewer = f"--runtime.workers {max(0, watched.workers // 2)}"
    lines = text.strip().splitlines()
    if "shared memory" in text or "Bus error" in text:
        return ResourceError(
            f"/dev/shm has no room for batches on their way from {watched.workers} workers; "
            f"try {fewer}, or make it larger (docker run --shm-size=8g)"
        )
    if "in DataLoader worker process" in text:  # a traceback, then our note if it was in `read`
        noted = lines[-1].startswith("while reading")
        reason, where = (lines[-2], f" {lines[-1]}") if noted else (lines[-1], "")
        return ResourceError(f"a worker process failed{where}: {reason}")
    names = watched.read_by_the_dead()
    if "Alarm clock" in text:
        return ResourceError(
            f"{names}: not read after {watched.timeout:g} s; mend or remove it, or allow more with "
            f"--runtime.worker_timeout"
        )
    return ResourceError(
        f"a worker process died{f' while reading {names}' if names else ''} ({lines[0].strip()}); "
        f"if memory ran out, try {fewer}; if it is the image, remove it"
    )
