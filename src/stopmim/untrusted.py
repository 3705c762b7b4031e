"""Files of strangers, read into tensors: nothing is executed, and no small file fills the memory.

A pickle is read with ``weights_only=True``. What it may still do is lie about sizes: a compressed
record, or a tensor of a million columns that are all the same four bytes. Neither occurs in honest
files, so both are refused here; after that a file needs about as much memory as it has bytes.
"""

import argparse
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from stopmim.errors import CheckpointError

HEADER = 10_000_000  # bytes of a safetensors header; that of a ViT-H has 50,000
SHARED = 4  # times the file that its tensors may take: some networks save a matrix twice
DEPTH = 10  # of nested containers; VISSL's encoder lies at 5


def read_tree(path: Path) -> Any:
    """What is in a .safetensors file or in a pickle: nested containers with tensors."""
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file")
    try:
        size = path.stat().st_size
        tree = _safetensors(path, size) if path.suffix == ".safetensors" else _pickle(path)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tree))
    except CheckpointError:
        raise
    except Exception as error:  # a hostile file can make a reader fail in every way there is
        raise CheckpointError(f"{path}: refused or damaged: {one_line(error)}") from None
    if needed > SHARED * size:
        raise CheckpointError(f"{path}: refused: {needed} bytes of tensors in a file of {size}")
    return tree


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
    """The first line of what `error` says, and not torch's advice to trust the file."""
    text = str(error)
    if "weights_only" in text:
        asked = re.search(r"GLOBAL ([\w.]+)", text)
        return "it holds more than tensors" + (f": it asks for {asked[1]}" if asked else "")
    return (text.splitlines() or [type(error).__name__])[0][:200]


def _safetensors(path: Path, size: int) -> dict[str, Tensor]:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(HEADER, size):
        raise ValueError(f"a header of {header} bytes in a file of {size}")
    return load_file(path)  # maps the file: nothing is read before it is used


def _pickle(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{record.filename} is compressed, which torch never does")
            if broken := archive.testzip():  # torch itself does not look at the checksums
                raise ValueError(f"{broken} does not have its checksum")
    # MAE, DINO and iBOT keep their command line in a Namespace, which only holds values.
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")  # about old pickle protocols, in several lines
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(tree: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple) and depth:
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value, depth - 1)
