"""Worker processes that read images, and error messages that name the image when one dies.

Every worker has its own pipe, whose other end closes however the worker dies; torch's DataLoader
shares one queue, where a kill at the wrong moment blocks all workers. A worker records in shared
memory which image it reads, so that a message can name it, and sets an alarm that kills it if the
image takes too long.
"""

import atexit
import contextlib
import errno
import itertools
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from stopmim.base.errors import ResourceError, UserError
from stopmim.data.ahead import in_reach
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images

MOST = 16  # workers by default: more than a ViT-B on one H200 needs, see docs/scale.md
AHEAD = 2  # lists of keys per worker: one to work on, and one to start next without waiting
LONG = 8192  # keys; two longer lists and an answer could fill a pipe from both ends
ORPHAN_SECONDS = 5.0  # between checks that the parent is alive

# The default since Python 3.14 is a server process, which would receive a copy of all images and
# run the caller's script again for every worker.
_processes: Any = mp.get_context("fork" if sys.platform == "linux" else None)

_number: int | None = None  # of this worker; None in the training process


class Failure(NamedTuple):
    """Sent by a worker instead of a batch."""

    reason: str
    image: int | None  # being read at the time
    error: UserError | None = None  # that has its own message and exit code


def cores() -> int:
    """Number of cores this process may use, possibly fewer than the machine has."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def cores_per_rank() -> int:
    """Number of cores for this process, of those that it shares with other ranks."""
    own = os.environ.get("SLURM_CPUS_PER_TASK", "")  # of a rank, unless torchrun started it
    if own.isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return min(cores(), int(own))
    return cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun


def default_workers(images: Images) -> int:
    """One per core of this rank, of more than two all but one, at most MOST; 0 for cheap images.

    One core is for the updates: it launches kernels and copies batches to the GPU.
    """
    n = cores_per_rank()
    return 0 if getattr(images, "in_process", False) else min(MOST, max(1, n - (n > 2)))


class Watched:
    """Reads `images` in this process or in `workers` others, with a record and a time limit.

    A worker may take `timeout` seconds for one image; 0 for no limit. Messages tell how to set the
    number of workers: by `option` and a number.
    """

    def __init__(
        self,
        images: Images,
        workers: int | None,
        timeout: float,
        option: str = "--runtime.workers ",
    ) -> None:
        self.images, self.timeout, self.option = images, timeout, option
        self.workers = default_workers(images) if workers is None else workers
        self.reading = torch.full((self.workers,), -1).share_memory_()  # image of each worker

    def read(self, i: int) -> np.ndarray:
        with self.reading_image(i):
            return self.images.read(i)

    @contextlib.contextmanager
    def reading_image(self, i: int) -> Iterator[None]:
        """While image `i` is read: in a worker, records it and limits the time."""
        if _number is None:
            yield
            return
        self.reading[_number] = i
        # Nothing handles this alarm: it kills the process even while a C library hangs.
        signal.setitimer(signal.ITIMER_REAL, self.timeout)
        try:
            yield
            self.reading[_number] = -1
        except BadImageError:
            self.reading[_number] = -1
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def name(self, i: int) -> str:
        return self.images.name(i)

    def at(self, worker: int) -> int | None:
        """The image that a worker is reading, or was reading when it died or failed."""
        return int(self.reading[worker]) if self.reading[worker] >= 0 else None


def batches(
    make: Callable[[list[Any]], Any],
    keys: Iterable[list[Any]],
    watched: Watched,
    numbers: Callable[[list[Any]], Iterable[int]] = list,
) -> Iterator[Any]:
    """Yields `make` of each list of keys, in order. It runs in the workers and reads by `watched`.

    `numbers` are the images that a list of keys needs: remote ones are fetched first.

    Raises:
        ResourceError: a worker died, hung or raised; the message names the image it was reading.
    """
    lists = in_reach(watched.images, keys, numbers, AHEAD * watched.workers)
    if not watched.workers:
        yield from map(make, lists)
        return
    pool = [_Worker(i, make, watched) for i in range(watched.workers)]
    due: deque[_Worker] = deque()
    try:
        for worker, first in zip(pool * AHEAD, lists, strict=False):
            if worker in due and len(first) > LONG:
                lists = itertools.chain([first], lists)
                break
            worker.send(first)
            due.append(worker)
        while due:
            worker = due.popleft()
            batch = worker.receive()
            if (part := next(lists, None)) is not None:
                worker.send(part)
                due.append(worker)
            yield batch
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    def __init__(self, number: int, make: Callable[[list[Any]], Any], watched: Watched) -> None:
        self.number, self.watched = number, watched
        self.pipe, theirs = mp.Pipe()
        arguments = (number, theirs, make, watched)
        self.process = _processes.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        atexit.register(self.process.kill)  # workers ignore the SIGTERM of multiprocessing
        theirs.close()  # now only the worker holds it: it closes when the worker dies

    def send(self, keys: list[Any]) -> None:
        try:
            self.pipe.send(keys)
        except OSError:
            raise self._error() from None

    def receive(self) -> Any:
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._error() from None
        if isinstance(answer, Failure):
            raise answer.error or self._error(answer)
        return answer

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()  # it holds no state, and may be stuck in a bad file
        self.process.join()
        atexit.unregister(self.process.kill)

    def _error(self, failure: Failure | None = None) -> ResourceError:
        """The reason of a failure; None: of the death of the process."""
        watched = self.watched
        if failure is None:
            self.process.join(1.0)
        code = 0 if failure else self.process.exitcode or 0
        image = failure.image if failure else watched.at(self.number)
        reading = "" if image is None else f" while reading {watched.images.name(image)}"
        fewer = f"{watched.option}{watched.workers // 2}"
        if code == -signal.SIGALRM and image is not None:
            return ResourceError(
                f"{watched.images.name(image)}: not read within {watched.timeout:g} s; fix or "
                f"remove it, or allow more with --runtime.worker_timeout"
            )
        if code == -signal.SIGBUS or (failure and "no shared memory" in failure.reason):
            return ResourceError(
                f"/dev/shm has no room for the batches of {watched.workers} workers; try {fewer}, "
                f"or make it larger (docker run --shm-size=8g)"
            )
        if failure and failure.reason.startswith("MemoryError"):
            return ResourceError(f"out of memory in a worker process{reading}; try {fewer}")
        if failure:
            return ResourceError(
                f"a worker process failed{reading}: {failure.reason}; {watched.option}0 --debug "
                f"shows where"
            )
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ResourceError(
            f"a worker process died{reading} ({how}); if memory ran out, try {fewer}; if the image "
            f"is at fault, remove it"
        )


def shared(tensor: Tensor) -> Tensor:
    """In a worker, moves `tensor` to shared memory; `send` would, but not report a failure."""
    if _number is None:
        return tensor
    try:
        return tensor.share_memory_()
    except RuntimeError as error:
        raise OSError(errno.ENOSPC, f"no shared memory: {error}") from None


def _work(number: int, pipe: Any, make: Callable[[list[Any]], Any], watched: Watched) -> None:
    """Main loop of a worker: keys in, batches out, until the pipe closes."""
    global _number
    _number, parent = number, os.getppid()
    # Ctrl-C reaches every process of a terminal: workers continue until the run has saved.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # libtiff complains on stderr about every damaged file; our errors go through the pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    while True:
        while not pipe.poll(ORPHAN_SECONDS):
            if os.getppid() != parent:
                return
        try:
            keys = pipe.recv()
        except EOFError:
            return
        try:
            answer = make(keys)
        except UserError as error:  # as of a remote file that is gone
            answer = Failure(str(error), watched.at(number), error)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            answer = Failure(text, watched.at(number))
        pipe.send(answer)
