"""CIFAR-100 as its authors released it, binary or for Python.

The Python release is a pickle, which can run anything. It is not unpickled here: the few opcodes
that the file is made of are interpreted, and anything else is refused.
"""

import os
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.folder import printable

RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, planes of red, green and blue


def is_cifar100(root: Path) -> bool:
    releases = ("train.bin", "test.bin"), ("train", "test", "meta")
    return any(all(os.path.isfile(root / name) for name in names) for names in releases)


def cifar100(root: Path | str, split: str | None = None) -> Arrays:
    """One split of CIFAR-100, (n, 32, 32, 3); labels "class" (100) and "coarse" (20)."""
    root, part = Path(root), split or "train"
    if not is_cifar100(root):
        raise DataError(
            f"{printable(str(root))}: not CIFAR-100; looked for train.bin and test.bin, or for "
            f"train, test and meta"
        )
    binary = root / f"{part}.bin"
    if binary.exists():
        data = np.frombuffer(_bytes(binary), np.uint8)
        if not data.size or data.size % RECORD:
            raise DataError(
                f"{printable(str(binary))}: not a whole number of {RECORD}-byte records"
            )
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
            raise DataError(f"{printable(str(root / part))}: not a batch of CIFAR-100") from None
    labels = {"class": np.array(fine, np.int64), "coarse": np.array(coarse, np.int64)}
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Arrays(images, labels, [printable(name) for name in classes], f"cifar100 {part}")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{printable(str(path))}: {error.strerror}") from None


def _read(path: Path) -> Any:
    data = _bytes(path)
    try:
        return interpret(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = " ".join(str(error).split())[:100]
        raise DataError(
            f"{printable(str(path))}: not the pickle of CIFAR-100, and no other is read: {text}"
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
        """Byte order and the like: bytes have none."""


_MARK = object()
_RECONSTRUCT, _NDARRAY, _DTYPE = (
    "numpy.core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
)


class _Global(str):
    """A name of a pickle; never looked up."""


def interpret(data: bytes) -> Any:
    """The value of a pickle of dicts, lists, tuples, integers, strings and arrays of uint8.

    Strings of Python 2 come out as text, each character a byte. Anything else is a ValueError.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def cut() -> list[Any]:
        """Takes everything down to the last mark."""
        at = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def add(pairs: list[Any]) -> None:
        stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    for opcode, arg, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO":
                pass
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "DICT":
                pairs = cut()
                stack.append({})
                add(pairs)
            case "LIST":
                stack.append(cut())
            case "TUPLE":
                stack.append(tuple(cut()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = int(opcode.name[-1])
                stack[-n:] = [tuple(stack[-n:])]
            case "INT" | "BININT" | "BININT1" | "BININT2" | "LONG" | "LONG1":
                stack.append(arg)
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                stack.append(arg)
            case "NONE":
                stack.append(None)
            case "NEWFALSE":
                stack.append(False)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = cut()
                stack[-1].extend(items)
            case "SETITEM":
                pair = stack[-2:]
                del stack[-2:]
                add(pair)
            case "SETITEMS":
                add(cut())
            case "GLOBAL" if arg in (_RECONSTRUCT, _NDARRAY, _DTYPE):
                stack.append(_Global(arg))
            case "REDUCE":
                (name, args), stack[-2:] = stack[-2:], []
                if name == _RECONSTRUCT and args[0] == _NDARRAY:
                    stack.append(_Array())
                elif name == _DTYPE and args[0] == "u1":
                    stack.append(_Dtype())
                else:
                    raise ValueError(f"a call of {name}")
            case "BUILD":
                state = stack.pop()
                stack[-1].build(state)
            case "STOP":
                return _finished(stack.pop())
            case other:
                raise ValueError(f"opcode {other} {arg or ''}")
    raise ValueError("no end")


def _finished(value: Any) -> Any:
    """`value`, a dict, with arrays in place of those under construction."""
    return {k: v.value if isinstance(v, _Array) else v for k, v in value.items()}
