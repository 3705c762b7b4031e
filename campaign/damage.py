"""Damage to bytes, to lines and to JSON: what disks, editors and enemies do to a file."""

import json
import random
from collections.abc import Callable
from typing import Any

# Values that no honest file has at most places.
ABSURD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**70),
    10**400,
    0.5,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "x",
    "a\nb\x1b[31m",
    "\ud800",
    "y" * 100_000,
    "../../../etc/passwd",
    "list:/dev/zero",
    "/dev/zero",
    [],
    {},
    [[]],
    {"": {"": ""}},
    [0] * 1000,
    {"step": "x"},
)
DEEP = "[" * 50_000 + "]" * 50_000


def flip(data: bytes, dice: random.Random) -> bytes:
    """One bit turned."""
    if not data:
        return b"\x01"
    where = dice.randrange(len(data))
    return data[:where] + bytes([data[where] ^ (1 << dice.randrange(8))]) + data[where + 1 :]


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))] if data else b""


def zero(data: bytes, dice: random.Random) -> bytes:
    """A sector of zeros, as after a crash of the machine."""
    where = dice.randrange(max(1, len(data)))
    size = min(len(data) - where, 512)
    return data[:where] + bytes(size) + data[where + size :]


def noise(data: bytes, dice: random.Random) -> bytes:
    where = dice.randrange(max(1, len(data)))
    return data[:where] + dice.randbytes(64) + data[where + 64 :]


def longer(data: bytes, dice: random.Random) -> bytes:
    return data + dice.randbytes(dice.randint(1, 100))


def twice(data: bytes, dice: random.Random) -> bytes:
    return data + data


def empty(data: bytes, dice: random.Random) -> bytes:
    return b""


BYTES: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    cut,
    zero,
    noise,
    longer,
    twice,
    empty,
]


def absurd_json(text: str, dice: random.Random) -> str:
    """JSON with one value replaced, one key removed or one added, anywhere in it."""
    tree = json.loads(text)
    holders = [node for node in _containers(tree) if len(node)]
    if not holders or dice.random() < 0.05:
        return json.dumps(dice.choice(ABSURD))
    node = dice.choice(holders)
    key: Any = dice.choice(list(node)) if isinstance(node, dict) else dice.randrange(len(node))
    what = dice.random()
    if what < 0.2:
        del node[key]
    elif what < 0.3 and isinstance(node, dict):
        node[dice.choice(("new", "", "a\nb", "\x1b[2J", "z" * 10_000))] = dice.choice(ABSURD)
    elif what < 0.35:
        node[key] = "@deep@"
    else:
        node[key] = dice.choice(ABSURD)
    return json.dumps(tree).replace('"@deep@"', DEEP)


def _containers(tree: Any) -> list[Any]:
    """Every object and array of a tree."""
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    own = [tree] if isinstance(tree, dict | list) else []
    return own + [node for value in inner for node in _containers(value)]


def absurd_lines(text: str, dice: random.Random) -> str:
    """JSON lines with one of them damaged, missing, repeated, moved, or foreign."""
    lines = text.splitlines()
    if not lines:
        return dice.choice(("{}", "null", "[]", DEEP, '{"step": 1}')) + "\n"
    i = dice.randrange(len(lines))
    match dice.randrange(8):
        case 0:
            del lines[i]
        case 1:
            lines.insert(i, lines[dice.randrange(len(lines))])
        case 2:
            lines[i] = lines[i][: dice.randrange(len(lines[i]) + 1)]
        case 3:
            dice.shuffle(lines)
        case 4:
            lines.insert(i, dice.choice(("", "null", "[]", "{}", "0", '"x"', DEEP, "\x00" * 100)))
        case 5:
            whole = "\n".join(lines).encode()
            return dice.choice(BYTES)(whole, dice).decode("latin-1")
        case _:
            lines[i] = absurd_json(lines[i], dice)
    return "\n".join(lines) + dice.choice(("\n", ""))
