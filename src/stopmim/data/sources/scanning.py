"""Finds image files below a folder, with their paths and classes, and counts other files."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.decode import EXTENSIONS, HEIC, READS_HEIC
from stopmim.data.images import LATEST
from stopmim.data.rasters.open import ARRAYS
from stopmim.data.sources.source import PackedPaths, printable

SUFFIXES = tuple(f".{extension}".encode() for extension in EXTENSIONS)
# Raw and other images that are never read.
FOREIGN = (*("arw", "cr2", "cr3", "dng", "nef", "orf", "pef", "raf", "rw2", "srw"),
           *("jp2", "jxl", "psd", "svg", "tga", "exr", "hdr", "ico"))  # fmt: skip
KINDS = 1000  # extensions that are counted; the rest count as ""


def scan(
    root: bytes,
    visited: dict[bytes, int],
    unreadable: list[str],
    others: Counter[str],
    suffixes: tuple[bytes, ...] = SUFFIXES,
) -> Iterator[bytes]:
    """Yields relative paths of all images below `root`, unordered; bytes, as some are not UTF-8.

    Adds every folder to `visited`, with its modification time, and whatever could not be followed
    to `unreadable`. Counts other files in `others`; a folder of zarr counts as a file.
    """
    seen: set[tuple[int, int]] = set()
    folders, links = [b""], list[bytes]()
    while folders or links:
        if not folders:
            # Links come last, the lowest path first, so that real paths win.
            links.sort(reverse=True)
            folders.append(links.pop())
        folder = folders.pop()
        try:
            status = os.stat(root + folder)
            visited[folder] = min(LATEST, status.st_mtime_ns)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(root + folder) as entries:
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    path = folder + entry.name
                    try:
                        is_array = entry.name.lower().endswith(b".zarr") and entry.is_dir()
                        if entry.is_dir() and not is_array:
                            (links if entry.is_symlink() else folders).append(path + b"/")
                        elif entry.name.lower().endswith(suffixes) and (
                            is_array or entry.is_file()
                        ):
                            yield path
                        elif is_array or entry.is_file():
                            kind = _extension(entry.name)
                            others[kind if kind in others or len(others) < KINDS else ""] += 1
                    except OSError:  # a link to itself, or into a closed folder
                        unreadable.append(printable(path))
        except OSError:
            unreadable.append(printable(folder or b"."))


def holds_images(root: Path | str | bytes, suffixes: tuple[bytes, ...] = SUFFIXES) -> bool:
    """Whether there is an image at any depth; stops at the first."""
    return next(scan(os.fsencode(root) + b"/", {}, [], Counter(), suffixes), None) is not None


def class_folders(root: Path | str) -> list[str]:
    """`Folder(root).classes`, without listing every file."""
    place = os.fsencode(os.path.abspath(root)) + b"/"
    _, folders, _ = next(os.walk(place), (place, [], []))
    folders = sorted(name for name in folders if not name.startswith(b"."))
    linked = any(os.path.islink(place + name) for name in folders)
    for suffixes in (SUFFIXES, ARRAYS):
        if linked:
            # The target of a link may count elsewhere: only a full scan tells.
            found = list(path_classes(list(scan(place, {}, [], Counter(), suffixes)))[0])
        else:
            found = [name for name in folders if holds_images(place + name, suffixes)]
        if found:
            break
    return [printable(name) for name in found] if len(found) > 1 else []


def path_classes(paths: Sequence[bytes]) -> tuple[PackedPaths, np.ndarray]:
    """Sorted first folders of all paths, and each path's index; -1 for a path without a folder."""
    firsts = [path.partition(b"/")[0] if b"/" in path else b"" for path in paths]
    names = sorted(set(firsts) - {b""})
    index = {name: i for i, name in enumerate(names)} | {b"": -1}
    return PackedPaths.pack(names), np.fromiter(map(index.__getitem__, firsts), np.int64)


def refuse_unknown(name: str, found: Iterable[str], classes: Iterable[str]) -> None:
    """Raises DataError if test images called `name` have classes that training does not know."""
    if unknown := sorted({*found} - {*classes}):
        raise DataError(f"{name}: class {unknown[0]} is not among those of training")


def _extension(name: bytes) -> str:
    """The extension of a file in lower case; "" if a person would not recognise it as one."""
    extension = name.rpartition(b".")[2].lower() if b"." in name else b""
    return extension.decode() if extension.isalnum() and len(extension) <= 8 else ""


def pack_counts(counts: Mapping[str, int]) -> np.ndarray:
    return np.array([f"{n} {kind}" for kind, n in counts.items()], np.str_)


def unpack_counts(packed: np.ndarray) -> dict[str, int]:
    pairs = [text.split(" ") for text in packed.tolist()]
    return {kind: int(n) for n, kind in pairs}


def describe_others(others: Mapping[str, int], shown: int = 6) -> str:
    """Counts of files that are not read, images first, with hints how to read them."""
    kinds = sorted(others, key=lambda kind: (kind not in (*HEIC, *FOREIGN), -others[kind], kind))
    counts = [f"{others[kind]:,} {f'.{kind}' if kind else 'without extension'}" for kind in kinds]
    rest = sum(others[kind] for kind in kinds[shown:])
    text = ", ".join([*counts[:shown], *([f"{rest:,} others"] if rest else [])])
    hints = []
    if not READS_HEIC and any(kind in HEIC for kind in kinds):
        hints.append('pip install "stopmim[heic]" reads .heic')
    if any(kind in FOREIGN for kind in kinds):
        which = next(kind for kind in kinds if kind in FOREIGN)
        hints.append(f"convert .{which} to JPEG or PNG to use them")
    if "" in kinds:
        hints.append("rename images without extension to .jpg or .png to use them")
    return "; ".join([text, *hints])
