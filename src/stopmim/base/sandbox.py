"""Reads untrusted weight files: nothing is executed, and a small file cannot exhaust memory.

A pickle is loaded with ``weights_only=True``. It can still take endless memory and time: a kilobyte
can ask for gigabytes, or for deeply nested lists. So a child process reads it, with limits on both,
and passes on plain values as JSON and tensors as bytes. The child never outlives this process.
Compressed or overlapping records, and tensors that expand a few bytes to gigabytes, do not occur in
honest files and are refused.
"""

import argparse
import ctypes
import errno
import gc
import itertools
import json
import math
import mmap
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor

from stopmim.base.causes import cause, is_full
from stopmim.base.errors import CheckpointError, ResourceError, StorageError, UserError
from stopmim.base.files import holes, open_to_read, read_regular
from stopmim.base.memory import is_out_of_memory, shortage

BYTES = 2**36  # most bytes of a file; a ViT-g with its optimizer has 2 ** 34
HOLES = 2**26  # most bytes of a file that are not on the disk; in weights only some zeros are not
HEADER = 10_000_000  # most bytes of a safetensors header; a ViT-H has 50,000
TENSORS = 20_000  # most tensors of a file, and records of a zip; a ViT-H with AdamW has 1,600
ALIGNED = 64  # tensors begin at multiples of this many bytes
SHARED = 4  # most bytes of tensors per byte of file: some networks save a matrix twice
DEPTH = 10  # deepest nesting of containers; VISSL's encoder lies at 5
VALUES = 100_000  # most values, containers and tensors of a pickle; a ViT-H with AdamW has 10,000
MEMORY = 800_000_000  # bytes for reading a pickle, on top of SHARED times its size
UNUSED = ("opt", "optimizer", "scaler")  # skipped: larger than the weights
SECONDS = 15  # of processor time for reading a pickle, plus one second per 10 MB
BUSY = 4  # times as long in wall-clock time: the machine may be shared, and disks slow
NO_MEMORY, NO_ROOM = 7, 5  # exit codes of the process that reads a pickle
_LATE = (signal.SIGALRM, signal.SIGPROF)  # end a reader that takes too long


def read_tree(path: Path) -> Any:
    """Nested containers of tensors and plain values, from a .safetensors file or a pickle."""
    try:
        with open_to_read(path, BYTES) as file:
            size = os.fstat(file.fileno()).st_size
            if (missing := holes(file)) > HOLES:
                raise ValueError(f"a sparse file: {missing} of {size} bytes are not on the disk")
            if path.suffix != ".safetensors":
                return _pickle(path, size)
            header = int.from_bytes(file.read(8), "little")
            if header > min(HEADER, size):
                raise ValueError(f"a header of {header} bytes in a file of {size}")
            if (count := len(json.loads(file.read(header)))) > TENSORS:
                raise ValueError(f"{count} tensors, more than {TENSORS}")
        return load_file(path)  # memory-mapped: read on use
    except UserError:
        raise
    except Exception as error:  # a hostile file can make a reader fail in any way
        if is_out_of_memory(error):  # not the file's fault: a child with limits reads pickles
            raise _no_memory(path, shortage(error)) from None
        if isinstance(error, OSError):
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        raise CheckpointError(f"{path}: refused or damaged: {one_line(error)}") from None


def _no_memory(path: Path, why: str) -> ResourceError:
    return ResourceError(f"{path}: out of memory while it is read: {why}; close other programs")


def metadata(path: Path) -> dict[str, str]:
    """Metadata in the header of a .safetensors file that `read_tree` accepted."""
    if path.suffix != ".safetensors":
        return {}
    with open_to_read(path, BYTES) as file:  # not mapped again: that may take gigabytes
        size = min(HEADER, int.from_bytes(file.read(8), "little"))
        return json.loads(file.read(size)).get("__metadata__") or {}


def read_json(path: Path) -> Any:
    """A small JSON file."""
    try:
        return json.loads(read_regular(path, HEADER))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(f"{path}: unreadable: {why}") from None


