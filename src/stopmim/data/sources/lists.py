"""Files that a list names, one per line: LIST.txt, LIST.csv, or FOLDER@LIST."""

import codecs
import csv
import io
import os
import re
from collections import Counter
from typing import NamedTuple, Protocol

import numpy as np

from stopmim.base.errors import DataError
from stopmim.base.files import read_regular
from stopmim.data.rasters.open import ARRAYS
from stopmim.data.sources.arrays import label_name
from stopmim.data.sources.folder import Files, has_splits, open_split
from stopmim.data.sources.scanning import SUFFIXES, class_folders
from stopmim.data.sources.source import MAX_FILE, Source, Split, printable, refuse_split

_IMAGENET = re.compile(rb"(n\d{8})_[^/]*")
_INTEGER = re.compile(rb"-?\d{1,18}")
_NUMBER = re.compile(rb"[-+]?[\d.]+(e[-+]?\d+)?|nan|", re.IGNORECASE)  # or none


class Labelled(Protocol):
    labels: dict[str, np.ndarray]
    classes: list[str]


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
    else:
        refuse_split(text, split)
    return _open_list(path, root)


def _open_list(path: str, root: str) -> Files:
    """Opens the images that the list file at `path` names, in its order, below `root`.

    docs/data.md describes the lines. Classes are numbered as in `Folder(root)`, among all class
    folders and not only those in the list, or else by sorted labels.
    """
    name = printable(path)
    try:
        data = read_regular(path, MAX_FILE)
    except OSError as error:
        raise DataError(f"{name}: this list cannot be read: {error.strerror}") from None
    paths, labels, ignored = parse_list(name, data)
    is_flat = os.path.exists(os.path.join(root, os.fsdecode(paths[0])))
    if not is_flat and all(map(_IMAGENET.fullmatch, paths)):
        paths = [p.partition(b"_")[0] + b"/" + p for p in paths]
    twice, times = Counter(paths).most_common(1)[0]
    if times > 1:
        raise DataError(f"{name}: {printable(twice)} is listed {times} times; leave it in once")
    if not os.path.isdir(root):
        raise DataError(f"{printable(root)}: no such folder; {name} names files in it")
    files = Files(root, paths)
    files.ignored = ignored
    files.label_hint = f"give each line of {name} a label: PATH,LABEL, or a column called label"
    if labels is not None:
        add_labels(files, labels)
    elif all(b"/" in p for p in paths) and (classes := class_folders(root)):
        folders = [p.partition(b"/")[0] for p in paths]
        if unknown := sorted({printable(folder) for folder in folders} - set(classes)):
            raise DataError(f"{name}: {unknown[0]} is not a class folder of {printable(root)}")
        _number(files, classes, folders)
    return files


def add_labels(files: Labelled, labels: dict[str, list[bytes]]) -> None:
    """Sets the labels of a list: integers as they are, others numbered in sorted order.

    A blank is -1, unknown, and changes no other number.
    """
    for label, values in labels.items():
        if all(map(_INTEGER.fullmatch, filter(None, values))):
            files.labels[label] = np.array([int(value or -1) for value in values], np.int64)
        else:  # only of "class": see `_read_table`
            _number(files, [printable(value) for value in sorted(set(values) - {b""})], values)


def _number(files: Labelled, classes: list[str], labels: list[bytes]) -> None:
    index = {name: i for i, name in enumerate(classes)} | {"": -1}  # -1: unknown
    files.classes = classes
    files.labels["class"] = np.array([index[printable(label)] for label in labels], np.int64)


class Parsed(NamedTuple):
    """Contents of a list."""

    paths: list[bytes]
    labels: dict[str, list[bytes]] | None  # None: not in the list
    ignored: list[str]  # columns that are no labels


def parse_list(name: str, data: bytes) -> Parsed:
    """Paths and labels of a list file that holds `data`."""
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{name}: an empty list; expected one path per line")
    return _read_table(name, data) or _split_lines(name, lines)


def _read_table(name: str, data: bytes) -> Parsed | None:
    """Paths and labels of a CSV file with a header; None if the first line is no header.

    The paths are the first column of image files. Labels are the columns of integers, and one of
    text: called class, label, labels or y, or the only one beside the paths and decimal numbers.
    """
    text = data.decode("utf-8", "surrogateescape")  # a path may be any bytes
    first = text.lstrip().partition("\n")[0]
    separator = next((mark for mark in "\t;," if mark in first), ",")
    try:
        rows = csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True)
        header, *body = [[os.fsencode(cell.strip()) for cell in row] for row in rows if any(row)]
    except csv.Error:
        return None
    if any(_is_image(cell) or _INTEGER.fullmatch(cell) for cell in header):
        return None
    if not body or not any(map(_is_image, body[0])):
        return None
    if odd := next((i for i, row in enumerate(body, 2) if len(row) != len(header)), None):
        got = f"{len(body[odd - 2])} values in row {odd}, but {len(header)} in the header"
        raise DataError(f"{name}: {got}; quote a value that contains {separator!r}")
    names = [label_name(printable(cell).lower()) for cell in header]
    columns = {key: [row[i] for row in body] for i, key in enumerate(names)}
    files = next((cell for cell, values in columns.items() if all(map(_is_image, values))), None)
    if files is None:
        raise DataError(
            f"{name}: in none of the columns {', '.join(names)} is every value an image file"
        )
    paths = columns.pop(files)
    whole = [k for k, values in columns.items() if all(map(_INTEGER.fullmatch, values))]
    worded = [k for k, v in columns.items() if k == "class" or not all(map(_NUMBER.fullmatch, v))]
    if len(columns) == 1 or (len(worded) == 1 and not whole):
        only = (worded or [*columns])[0]
        return Parsed(paths, {"class": columns.pop(only)}, [*columns])
    labels = {k: v for k, v in columns.items() if k == "class" or k in whole}
    return Parsed(paths, labels if columns else None, [k for k in columns if k not in labels])


def _is_image(cell: bytes) -> bool:
    name = cell.partition(b"?")[0] if b"://" in cell else cell  # a URL may have a query
    return name.lower().endswith((*SUFFIXES, *ARRAYS))


def _split_lines(name: str, lines: list[bytes]) -> Parsed:
    """Paths and labels of the lines; no labels if every line is an image file."""
    if all(map(_is_image, lines)):
        return Parsed(lines, None, [])
    for separator in (b"\t", b",", b" "):
        if all(separator in line for line in lines):
            pairs = [line.rpartition(separator) for line in lines]
            labels = [label.strip() for _, _, label in pairs]
            return Parsed([p.strip() for p, _, _ in pairs], {"class": labels}, [])
    odd = next(line for line in lines if not _is_image(line))
    raise DataError(
        f"{name}: {printable(odd[:100])}: not an image file; every line must be an image file, or "
        f"every line a path and a label with a tab, comma or blank between them"
    )


def _recognise(text: str) -> bool:
    named = text.lower().endswith((".csv", ".tsv")) and os.path.isfile(text)
    return named or ("@" in text and not os.path.exists(text))


LIST = Source("list", _open, suffix=".txt", recognise=_recognise)
