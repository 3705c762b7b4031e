"""A plain folder of images, nested or flat, with or without classes."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stopmim.data.decode import BadImageError, decode
from stopmim.errors import DataError

EXTENSIONS = ("jpg", "jpeg", "jpe", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
_SUFFIXES = tuple(f".{extension}".encode() for extension in EXTENSIONS)

# A file is read whole. No image within MAX_PIXELS needs more, and a mistaken one may be a disk.
MAX_BYTES = 2**30


def printable(path: str | bytes) -> str:
    """One line of valid Unicode that names a file, for logs and JSON; different for every path.

    Control characters, bytes that are not UTF-8, and the backslash itself come out escaped.
    """
    text = os.fsencode(path).decode("utf-8", "surrogateescape")
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text
    )


class Folder:
    """Every image file below `root`, sorted by its path; hidden files and folders are left out.

    A folder that is reached twice, as through a looping link, counts once, under its real path
    where it has one below `root`. Only regular files are ever opened: a pipe would wait for ever.

    The paths lie in one array, not in a million objects: worker processes share its pages, where
    the reference counts of objects would have each worker copy them.

    Attributes:
        labels: "class" -> (n,) int64 into `classes`, if every image lies in one of at least two
            sub-folders of `root`; otherwise empty.
        classes: names of these sub-folders, sorted.
        fingerprint: sha256 of all relative paths and file sizes.
        unreadable: folders and links that could not be followed, for the user to see.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(os.path.abspath(root))
        self._root = os.fsencode(self.root) + b"/"
        self.unreadable: list[str] = []
        name = printable(os.fspath(root))
        if not os.path.exists(root):
            raise DataError(f"{name}: no such folder; give a folder of images")
        if not os.path.isdir(root):
            raise DataError(f"{name}: not a folder; give the folder that holds the images")
        paths = sorted(self._scan())
        self.unreadable.sort()
        if "." in self.unreadable:
            raise DataError(f"{name}: this folder cannot be read; check its permissions")
        if not paths:
            closed = f" (unreadable folders: {len(self.unreadable)})" if self.unreadable else ""
            raise DataError(
                f"{name}: no images in this folder or below{closed}; "
                f"looked for files that end in {', '.join(EXTENSIONS)}"
            )
        self.fingerprint = self._hash(paths)
        self.classes, self.labels = _classes(paths)
        lengths = np.fromiter(map(len, paths), np.int64, len(paths))
        self._offsets = np.concatenate([[0], lengths.cumsum()])  # (n + 1,)
        self._names = np.frombuffer(b"".join(paths), np.uint8)  # all paths, end to end

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, i: int) -> np.ndarray:
        """Pixels of image `i`, (H, W, 3) uint8; `BadImageError` if there are none to be had."""
        try:
            with open(self._root + self._path(i), "rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_BYTES:
                    raise BadImageError(f"more than {MAX_BYTES} bytes")
                data = file.read()
        except OSError as error:
            raise BadImageError(error.strerror or type(error).__name__) from None
        return decode(data)

    def name(self, i: int) -> str:
        """Path of image `i` relative to the root, as `printable` writes it."""
        return printable(self._path(i))

    def _path(self, i: int) -> bytes:
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        return self._names[self._offsets[i] : self._offsets[i + 1]].tobytes()

    def _scan(self) -> Iterator[bytes]:
        """Relative paths of all images, in no order. As bytes: not every name is valid UTF-8."""
        seen: set[tuple[int, int]] = set()
        folders, links = [b""], list[bytes]()
        while folders or links:
            if not folders:
                # Links come last, the lowest path first, so that real paths win.
                links.sort(reverse=True)
                folders.append(links.pop())
            folder = folders.pop()
            try:
                status = os.stat(self._root + folder)
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                with os.scandir(self._root + folder) as entries:
                    for entry in entries:
                        if entry.name.startswith(b"."):
                            continue
                        path = folder + entry.name
                        try:
                            if entry.is_dir():
                                (links if entry.is_symlink() else folders).append(path + b"/")
                            elif entry.name.lower().endswith(_SUFFIXES) and entry.is_file():
                                yield path
                        except OSError:  # a link to itself, or into a closed folder
                            self.unreadable.append(printable(path))
            except OSError:
                self.unreadable.append(printable(folder or b"."))

    def _hash(self, paths: list[bytes]) -> str:
        digest = hashlib.sha256()
        for path in paths:
            try:
                size = os.stat(self._root + path).st_size
            except OSError:  # gone since the scan
                size = -1
            digest.update(b"%b\0%d\n" % (path, size))  # no path contains a zero byte
        return digest.hexdigest()


def _classes(paths: list[bytes]) -> tuple[list[str], dict[str, np.ndarray]]:
    names = sorted({path.partition(b"/")[0] for path in paths})
    if len(names) < 2 or not all(b"/" in path for path in paths):
        return [], {}
    index = {name: i for i, name in enumerate(names)}
    labels = (index[path.partition(b"/")[0]] for path in paths)
    return [printable(name) for name in names], {"class": np.fromiter(labels, np.int64, len(paths))}
