"""Files that a list names, one per line."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.folder import SUFFIXES, Files, class_folders, printable

_IMAGENET = re.compile(rb"(n\d{8})_[^/]*")
_INTEGER = re.compile(rb"-?\d{1,18}")


def listed(path: Path | str, root: Path | str | None = None) -> Files:
    """The images that the list file at `path` names, in its order, below `root`.

    A line is a path relative to `root` (default: the folder of the list), or a path and a label.
    If every line ends in an image extension, as ``cats/1.jpg``, there are no labels in the list.
    Otherwise the label is what follows the last tab, or else the last comma, or else the last
    blank: the first of the three that every line has. Empty lines do not count.

    Labels that are all integers are taken as they are; others are numbered in sorted order. Without
    any, the first folder of each path is its class, numbered as `Folder(root)` would: among all
    class folders, not only those in the list.

    Bare names in the manner of ImageNet (``n04235860_14959.JPEG``), as in the lists of 1 % and 10 %
    of it, are looked for in the folder of their class, ``n04235860/``.
    """
    path = Path(path)
    root = path.parent if root is None else Path(root)
    name = printable(str(path))
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{name}: this list cannot be read: {error.strerror}") from None
    if not lines:
        raise DataError(f"{name}: an empty list; expected one path per line")
    lines = [line.strip() for line in lines]
    paths, labels = _split(name, lines)
    is_flat = os.path.exists(root / os.fsdecode(paths[0]))
    if not is_flat and all(map(_IMAGENET.fullmatch, paths)):
        paths = [p.partition(b"_")[0] + b"/" + p for p in paths]
    twice, times = Counter(paths).most_common(1)[0]
    if times > 1:
        raise DataError(f"{name}: {printable(twice)} is listed {times} times; leave it in once")
    if not root.is_dir():
        raise DataError(f"{printable(str(root))}: no such folder; {name} names files in it")
    files = Files(root, paths)
    if labels:
        if all(map(_INTEGER.fullmatch, labels)):
            numbers = list(map(int, labels))
        else:
            names = sorted(set(labels))
            index = {label: i for i, label in enumerate(names)}
            files.classes, numbers = [printable(n) for n in names], [index[b] for b in labels]
        files.labels = {"class": np.array(numbers, np.int64)}
    elif all(b"/" in p for p in paths) and (classes := class_folders(root)):
        firsts = [printable(p.partition(b"/")[0]) for p in paths]
        if unknown := sorted(set(firsts) - set(classes)):
            raise DataError(f"{name}: {unknown[0]} is not a class folder of {printable(str(root))}")
        index_of = {c: i for i, c in enumerate(classes)}
        files.classes = classes
        files.labels = {"class": np.array([index_of[c] for c in firsts], np.int64)}
    return files


def _split(name: str, lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Paths and labels of the lines; no labels if every line is an image."""
    if all(line.lower().endswith(SUFFIXES) for line in lines):
        return lines, []
    for separator in (b"\t", b",", b" "):
        if all(separator in line for line in lines):
            pairs = [line.rpartition(separator) for line in lines]
            return [p.strip() for p, _, _ in pairs], [label.strip() for _, _, label in pairs]
    odd = next(line for line in lines if not line.lower().endswith(SUFFIXES))
    raise DataError(
        f"{name}: {printable(odd[:100])}: neither an image file nor, as all lines must be then, "
        f"a path and a label with a tab, comma or blank between them"
    )