def one_line(error: BaseException) -> str:
    """The first sentence of an error, without torch's advice to trust the file."""
    text = str(error)
    if "weights_only" in text:
        if "Unsupported operand" in text:  # not a pickle at all, for example an image
            return "not a file of weights, or it holds more than tensors"
        asked = re.search(r"GLOBAL ([\w.]+)", text)
        return "it holds more than tensors" + (f": it asks for {asked[1]}" if asked else "")
    if "inline_container" in text:  # torch's zip reader, for example on an .npz
        return "an archive without weights"
    line = (text.splitlines() or [type(error).__name__])[0]
    return re.split(r"\. (?=[A-Z])", line)[0][:200]


def _pickle(path: Path, size: int) -> Any:
    try:
        # Nameless files: nothing is left of them, however this process ends.
        with tempfile.TemporaryFile() as tree, tempfile.TemporaryFile() as tensors:
            if shutil.disk_usage(tempfile.gettempdir()).free < size:
                raise OSError(errno.ENOSPC, f"reading {path} needs {size} bytes there")
            return _read_by_child(path, size, tree, tensors)
    except OSError as error:  # of the two files: a child reads the file
        if isinstance(known := cause(error), ResourceError) or error.errno == errno.EAGAIN:
            raise known or ResourceError(
                f"{path}: no process to read it: {error.strerror}"
            ) from None
        what = f"{tempfile.tempdir or 'temporary files'}: {error.strerror or error}"
        raise StorageError(f"{what}; set TMPDIR to another folder") from None


