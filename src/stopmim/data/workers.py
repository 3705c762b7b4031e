"""Worker processes that read images: replaced when they die or hang, and never waited for blindly.

Samples are keyed, so a worker that is lost costs nothing but time: another one redoes its lists. A
list that costs TRIES workers ends the run, in one line that names the image: workers record in
shared memory which one they read. The parent waits with a limit, and acts on signals meanwhile.
"""

import atexit
import contextlib
import mmap
import multiprocessing
import os
import queue
import re
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

import numpy as np

from stopmim.base.console import busy, warn
from stopmim.base.errors import ResourceError
from stopmim.base.signals import end_wait_if_told
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images
from stopmim.data.remote.ahead import in_reach
from stopmim.data.worker_process import Failure, receive, send, work

MOST = 16  # workers by default: more than a ViT-B on one H200 needs, see docs/scale.md
AHEAD = 2  # lists of keys per worker: one to work on, and one to start next without waiting
TRIES = 2  # workers that may be lost over one list of keys
TICK = 0.25  # seconds between two looks at signals and at the progress of a worker
LEAVE = 2.0  # seconds to wait for a killed worker; one in an endless system call never ends

# Not the default of Python 3.14, a server process: it would receive a copy of all images and run
# the caller's script again for every worker.
_processes: Any = multiprocessing.get_context("fork")


def cores() -> int:
    """Number of cores this process may use, possibly fewer than the machine has."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def cores_per_rank() -> int:
    """Number of cores for this process: its share of the cores that ranks have in common."""
    own = _given("SLURM_CPUS_PER_TASK")  # of a rank, unless torchrun started it
    if own and "TORCHELASTIC_RUN_ID" not in os.environ:
        return min(cores(), own)
    return cores() // max(1, _given("LOCAL_WORLD_SIZE"))  # set by torchrun


def _given(variable: str) -> int:
    """A count in an environment variable; 0 if it holds none, whoever has set it."""
    text = os.environ.get(variable, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def default_workers(images: Images) -> int:
    """One worker per core of this rank, at most MOST; 0 for images that are cheap to read.

    If there are more than two cores, one is left for the updates: it launches kernels and copies
    batches to the GPU.
    """
    n = cores_per_rank()
    return 0 if getattr(images, "in_process", False) else min(MOST, max(1, n - (n > 2)))


class Watched:
    """Reads `images` in this process or in `workers` others, with a record and a time limit.

    One image may take `timeout` seconds; 0 for no limit. Messages say how to set the number of
    workers: with `option` and a number.
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
        self.number: int | None = None  # of the worker that this is, or 0 in a thread
        n = max(1, self.workers)
        # Of each worker: the image it reads, or -1, and how many it has begun to read.
        self.record = np.frombuffer(mmap.mmap(-1, 16 * n), np.int64).reshape(2, n)
        self.record[0] = -1
        self.pool: list[_Worker] = []  # processes that stay, see `staying`

    @contextlib.contextmanager
    def staying(self, make: Callable[[Any], Any]) -> Iterator[None]:
        """Starts the processes now, for all calls of `batches` with this `make` until exit.

        Starting a process takes longer, the more memory this one has in use.
        """
        try:
            with busy("starting the processes that read images"):
                for number in range(self.workers):
                    self.pool.append(_Worker(number, make, self))
            yield
        finally:
            _end(self.pool)

    def read(self, i: int) -> np.ndarray:
        with self.reading_image(i):
            return self.images.read(i)

    @contextlib.contextmanager
    def reading_image(self, i: int) -> Iterator[None]:
        """Records image `i` while it is read, if another process or thread waits for it."""
        if self.number is None:
            yield
            return
        image, begun = self.record[:, self.number : self.number + 1]
        image[0] = i
        begun += 1
        try:
            yield
        except BadImageError:
            image[0] = -1
            raise
        image[0] = -1

    def name(self, i: int) -> str:
        return self.images.name(i)

    def at(self, worker: int) -> int | None:
        """The image that a worker is reading, or was reading when it failed."""
        return int(self.record[0, worker]) if self.record[0, worker] >= 0 else None

    def is_ready(self, poll: Callable[[float], bool], worker: int) -> bool:
        """Waits until `poll` finds the answer of a worker; False if the worker hangs."""
        waited, begun = 0.0, -1
        while not poll(TICK):
            end_wait_if_told()
            # Time that passes while this process is stopped too (Ctrl-Z) is not counted.
            waited = waited + TICK if self.record[1, worker] == begun else 0.0
            begun = int(self.record[1, worker])
            if self.timeout and waited >= self.timeout:
                return False
        return True

    def too_slow(self, worker: int) -> ResourceError:
        image = self.at(worker)
        if image is None:
            return ResourceError(
                f"a worker process has done nothing for {self.timeout:g} s; try {self.option}0, or "
                f"allow more with --runtime.worker_timeout"
            )
        return ResourceError(
            f"{self.images.name(image)}: not read within {self.timeout:g} s; fix or remove it, or "
            f"allow more with --runtime.worker_timeout"
        )


