"""Files that a list names, one per line: LIST.txt, or FOLDER@LIST."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.folder import SUFFIXES, Files, class_folders, has_splits, open_split
from stopmim.data.sources.source import Source, Split, no_split, printable

_IMAGENET = re.compile(rb"(n\d{8})_[^/]*")
_INTEGER = re.compile(rb"-?\d{1,18}")


def _open(text: str, split: Split | None) -> Files:
    """A list picks from the training split; the test split is used whole."""
    folder, at, path = text.rpartition("@")
    root = folder or "."
    if not at or os.path.exists(text):
        folder, path, root = "", text, os.path.dirname(text) or "."
    if folder and has_splits(folder):
        if split == "test":
            return open_split(folder, split)
        root = os.path.join(folder, "train")
    elif split is not None:
        raise no_split(text, split)
    return _open_list(path, root)


def _open_list(path: str, root: str) -> Files:
    """Opens the images that the list file at `path` names, in its order, below `root`.

    docs/data.md describes the lines. Classes are numbered as in `Folder(root)`, among all class
    folders and not only those in the list, or else by sorted labels.
    """
    name = printable(path)
    try:
        lines = [line.strip() for line in Path(path).read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{name}: this list cannot be read: {error.strerror}") from None
    if not lines:
        raise DataError(f"{name}: an empty list; expected one path per line")
    paths, labels = _split_lines(name, lines)
    is_flat = os.path.exists(os.path.join(root, os.fsdecode(paths[0])))
    if not is_flat and all(map(_IMAGENET.fullmatch, paths)):
        paths = [p.partition(b"_")[0] + b"/" + p for p in paths]
    twice, times = Counter(paths).most_common(1)[0]
    if times > 1:
        raise DataError(f"{name}: {printable(twice)} is listed {times} times; leave it in once")
    if not os.path.isdir(root):
        raise DataError(f"{printable(root)}: no such folder; {name} names files in it")
    files = Files(root, paths)
    if labels and all(map(_INTEGER.fullmatch, labels)):
        files.labels = {"class": np.array(list(map(int, labels)), np.int64)}
    elif labels:
        _number(files, [printable(label) for label in sorted(set(labels))], labels)
    elif all(b"/" in p for p in paths) and (classes := class_folders(root)):
        folders = [p.partition(b"/")[0] for p in paths]
        if unknown := sorted({printable(folder) for folder in folders} - set(classes)):
            raise DataError(f"{name}: {unknown[0]} is not a class folder of {printable(root)}")
        _number(files, classes, folders)
    return files


def _number(files: Files, classes: list[str], labels: list[bytes]) -> None:
    index = {name: i for i, name in enumerate(classes)}
    files.classes = classes
    files.labels = {"class": np.array([index[printable(label)] for label in labels], np.int64)}


def _split_lines(name: str, lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Paths and labels of the lines; no labels if every line is an image file."""
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


LIST = Source(
    "list", _open, suffix=".txt", recognise=lambda text: "@" in text and not os.path.exists(text)
)