def _read_by_child(path: Path, size: int, tree: IO[bytes], tensors: IO[bytes]) -> Any:
    seconds = SECONDS + size / 1e7
    parent, child = os.getpid(), os.fork()  # a new interpreter would take seconds for torch
    if not child:
        _end_with(parent)
        _read_in_child(path, size, seconds, tree, tensors)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:  # Ctrl-C
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if -code in _LATE:
        raise ValueError(f"not read after {seconds:.0f} s")
    if code == -signal.SIGKILL:  # by the system, which does so when memory runs out
        raise _no_memory(path, "the process that read it was killed")
    if code == NO_MEMORY:
        raise _no_memory(path, "too little room in main memory")
    if code == NO_ROOM:
        raise OSError(errno.ENOSPC, f"no room for the tensors of {path}")
    if code:
        raise ValueError(f"the process that read it ended with {code}")
    tree.seek(0)
    found = json.load(tree)
    if "error" in found:
        raise ValueError(found["error"])
    data = torch.empty(0, dtype=torch.uint8)
    if length := os.fstat(tensors.fileno()).st_size:  # a mapping outlives the file
        mapped = mmap.mmap(tensors.fileno(), length, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(mapped, dtype=torch.uint8)
    return _join(found["tree"], data)


def _join(value: Any, data: Tensor) -> Any:
    """Inverse of `_split`: tensors are views of `data`."""
    kind, inner = value
    if kind == "tensor":
        start, dtype, shape = inner
        end = start + math.prod(shape) * getattr(torch, dtype).itemsize
        return data[start:end].view(getattr(torch, dtype)).view(shape)
    if kind == "list":
        return [_join(item, data) for item in inner]
    if kind == "mapping":
        return {key: _join(item, data) for key, item in inner}
    return inner


# ------------------------------------------------------------------------- in the child process


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when `parent` is gone, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _check_zip(path: Path, size: int) -> None:
    """Refuses a zip file that torch would not write so; torch does not verify checksums."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if len(records) > TENSORS:
            raise ValueError(f"{len(records)} records, more than {TENSORS}")
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{record.filename} is compressed; torch never does that")
        if sum(record.file_size for record in records) > size:
            raise ValueError("its records overlap")
        if broken := archive.testzip():
            raise ValueError(f"{broken} has a wrong checksum")


def _read_in_child(
    path: Path, size: int, seconds: float, tree: IO[bytes], tensors: IO[bytes]
) -> NoReturn:
    """Reads `path`, writes its values and tensors to two files, and ends the process."""
    code, is_short = 0, False
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in _LATE:
            signal.signal(number, signal.SIG_DFL)  # the kernel ends the process, not Python
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, BUSY * seconds)
        gc.disable()  # it would touch, and so copy, all memory of the parent
        torch.set_num_threads(1)  # the parent's threads do not exist here
        is_short = _limit_memory(SHARED * size + MEMORY)
        answer, failed = dict[str, Any](), None
        try:
            answer = {"tree": _extract(path, size, tensors)}
        except BaseException as error:
            failed = error.with_traceback(None)  # gives back what its frames hold
            failed.__context__ = None
        if failed is not None:
            code = _code_of(failed, is_short, SHARED * size + MEMORY)
            what = f"takes {MEMORY} bytes more than a file of {size} should"
            answer = {"error": what if is_out_of_memory(failed) else one_line(failed)}
        tree.write(json.dumps(answer).encode())
        tree.flush()
    except MemoryError:
        code = NO_MEMORY if is_short else 1
    except OSError:  # of the folder of the two files
        code = NO_ROOM
    except BaseException:
        code = 1
    finally:  # never back into the code of the parent
        os._exit(code)


def _code_of(error: BaseException, is_short: bool, most: int) -> int:
    """The exit code for an `error` that is not the file's fault, or 0; `most` bytes are allowed."""
    if is_full(error):
        return NO_ROOM
    asked = re.search(r"allocate (\d+) bytes", str(error))
    too_much = asked is not None and int(asked[1]) > most
    return NO_MEMORY if is_short and not too_much and is_out_of_memory(error) else 0


def _limit_memory(most: int) -> bool:
    """Limits this process to `most` bytes more; returns whether the system allows less than half.

    Half of it suffices for every honest file: a file that needs more is at fault.
    """
    if not (pages := Path("/proc/self/statm")).exists():
        return False
    now = int(pages.read_text().split()[0]) * resource.getpagesize()
    given = [x for x in resource.getrlimit(resource.RLIMIT_AS) if x != resource.RLIM_INFINITY]
    limit = min([now + most, *given])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit - now < most // 2


def _extract(path: Path, size: int, tensors: IO[bytes]) -> list[Any]:
    """The values of `path` in the form of `_split`; writes its tensors to a file."""
    if zipfile.is_zipfile(path):
        _check_zip(path, size)
    # MAE, DINO and iBOT store their options in a Namespace, which only holds values.
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")  # long ones about old pickle protocols
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, Mapping):
        loaded = {key: value for key, value in loaded.items() if key not in UNUSED}
    found: list[Tensor] = []
    values = _split(loaded, found)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in found)
    if len(found) > TENSORS:
        raise ValueError(f"{len(found)} tensors, more than {TENSORS}")
    if needed > SHARED * size:
        raise ValueError(f"{needed} bytes of tensors in a file of {size}")
    for tensor in found:
        tensors.write(bytes(-tensors.tell() % ALIGNED))
        tensors.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    tensors.flush()
    return values


def _split(value: Any, found: list[Tensor]) -> list[Any]:
    """`value` for JSON as (kind, content) pairs, limited in number; tensors go to `found`.

    The content of a tensor is its place in the file of tensors, its type and its shape.
    """
    count, end = itertools.count(), 0

    def pair(value: Any, depth: int) -> list[Any]:
        nonlocal end
        if next(count) > VALUES or not depth:
            raise ValueError(f"more than {VALUES} values, or containers {DEPTH} deep")
        if isinstance(value, Tensor):
            start = end + -end % ALIGNED
            end = start + value.numel() * value.element_size()
            found.append(value)
            return ["tensor", [start, str(value.dtype).removeprefix("torch."), [*value.shape]]]
        if isinstance(value, Mapping):
            return ["mapping", [[str(key), pair(item, depth - 1)] for key, item in value.items()]]
        if isinstance(value, list | tuple):
            return ["list", [pair(item, depth - 1) for item in value]]
        plain = value is None or isinstance(value, bool | int | float | str)
        return ["value", value if plain else type(value).__name__]

    return pair(value, DEPTH)