def batches(
    make: Callable[[Any], Any],
    keys: Iterable[Any],
    watched: Watched,
    numbers: Callable[[Any], Iterable[int]] = list,
) -> Iterator[Any]:
    """Yields `make` of each list of keys, in order. It runs in the workers and uses `watched`.

    `numbers` are the images that a list of keys needs: remote ones are fetched first.

    Raises:
        ResourceError: a worker raised, or died or hung repeatedly; names the image it was reading.
    """
    lists = in_reach(watched.images, keys, numbers, AHEAD * watched.workers)
    if not watched.workers:
        # What is computed cannot hang, and a second thread would only share its cores.
        limited = watched.timeout and not getattr(watched.images, "in_process", False)
        yield from _in_thread(make, lists, watched) if limited else map(make, lists)
        return
    pool = watched.pool or [_Worker(i, make, watched) for i in range(watched.workers)]
    due: deque[_Worker] = deque()
    stays = False
    try:
        for worker, first in zip(pool * AHEAD, lists, strict=False):
            worker.send(first)
            due.append(worker)
        while due:
            worker = due.popleft()
            batch = worker.receive()
            if (part := next(lists, None)) is not None:
                worker.send(part)
                due.append(worker)
            yield batch
        stays = pool is watched.pool
    finally:
        if not stays:  # workers with unanswered lists cannot be used again
            _end(pool)


def _end(pool: "list[_Worker]") -> None:
    for worker in pool:
        worker.end()
    pool.clear()


def _in_thread(
    make: Callable[[list[Any]], Any], keys: Iterable[list[Any]], watched: Watched
) -> Iterator[Any]:
    """Maps in a thread that this one can leave behind if an image takes too long.

    Python cannot interrupt a call into C. A thread that waits for a file or decodes it releases
    the interpreter's lock, so that this one continues; a decoder that keeps the lock blocks both.
    """
    tasks = queue.SimpleQueue[tuple[list[Any], Future[Any]] | None]()
    watched.number = 0

    def work() -> None:
        while task := tasks.get():
            part, answer = task
            try:
                answer.set_result(make(part))
            except BaseException as error:
                answer.set_exception(error)

    thread = Thread(target=work, daemon=True)  # the process does not wait for it on exit
    thread.start()
    try:
        for part in keys:
            answer = Future[Any]()
            tasks.put((part, answer))
            if not watched.is_ready(partial(_is_done, answer), 0):
                raise watched.too_slow(0)
            yield answer.result()
    finally:
        tasks.put(None)
        thread.join(LEAVE if watched.at(0) is None else 0)
        watched.number = None


def _is_done(answer: Future[Any], seconds: float) -> bool:
    return bool(futures.wait([answer], seconds).done)


class _Worker:
    """A process and the lists of keys that it has not answered, for its successor to redo."""

    def __init__(self, number: int, make: Callable[[list[Any]], Any], watched: Watched) -> None:
        self.number, self.make, self.watched = number, make, watched
        self.unanswered: deque[list[Any]] = deque()
        self.lost = 0  # processes lost over the list that is due
        self._start()

    def _start(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.watched.record[0, self.number] = -1
        arguments = (self.number, theirs, self.make, self.watched)
        self.process = _processes.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        atexit.register(self.process.kill)  # workers ignore the SIGTERM of multiprocessing
        theirs.close()  # now only the worker holds it: it closes when the worker dies

    def send(self, keys: list[Any]) -> None:
        self.unanswered.append(keys)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` notices
            send(self.socket, keys)

    def receive(self) -> Any:
        while True:
            try:
                if self.watched.is_ready(self._poll, self.number):
                    answer = receive(self.socket)
                    break
                self._replace(hangs=True)
            except (EOFError, ConnectionResetError):
                self._replace()
        if isinstance(answer, Failure):
            raise answer.error or self._error(answer)
        self.lost = 0
        self.unanswered.popleft()
        return answer

    def _poll(self, seconds: float) -> bool:
        return bool(wait([self.socket], seconds))

    def end(self) -> None:
        self.socket.close()
        self.process.kill()  # it holds no state, and may be stuck in a bad file
        self.process.join(LEAVE)
        atexit.unregister(self.process.kill)

    def _replace(self, *, hangs: bool = False) -> None:
        """Starts another process on the same lists; raises once TRIES were lost over one list."""
        if not hangs:
            self.process.join(LEAVE)
        error = self.watched.too_slow(self.number) if hangs else self._error()
        self.end()
        self.lost += 1
        if self.lost == TRIES:
            raise error
        warn(f"{str(error).split('; ')[0]}; another process tries again")
        self._start()
        for keys in self.unanswered:
            send(self.socket, keys)

    def _error(self, failure: Failure | None = None) -> ResourceError:
        """The error for a failure, or without one for the death of the process."""
        watched = self.watched
        code = 0 if failure else self.process.exitcode or 0
        image = failure.image if failure else watched.at(self.number)
        reading = "" if image is None else f" while reading {watched.images.name(image)}"
        fewer = f"{watched.option}{watched.workers // 2}"
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


def _work(
    number: int, pipe: socket.socket, make: Callable[[list[Any]], Any], watched: Watched
) -> None:
    watched.number = number
    work(pipe, make, lambda: watched.at(number))
