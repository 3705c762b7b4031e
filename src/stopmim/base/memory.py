"""Main memory: the free amount, and the errors that mean it ran out."""

import contextlib
import ctypes
import errno
import re
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

# Messages of a GPU, torch's CPU allocator, C++, the system (a library or a file that cannot be
# mapped), and a thread that gets no stack.
_TEXTS = (
    *("out of memory", "can't allocate", "not enough memory", "bad_alloc", "Cannot allocate"),
    *("can't start new thread", "could not create a primitive"),  # the second is oneDNN's
)
_GROUP = Path("/sys/fs/cgroup")  # limits of a container


class Memory(NamedTuple):
    free: int  # bytes that can still be used
    total: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    readers = RuntimeError | ImportError | OSError | SafetensorError
    return isinstance(error, readers) and any(text in str(error) for text in _TEXTS)


def shortage(error: BaseException) -> str:
    """Short description of the allocation that failed."""
    text = " ".join((str(error).splitlines() or [""])[0].split())
    if found := re.search(r"tried to allocate (\d+) bytes", text):
        return f"no room for {int(found[1]) / 2**20:,.0f} MiB more in main memory"
    if found := re.match(r"Unable to allocate ([\d.]+ \w+)", text):  # numpy
        return f"no room for {found[1]} more in main memory"
    return text or "no room in main memory"


def give_back() -> None:
    """Returns freed memory to the system, if the C library can.

    glibc keeps blocks below 32 MiB that were freed in a thread, and Pillow's have 16 MiB.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def main_memory() -> Memory | None:
    """Memory of this machine, or of its container; None where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        about = {name: int(rest.split()[0]) * 1024 for name, rest in (x.split(":") for x in lines)}
        machine = Memory(about["MemAvailable"], about["MemTotal"])
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        limit, used = (int((_GROUP / f"memory.{x}").read_text()) for x in ("max", "current"))
        stat = dict(x.split() for x in (_GROUP / "memory.stat").read_text().splitlines())
        free = limit - used + int(stat["inactive_file"])  # pages of files are given back
    except (OSError, ValueError, KeyError):  # no container, or "max": no limit
        return machine
    return Memory(min(machine.free, free), min(machine.total, limit))
