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
from stopmim.data.decode import one_line
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.source import Source, Split, printable, read_bytes

RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, planes of red, green and blue


def _recognise(root: Path | str) -> bool:
    releases = ("train.bin", "test.bin"), ("train", "test", "meta")
    return any(all(os.path.isfile(Path(root, name)) for name in names) for names in releases)


def _open(text: str, split: Split | None) -> Arrays:
    """Opens one split, (n, 32, 32, 3), with the labels "class" (100) and "coarse" (20)."""
    root, part = Path(text), split or "train"
    if not _recognise(root):
        raise DataError(
            f"{printable(root)}: not CIFAR-100; looked for train.bin and test.bin, or for train, "
            f"test and meta"
        )
    binary = root / f"{part}.bin"
    if binary.exists():
        data = np.frombuffer(read_bytes(binary), np.uint8)
        if not data.size or data.size % RECORD:
            raise DataError(f"{printable(binary)}: not a whole number of {RECORD}-byte records")
        records = data.reshape(-1, RECORD)
        coarse, fine, pixels = records[:, 0], records[:, 1], records[:, 2:]
        names = root / "fine_label_names.txt"
        classes = read_bytes(names).decode("utf-8", "replace").split() if names.exists() else []
    else:
        batch, meta = _read(root / part), _read(root / "meta")
        try:
            coarse, fine, pixels = batch["coarse_labels"], batch["fine_labels"], batch["data"]
            classes = meta["fine_label_names"]
            if not isinstance(pixels, np.ndarray) or pixels.shape != (len(fine), RECORD - 2):
                raise ValueError
            # Before anything walks through them: a list may hold itself a thousand times.
            plain = all(type(x) is int for part in (fine, coarse) for x in part)
            if not plain or not all(type(name) is str for name in classes):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{printable(root / part)}: not a batch of CIFAR-100") from None
    labels = {"class": np.array(fine, np.int64), "coarse": np.array(coarse, np.int64)}
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Arrays(images, labels, [printable(name) for name in classes], f"cifar100 {part}")


def _read(path: Path) -> dict[Any, Any]:
    data = read_bytes(path)
    try:
        return interpret(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"not the pickle of CIFAR-100, and no other is read: {one_line(error)}"
        raise DataError(f"{printable(path)}: {reason}") from None


_ARRAY, _UINT8 = object(), object()  # an array and a dtype to be built
_VALUES = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "NONE",
           "STRING", "BINSTRING", "SHORT_BINSTRING")  # fmt: skip


def interpret(data: bytes) -> dict[Any, Any]:
    """The value of a pickled dict of lists, tuples, integers, strings and arrays of uint8.

    Strings of Python 2 become text, one character per byte. Anything else raises ValueError.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    marks: list[int] = []  # lengths of the stack

    def pop_mark() -> list[Any]:
        """Removes what was put on the stack since the last mark, and returns it."""
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    for opcode, arg, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO":
                pass
            case "STOP" if isinstance(stack[-1], dict):
                return stack[-1]
            case "GLOBAL":
                stack.append(arg)  # the name alone: nothing is looked up
            case name if name in _VALUES:
                stack.append(arg)
            case "MARK":
                marks.append(len(stack))
            case "NEWFALSE" | "EMPTY_DICT" | "EMPTY_LIST" as name:
                stack.append({"NEWFALSE": False, "EMPTY_DICT": {}, "EMPTY_LIST": []}[name])
            case "DICT" | "LIST" | "TUPLE" as name:
                make: Any = {"DICT": _pairs, "LIST": list, "TUPLE": tuple}[name]
                stack.append(make(pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                n = int(name[-1])
                stack[-n:] = [tuple(stack[-n:])]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "APPEND" | "APPENDS" as name:
                items = pop_mark() if name == "APPENDS" else [stack.pop()]
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = pop_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(_pairs(items))
            case "REDUCE" | "BUILD" as name:
                top, below = stack.pop(), stack.pop()
                stack.append(_construct(name, below, top))
            case other:
                raise ValueError(f"opcode {other} {str(arg or '')[:100]}")
    raise ValueError("no end")


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if not all(isinstance(key, str | int) for key in items[::2]):  # a tuple may hash forever
        raise ValueError("a key that is neither text nor an integer")
    return dict(zip(items[::2], items[1::2], strict=True))


def _construct(opcode: str, what: Any, state: Any) -> Any:
    """One step of constructing an array of uint8, in C order."""
    match opcode, what:
        case "REDUCE", "numpy.core.multiarray _reconstruct" if state[0] == "numpy ndarray":
            return _ARRAY
        case "REDUCE", "numpy dtype" if state[0] == "u1":
            return _UINT8
        case "BUILD", _ if what is _UINT8:  # byte order and the like
            return _UINT8
        case "BUILD", _ if what is _ARRAY and state[2] is _UINT8 and not state[3]:
            _, shape, _, _, pixels = state
            if not all(type(x) is int for x in shape):
                raise ValueError("a shape that is not made of integers")
            return np.frombuffer(pixels.encode("latin-1"), np.uint8).reshape(shape)
    raise ValueError(f"{opcode} of {what if isinstance(what, str) else type(what).__name__}")


CIFAR100 = Source("cifar100", _open, recognise=_recognise)
