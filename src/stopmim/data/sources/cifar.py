"""CIFAR-100 as released by its authors, in the binary or the Python version.

The Python version is a pickle, which could execute code. It is not unpickled here: the few opcodes
that the file consists of are interpreted as data, and anything else is refused.
"""

import os
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.paths import printable
from stopmim.data.sources.source import Source, Split

RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, planes of red, green and blue


def is_cifar100(root: Path | str) -> bool:
    releases = ("train.bin", "test.bin"), ("train", "test", "meta")
    return any(all(os.path.isfile(Path(root, name)) for name in names) for names in releases)


def open_cifar100(text: Path | str, split: Split | None = None) -> Arrays:
    """Opens one split, (n, 32, 32, 3), with the labels "class" (100) and "coarse" (20)."""
    root, part = Path(text), split or "train"
    if not is_cifar100(root):
        raise DataError(
            f"{printable(root)}: not CIFAR-100; looked for train.bin and test.bin, or for train, "
            f"test and meta"
        )
    binary = root / f"{part}.bin"
    if binary.exists():
        data = np.frombuffer(_bytes(binary), np.uint8)
        if not data.size or data.size % RECORD:
            raise DataError(f"{printable(binary)}: not a whole number of {RECORD}-byte records")
        records = data.reshape(-1, RECORD)
        coarse, fine, pixels = records[:, 0], records[:, 1], records[:, 2:]
        names = root / "fine_label_names.txt"
        classes = names.read_text("utf-8", "replace").split() if names.exists() else []
    else:
        batch, meta = _read(root / part), _read(root / "meta")
        try:
            coarse, fine, pixels = batch["coarse_labels"], batch["fine_labels"], batch["data"]
            classes = [str(name) for name in meta["fine_label_names"]]
            if not isinstance(pixels, np.ndarray) or pixels.shape != (len(fine), RECORD - 2):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{printable(root / part)}: not a batch of CIFAR-100") from None
    labels = {"class": np.array(fine, np.int64), "coarse": np.array(coarse, np.int64)}
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Arrays(images, labels, [printable(name) for name in classes], f"cifar100 {part}")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{printable(path)}: {error.strerror}") from None


def _read(path: Path) -> Any:
    data = _bytes(path)
    try:
        return interpret(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = " ".join(str(error).split())[:100]
        raise DataError(
            f"{printable(path)}: not the pickle of CIFAR-100, and no other is read: {text}"
        ) from None


class _Array:
    """An array of bytes under construction."""

    value: np.ndarray

    def build(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or fortran:
            raise ValueError("an array that is not of bytes in C order")
        self.value = np.frombuffer(data.encode("latin-1"), np.uint8).reshape(shape)


class _Dtype:
    def build(self, state: tuple[Any, ...]) -> None:
        """Ignores byte order and the like, which uint8 does not have."""


class _Global(str):
    """A name in a pickle; never looked up."""


_MARK = object()
_RECONSTRUCT = "numpy.core.multiarray _reconstruct"
_NDARRAY, _DTYPE = "numpy ndarray", "numpy dtype"
_VALUES = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1",
           "STRING", "BINSTRING", "SHORT_BINSTRING", "NONE")  # fmt: skip


def interpret(data: bytes) -> Any:
    """The value of a pickle of dicts, lists, tuples, integers, strings and arrays of uint8.

    Strings of Python 2 become text, one character per byte. Anything else raises ValueError.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def pop_mark() -> list[Any]:
        """Removes everything down to the last mark, and returns what was above it."""
        at = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    for opcode, arg, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO":
                pass
            case "MARK":
                stack.append(_MARK)
            case name if name in _VALUES:
                stack.append(arg)
            case "NEWFALSE":
                stack.append(False)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "DICT":
                stack.append(_pairs(pop_mark()))
            case "LIST":
                stack.append(pop_mark())
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = int(opcode.name[-1])
                stack[-n:] = [tuple(stack[-n:])]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "APPEND" | "APPENDS":
                items = pop_mark() if opcode.name == "APPENDS" else [stack.pop()]
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop_mark() if opcode.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(_pairs(items))
            case "GLOBAL" if arg in (_RECONSTRUCT, _NDARRAY, _DTYPE):
                stack.append(_Global(arg))
            case "REDUCE":
                args, function = stack.pop(), stack.pop()
                stack.append(_call(function, args))
            case "BUILD":
                state = stack.pop()
                stack[-1].build(state)
            case "STOP":
                return _finished(stack.pop())
            case other:
                raise ValueError(f"opcode {other} {arg or ''}")
    raise ValueError("no end")


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _call(name: Any, args: Any) -> _Array | _Dtype:
    """Starts one of the two objects that the file contains; nothing is ever called."""
    if name == _RECONSTRUCT and args[0] == _NDARRAY:
        return _Array()
    if name == _DTYPE and args[0] == "u1":
        return _Dtype()
    raise ValueError(f"a call of {name}")


def _finished(value: Any) -> Any:
    """The dict `value`, with each array in place of the one under construction."""
    return {k: v.value if isinstance(v, _Array) else v for k, v in value.items()}


CIFAR100 = Source("cifar100", open_cifar100, recognise=is_cifar100)
