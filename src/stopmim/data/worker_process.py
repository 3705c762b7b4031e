"""A worker process: lists of keys in, batches out, until its socket closes.

Values travel in nameless memory: none is half sent, none is left behind. A message is one byte on a
socket, and with it a descriptor of the memory that holds the value. So sending never waits for the
reader, and reading never waits for the rest of a message, even if the other process is stopped or
killed halfway. The memory is freed with its last user: no file in /dev/shm or TMPDIR can outlast a
kill, and a small /dev/shm is no limit. The pickles in it come from our own forks.
"""

import ctypes
import io
import mmap
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stopmim.base.errors import UserError

ORPHAN_SECONDS = 5.0  # between checks that the parent is alive, where the kernel does not signal it
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
ALIGNED = 64  # bytes; torch and numpy expect arrays to begin at multiples of their element size


class Failure(NamedTuple):
    """Sent by a worker instead of a batch."""

    reason: str
    image: int | None  # being read at the time
    error: UserError | None = None  # that has its own message and exit code


def work(pipe: socket.socket, make: Callable[[Any], Any], at: Callable[[], int | None]) -> None:
    """Answers every list of keys from `pipe` with `make` of it; `at` gives the image being read."""
    parent = os.getppid()
    # Ctrl-C reaches every process of a terminal: workers continue until the run has saved.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":  # ends even a worker that is stuck in a bad file
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, int(signal.SIGKILL))
    # libtiff complains on stderr about every damaged file; our errors go through the socket.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    while True:
        while not wait([pipe], ORPHAN_SECONDS):
            if os.getppid() != parent:
                return
        try:
            keys = receive(pipe)
        except EOFError:
            return
        try:
            answer = make(keys)
        except UserError as error:  # such as that of a remote file that is gone
            answer = Failure(str(error), at(), error)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            answer = Failure(text, at())
        try:
            send(pipe, answer)
        except OSError as error:  # no memory for the batch, or no process to send it to
            send(pipe, Failure(f"MemoryError: {error}", None))


def send(to: socket.socket, value: Any) -> None:
    """Sends `value`; arrays and tensors are copied once, into the memory that the reader maps."""
    pickled, arrays = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(pickled, 5, buffer_callback=arrays.append).dump(value)
    parts = [pickled.getbuffer(), *(array.raw() for array in arrays)]
    with _memory() as memory:
        memory.write(np.array([len(parts), *(part.nbytes for part in parts)], np.int64).tobytes())
        for part in parts:
            memory.write(bytes(-memory.tell() % ALIGNED))
            memory.write(part)
        memory.flush()
        socket.send_fds(to, [b"."], [memory.fileno()])


def receive(source: socket.socket) -> Any:
    """The next value; its arrays and tensors share memory that lasts as long as they do.

    Raises:
        EOFError: the other end is closed.
    """
    byte, handles, _, _ = socket.recv_fds(source, 1, 1)
    if not byte:
        raise EOFError
    try:
        memory = mmap.mmap(handles[0], 0)
    finally:
        os.close(handles[0])
    count = int(np.frombuffer(memory, np.int64, 1)[0])
    sizes = np.frombuffer(memory, np.int64, count, offset=8).tolist()
    parts, at = list[memoryview](), 8 * (1 + count)
    for size in sizes:
        at += -at % ALIGNED
        parts.append(memoryview(memory)[at : at + size])
        at += size
    return pickle.Unpickler(io.BytesIO(parts[0]), buffers=parts[1:]).load()  # noqa: S301 - ours


class _Pickler(pickle.Pickler):
    """Sees tensors as arrays, which protocol 5 leaves out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        order = sorted(range(value.ndim), key=value.stride, reverse=True)  # as it lies in memory
        return _tensor, (value.permute(order).contiguous().numpy(), order)


def _tensor(array: np.ndarray, order: list[int]) -> Tensor:
    return torch.from_numpy(array).permute(*np.argsort(order).tolist())


def _memory() -> IO[bytes]:
    """A nameless file in memory; where the system has none, one on disk that is already deleted."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stopmim"), "w+b")
    return tempfile.TemporaryFile()
