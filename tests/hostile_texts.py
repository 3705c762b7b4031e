"""Hostile YAML: presets for `pretrain` and tables for `ablate`; and records for `ablate --page`."""

import os
from functools import partial
from pathlib import Path

from hostile_weights import Write, link, sparse

DIGITS = "1" * 5000


def _text(content: str | bytes, path: Path) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def texts() -> dict[str, dict[str, Write]]:
    """Kind to name to writer."""
    presets = {f"preset of {name}.yaml": partial(_text, text) for name, text in _presets().items()}
    tables = {f"table of {name}.yaml": partial(_text, text) for name, text in _tables().items()}
    found: dict[str, dict[str, Write]] = {"preset": {}, "table": {}, "records": {}}
    found["preset"] |= presets
    found["table"] |= tables
    for kind in ("preset", "table"):
        found[kind] |= {
            f"{kind} that is a pipe.yaml": os.mkfifo,
            f"{kind} that is endless.yaml": link("/dev/zero"),
            f"{kind} of a terabyte.yaml": sparse(2**40),
            f"{kind} that is a folder.yaml": lambda path: path.mkdir(),
            f"{kind} that is nowhere.yaml": link("not there"),
            f"{kind} {'n' * 300}.yaml": lambda path: None,
        }
    found["records"] = _records()
    return found


def _anywhere() -> dict[str, str | bytes]:
    """Texts that are neither."""
    return {
        "120,000 keys": "".join(f"k{i}: 1\n" for i in range(120_000)),
        "20,000 keys": "".join(f"k{i}: 1\n" for i in range(20_000)),
        "20,000 keys on a line": "{" + ", ".join(f"k{i}: 1" for i in range(20_000)) + "}",
        "megabytes": "seed: 0 #" + "x" * 20_000_000,
        "a long word": "a" * 190_000,
        "nesting": "[" * 100_000,
        "nested mappings": "a: " * 60_000,
        "nested blocks": "".join(" " * i + "a:\n" for i in range(500)),
        "questions": "? " * 90_000,
        "laughs": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
        "merges": "a: &a {b: 1}\n<<: *a\n",
        "code": "!!python/object/apply:os.system ['touch canary']\n",
        "a binary": "seed: !!binary '====x'\n",
        "a date": "seed: !!timestamp 9999-99-99\n",
        "a set": "!!set {a, b}\n",
        "pairs": "!!omap [a: 1]\n",
        "a number of text": "seed: !!int x\n",
        "a float of text": "seed: !!float x\n",
        "digits": f"seed: {DIGITS}\n",
        "many digits": f"seed: {'1' * 190_000}\n",
        "infinity": "optim: {lr: 1e999}\n",
        "no number": "optim: {lr: .nan}\n",
        "duplicates": "seed: 1\nseed: 2\n",
        "lists as keys": "? [a, b]\n: 1\n",
        "numbers as keys": "1: 2\n3.5: 4\nnull: 5\n",
        "keys of lines": '"a\\nstopmim: error: forged\\e[2J": 1\n',
        "keys of megabytes": f"{'k' * 100_000}: 1\n",
        "values of megabytes": f"arch: {'k' * 150_000}\n",
        "two documents": "seed: 1\n---\nseed: 2\n",
        "zero bytes": b"\0" * 1000,
        "UTF-16": "seed: 0".encode("utf-16"),
        "nonsense": bytes(range(128, 256)),
        "tabs": "\tseed: 0\n",
        "a list": "- a\n- b\n",
        "a number": "3\n",
        "escapes": 'seed: "\\ud800"\n',
        "directives": "%YAML 99.1\n---\nseed: 0\nx: 1\n",
        "anchors": "".join(f"k{i}: &a{i} 1\n" for i in range(9_000)),
    }


def _presets() -> dict[str, str | bytes]:
    return _anywhere() | {
        "300,000 blocks": "predictor: {depth: 300000}\n",
        "a wide predictor": "predictor: {width: 4000000000}\n",
        "a huge image": "image_size: 16000000\n",
        "a tiny patch": "arch: vit_g1\nimage_size: 100000\n",
        "a million targets": "masking: {targets: 1000000}\n",
        "a section of text": "optim: x\n",
        "a null section": "optim: null\n",
        "an unknown section of depth": "optim: {a: {b: {c: {d: 1}}}}\n",
    }


def _tables() -> dict[str, str | bytes]:
    def rows(text: str) -> str:
        return f"rows:\n  {text}\n"

    return _anywhere() | {
        "no rows": "rows: {}\n",
        "rows that are a list": "rows: [a]\n",
        "10,000 rows": "rows:\n" + "".join(f"  r{i}: {{}}\n" for i in range(10_000)),
        "rows of long names": rows("r" * 300 + ": {}"),
        "rows of lines": rows('"a\\nb": {}'),
        "rows above": rows("../../x: {}"),
        "rows of numbers": rows("1: {}"),
        "rows of nothing": rows("a: null"),
        "rows of unknown keys": rows("a: {no.such.key: 1}"),
        "rows of keys of lines": rows('a: {"x\\nstopmim: error: y": 1}'),
        "rows of deep keys": rows(f"a: {{{'.'.join('abcdefgh' * 2_000)}: 1}}"),
        "rows of digits": rows(f"a: {{optim.epochs: {DIGITS}}}"),
        "rows of 300,000 blocks": rows("a: {predictor.depth: 300000}"),
        "rows of a billion epochs": rows("a: {optim.epochs: 1000000000000}"),
        "rows of an endless start": rows("a: {init: /dev/zero}"),
        "a baseline of lines": rows("a: {}") + 'baseline: "x\\ny"\n',
        "a baseline that is a list": rows("a: {}") + "baseline: [a]\n",
        "asks that are a list": rows("a: {}") + "asks: [quick]\n",
        "asks of megabytes": rows("a: {}") + f"asks: {'x' * 150_000}\n",
    }


def _records() -> dict[str, Write]:
    """Folders of records, as `ablate` writes them."""

    def folder(write: Write) -> Write:
        def make(path: Path) -> None:
            path.mkdir()
            write(path / "sigma.json")

        return make

    contents = {
        "nonsense": b"{",
        "nested lists": b"[" * 100_000,
        "a list": b"[]",
        "nothing": b"{}",
        "digits": f'{{"table": {DIGITS}}}'.encode(),
        "a surrogate": b'{"table": "\\ud800", "rows": []}',
        "numbers": b'{"table": 1, "rows": 2, "runs": 3}',
    }
    return {
        **{f"records of {k}": folder(partial(_text, data)) for k, data in contents.items()},
        "records in a pipe": folder(os.mkfifo),
        "endless records": folder(link("/dev/zero")),
        "records in a folder": folder(lambda path: path.mkdir()),
        "n" * 300: lambda path: None,
    }
