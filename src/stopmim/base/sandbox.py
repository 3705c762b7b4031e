"""Files of strangers, read into tensors: nothing is executed, and no small file fills the memory.

A pickle is read with ``weights_only=True``. What it may still do is take memory and time without
end: a kilobyte of it can ask for gigabytes, or for lists in lists that nobody can walk through. So
a child process reads it, with limits for both, and hands over plain values and tensors in a form
that cannot do anything. Compressed records, and a tensor of a million columns that are all the same
four bytes, do not occur in honest files and are refused at once.
"""

import argparse
import gc
import itertools
import json
import os
import re
import resource
import shutil
import signal
import tempfile
import time
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stopmim.base.errors import CheckpointError, StorageError, UserError

HEADER = 10_000_000  # bytes of a safetensors header; that of a ViT-H has 50,000
SHARED = 4  # times the file that its tensors may take: some networks save a matrix twice
DEPTH = 10  # of nested containers; VISSL's encoder lies at 5
VALUES = 100_000  # in a pickle, containers and tensors counted; a ViT-H with AdamW has 10,000
MEMORY = 1 << 30  # bytes that reading a pickle may take beyond what its file has
UNUSED = ("opt", "optimizer", "scaler")  # beside the weights, and larger than they are
SECONDS = 60  # that it may take, and one more per 10 MB of file


def read_tree(path: Path) -> Any:
    """What is in a .safetensors file or in a pickle: nested containers with tensors."""
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file")
    try:
        size = path.stat().st_size
        return _safetensors(path, size) if path.suffix == ".safetensors" else _pickle(path, size)
    except UserError:
        raise
    except Exception as error:  # a hostile file can make a reader fail in every way there is
        raise CheckpointError(f"{path}: refused or damaged: {one_line(error)}") from None


def metadata(path: Path) -> dict[str, str]:
    """The words in the header of a .safetensors file that `read_tree` accepted; or none."""
    if path.suffix != ".safetensors":
        return {}
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def read_json(path: Path) -> Any:
    """A small JSON file."""
    try:
        if path.stat().st_size > HEADER:
            raise ValueError(f"larger than {HEADER} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: unreadable: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The first sentence of what `error` says, and not torch's advice to trust the file."""
    text = str(error)
    if "weights_only" in text:
        if "Unsupported operand" in text:  # the first byte of a picture, say, is none of a pickle
            return "not a file of weights, or it holds more than tensors"
        asked = re.search(r"GLOBAL ([\w.]+)", text)
        return "it holds more than tensors" + (f": it asks for {asked[1]}" if asked else "")
    if "inline_container" in text:  # torch's reader of zip files: an .npz, say
        return "an archive, but none of weights"
    line = (text.splitlines() or [type(error).__name__])[0]
    return re.split(r"\. (?=[A-Z])", line)[0][:200]


def _safetensors(path: Path, size: int) -> dict[str, Tensor]:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(HEADER, size):
        raise ValueError(f"a header of {header} bytes in a file of {size}")
    return load_file(path)  # maps the file: nothing is read before it is used


def _pickle(path: Path, size: int) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{record.filename} is compressed, which torch never does")
            if broken := archive.testzip():  # torch itself does not look at the checksums
                raise ValueError(f"{broken} does not have its checksum")
    with tempfile.TemporaryDirectory(prefix="stopmim-") as folder:
        if (free := shutil.disk_usage(folder).free) < size:
            room = f"reading {path} takes {size} bytes there, {free} are free"
            raise StorageError(f"{folder}: {room}; TMPDIR=... names another place")
        tree, tensors = Path(folder) / "tree.json", Path(folder) / "tensors.safetensors"
        child = os.fork()  # a new interpreter would need seconds for torch
        if not child:
            _in_child(path, size, tree, tensors)
        _wait(child, SECONDS + size / 1e7)
        found = json.loads(tree.read_text(encoding="utf-8"))
        if "error" in found:
            raise ValueError(found["error"])
        # The file is mapped, and stays so when its name is gone.
        return _together(found["tree"], load_file(tensors))


def _wait(child: int, seconds: float) -> None:
    end, pause = time.monotonic() + seconds, 0.001
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise ValueError(f"not read after {seconds:.0f} seconds")
        time.sleep(pause := min(2 * pause, 0.05))
    if code := os.waitstatus_to_exitcode(done[1]):
        raise ValueError(f"the process that read it ended with {code}")


def _together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_apart`."""
    kind, inner = value
    if kind == "tensor":
        return tensors[inner]
    if kind == "list":
        return [_together(item, tensors) for item in inner]
    if kind == "mapping":
        return {key: _together(item, tensors) for key, item in inner}
    return inner


# ------------------------------------------------------------------------- in the child process


def _in_child(path: Path, size: int, tree: Path, tensors: Path) -> NoReturn:
    """Reads `path`, writes its values and its tensors to two files, and ends the process."""
    try:
        gc.disable()  # it would visit, and so copy, all the memory of the parent
        torch.set_num_threads(1)  # the threads of the parent are not here
        _limit_memory(SHARED * size + MEMORY)
        # MAE, DINO and iBOT keep their command line in a Namespace, which only holds values.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # about old pickle protocols, in several lines
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(loaded, Mapping):
            loaded = {key: value for key, value in loaded.items() if key not in UNUSED}
        found: list[Tensor] = []
        said = json.dumps({"tree": _apart(loaded, found)})
        needed = sum(tensor.numel() * tensor.element_size() for tensor in found)
        if needed > SHARED * size:
            raise ValueError(f"{needed} bytes of tensors in a file of {size}")
        save_file(_unshared(found), tensors)
    except MemoryError:
        said = json.dumps({"error": f"it wants {MEMORY} bytes more than a file of {size} may"})
    except BaseException as error:
        said = json.dumps({"error": one_line(error)})
    tree.write_text(said, encoding="utf-8")
    os._exit(0)


def _limit_memory(more: int) -> None:
    """Lets this process have `more` bytes of memory than it has now, where that can be known."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        limit = int(pages.read_text().split()[0]) * resource.getpagesize() + more
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _apart(value: Any, found: list[Tensor]) -> list[Any]:
    """`value` for JSON, as pairs of kind and content, which are counted; tensors go to `found`."""
    count = itertools.count()

    def pair(value: Any, depth: int) -> list[Any]:
        if next(count) > VALUES or not depth:
            raise ValueError(f"more than {VALUES} values, or containers {DEPTH} deep")
        if isinstance(value, Tensor):
            found.append(value)
            return ["tensor", str(len(found) - 1)]
        if isinstance(value, Mapping):
            return ["mapping", [[str(key), pair(item, depth - 1)] for key, item in value.items()]]
        if isinstance(value, list | tuple):
            return ["list", [pair(item, depth - 1) for item in value]]
        plain = value is None or isinstance(value, bool | int | float | str)
        return ["value", value if plain else type(value).__name__]

    return pair(value, DEPTH)


def _unshared(tensors: list[Tensor]) -> dict[str, Tensor]:
    """By number, as safetensors wants them: dense, and none a part of another."""
    seen, own = set[int](), dict[str, Tensor]()
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage().data_ptr()
        dense = tensor.detach().contiguous()
        own[str(i)] = dense.clone() if storage in seen else dense
        seen.add(storage)
    return own
