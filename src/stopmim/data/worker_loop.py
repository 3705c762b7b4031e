"""The worker process itself: keys in, batches out, until its socket closes."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch

from stopmim.base.errors import UserError
from stopmim.data import messages

ORPHAN_SECONDS = 5.0  # between checks that the parent is alive, where the kernel does not signal it
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
            keys = messages.receive(pipe)
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
            messages.send(pipe, answer)
        except OSError as error:  # no memory for the batch, or no process to send it to
            messages.send(pipe, Failure(f"MemoryError: {error}", None))
