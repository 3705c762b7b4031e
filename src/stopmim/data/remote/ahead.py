"""Reads ahead: fetches remote files before the order of an epoch comes to their images.

All fetching for worker processes happens here, in threads of the process that they work for. A file
is kept while a list of images that needs it is waiting, or being read.
"""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from stopmim.data.images import Images
from stopmim.data.remote.attempt import MissingError
from stopmim.data.remote.cache import Held, Remote, RemoteFiles, budget, hold
from stopmim.data.subset import Selected, Subset

AT_ONCE = 8  # files that are fetched at the same time
MOST = 512  # files that are kept at a time
LISTS = 512  # most lists that are waiting

T = TypeVar("T")


def in_reach(
    images: Images, lists: Iterable[T], numbers: Callable[[T], Any], in_flight: int
) -> Iterator[T]:
    """Yields `lists`, each when the files with its images are here.

    `numbers` are the images of a list, which may be in use until `in_flight` more are taken.
    """
    files_of, files = _remote(images)
    if files is None:
        yield from lists
        return
    window = _Window(files.remotes)
    waiting: deque[tuple[T, list[int]]] = deque()
    used: deque[list[int]] = deque()
    source, following = iter(lists), None
    try:
        while True:
            while len(waiting) < LISTS and window.is_idle:
                if following is None and (part := next(source, None)) is not None:
                    following = part, files_of(np.asarray(list(numbers(part)), np.int64))
                if following is None or (waiting and not window.has_room(following[1])):
                    break
                window.want(following[1])
                waiting.append(following)
                following = None
            if not waiting:
                return
            part, needed = waiting.popleft()
            window.wait(needed)
            used.append(needed)
            if len(used) > in_flight + 1:
                window.release(used.popleft())
            yield part
    finally:
        window.close()


def is_summed(images: Images) -> bool:
    """Whether images are in remote files whose checksums are compared when they are fetched."""
    _, files = _remote(images)
    return files is not None and not any(remote.is_single for remote in files.remotes)


def _remote(images: Images) -> tuple[Callable[[np.ndarray], list[int]], RemoteFiles | None]:
    """The remote files of `images`, if any, and which of them hold images of given numbers."""
    if isinstance(images, Subset):
        inner, files = _remote(images.images)
        return lambda numbers: inner(images.kept[numbers]), files
    if isinstance(images, Selected):
        return _remote(images.images)
    files = getattr(images, "files", None)
    if not isinstance(files, RemoteFiles):
        return lambda numbers: [], None
    file_of: Any = getattr(images, "file_of")  # noqa: B009 - not part of the interface
    return lambda numbers: np.unique(file_of(numbers)).tolist(), files


class _Window:
    """The files that lists ahead or in use need: fetched in the order in which they were wanted."""

    def __init__(self, remotes: list[Remote]) -> None:
        self.remotes, self.room = remotes, budget() // 2  # the rest is for what others use
        self.needed: Counter[int] = Counter()
        self.copies: dict[int, Future[Held]] = {}
        self.queue: queue.SimpleQueue[tuple[int, Future[Held]] | None] = queue.SimpleQueue()
        for _ in range(AT_ONCE):
            # Daemons: a stalled server must not keep the process from ending.
            threading.Thread(target=self._work, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether more can be fetched at the same time."""
        return sum(not copy.done() for copy in self.copies.values()) < AT_ONCE

    def has_room(self, files: list[int]) -> bool:
        wanted = {*self.copies, *files}
        size = sum(self.remotes[file].about.size for file in wanted)
        return size <= self.room and len(wanted) <= MOST

    def want(self, files: list[int]) -> None:
        for file in files:
            self.needed[file] += 1
            if file not in self.copies:
                self.copies[file] = Future[Held]()
                self.queue.put((file, self.copies[file]))

    def _work(self) -> None:
        while task := self.queue.get():
            file, copy = task
            if not copy.set_running_or_notify_cancel():
                continue
            try:
                held = hold(self.remotes[file])
                if self.remotes[file].is_single:  # too many to keep open
                    held.close()
                copy.set_result(held)
            except BaseException as error:
                copy.set_exception(error)

    def wait(self, files: list[int]) -> None:
        for file in files:
            try:
                self.copies[file].result()
            except MissingError:
                if not self.remotes[file].is_single:  # otherwise a broken image, when it is read
                    raise

    def release(self, files: list[int]) -> None:
        for file in files:
            self.needed[file] -= 1
            if not self.needed[file]:
                _drop(self.copies.pop(file))

    def close(self) -> None:
        for copy in self.copies.values():
            _drop(copy)
        self.copies.clear()
        for _ in range(AT_ONCE):
            self.queue.put(None)


def _drop(copy: "Future[Held]") -> None:
    def close(done: "Future[Held]") -> None:
        if done.exception() is None:
            done.result().close()

    if not copy.cancel():
        copy.add_done_callback(close)
