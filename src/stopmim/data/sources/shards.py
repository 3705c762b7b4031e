"""Shard files named by a folder, a file, or a pattern, and their splits: for tar and Parquet."""

import contextlib
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from stopmim.base.console import Ticker
from stopmim.base.errors import DataError
from stopmim.data.images import file_state, stamp_files
from stopmim.data.remote.cache import RemoteFiles
from stopmim.data.sources.file_images import FileImages
from stopmim.data.sources.folder import TEST_NAMES, has_splits, split_folder
from stopmim.data.sources.scanning import holds_images
from stopmim.data.sources.source import Split, no_split, printable

MAX_FILES = 1_000_000  # most files that a pattern may stand for
MAX_TEXT = 2**28  # characters of all their names

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
# A word of a file's name, as in train-00000-of-00004.parquet or imagenet1k-validation-00.tar.
_SPLIT = re.compile(rf"(?:^|[-_.])(train|{'|'.join(TEST_NAMES)})(?=[-_.]|\d)")


class Shards(FileImages):
    """Images of several files, each read in chunks: the base of tar and Parquet."""

    files: Sequence[str]  # RemoteFiles fetch a file when its path is taken
    chunks: np.ndarray  # (k + 1,) number of the first image of each chunk

    def __init__(self, files: Sequence[str]) -> None:
        if isinstance(files, RemoteFiles):
            self.files, self._places = files, [remote.url for remote in files.remotes]
        else:
            self.files = self._places = [os.path.abspath(file) for file in files]
        self._file_names = _file_names(self._places)

    def __len__(self) -> int:
        return int(self.chunks[-1])

    def stamp(self) -> str:
        if isinstance(self.files, RemoteFiles):
            return hashlib.sha256(self._states().tobytes()).hexdigest()
        return stamp_files(self.files)

    def _states(self) -> np.ndarray:
        """Sizes and modification times or versions, (k, 2), which a cached index must match."""
        if isinstance(self.files, RemoteFiles):
            return np.array([remote.state for remote in self.files.remotes], np.int64)
        return np.array([*map(file_state, self.files)], np.int64)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[int], None]]:
        """Shows how many files are indexed, if they have to be fetched for that."""
        if not isinstance(self.files, RemoteFiles) or len(self.files) < 2:
            yield lambda done: None
            return
        with Ticker("index", len(self.files)) as ticker:
            yield lambda done: ticker.update(done, "files fetched")

    def file_of(self, numbers: np.ndarray) -> np.ndarray:
        """The files that images `numbers` are in, as indices: where each chunk is one file."""
        return np.searchsorted(self.chunks, numbers, side="right") - 1

    def _chunk(self, i: int) -> int:
        """The chunk that image `i` is in."""
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        return int(np.searchsorted(self.chunks, i, side="right")) - 1


def is_pattern(text: str) -> bool:
    """Whether `text` names files by a glob or by braces."""
    return not os.path.exists(text) and re.search(r"[*?\[{]", text) is not None


def names_shards(text: str, suffix: str) -> bool:
    """Whether `text` is a pattern of, or a folder of, files that end in `suffix`.

    A folder that also holds images does not count: such a file in it is a backup or metadata.
    """
    if has_splits(text):
        return names_shards(os.path.join(text, "train"), suffix)
    if os.path.isdir(text):
        return bool(_list_folder(text, suffix)) and not holds_images(text)
    return text.lower().endswith(suffix) and is_pattern(text)


def find_shards(text: str, suffix: str, split: Split | None) -> list[str]:
    """The files of one split that a folder, a file, a glob or a brace list stands for."""
    if os.path.isdir(text):
        found = _list_folder(text, suffix)
        if not found and has_splits(text):  # train/*.tar, val/*.tar
            return find_shards(str(split_folder(text, split)), suffix, None)
    else:
        found = [text] if os.path.exists(text) else expand(text)
    if not found:
        raise DataError(f"{printable(text)}: no file that ends in {suffix}")
    return choose_split(found, text, split)


def choose_split(found: list[str], text: str, split: Split | None) -> list[str]:
    """The files of one source that belong to a split, by a word in their names."""
    by_word: dict[str, list[str]] = {}
    for file in found:
        words = _SPLIT.findall(os.path.basename(file))
        by_word.setdefault(words[-1] if words else "", []).append(file)
    for word in TEST_NAMES if split == "test" else ("train",):
        if word in by_word:
            return by_word[word]
    if split is not None:
        raise no_split(text, split)
    return found


def expand(pattern: str) -> list[str]:
    """Files that a pattern stands for: first ``{000..146}`` and ``{a,b}``, then ``*`` and ``?``.

    Every name that braces give must exist; the matches of a glob are sorted.
    """
    names = expand_braces(pattern)
    files = [
        sorted(glob.glob(name)) if glob.has_magic(name) else [name] * os.path.exists(name)
        for name in names
    ]
    if missing := [name for name, found in zip(names, files, strict=True) if not found]:
        raise DataError(
            f"{printable(pattern)}: {len(missing)} of {len(names)} names lead to no file, first "
            f"{printable(missing[0])}"
        )
    return list(dict.fromkeys(chain.from_iterable(files)))


def expand_braces(pattern: str) -> list[str]:
    """The names that ``{000..146}`` and ``{a,b}`` in a pattern stand for."""
    names = [pattern]
    while found := _BRACES.search(names[0]):
        choices: Sequence[str | int] = found[1].split(",")
        width = 0
        if ends := _RANGE.fullmatch(found[1]):
            choices = range(int(ends[1]), int(ends[2]) + 1)
            width = len(ends[1]) if ends[1].startswith("0") else 0
        count = len(names) * len(choices)
        if not 0 < count <= min(MAX_FILES, MAX_TEXT // len(names[0])):
            what = f"stands for none or over {MAX_FILES} files, or too long names"
            raise DataError(f"{printable(pattern)}: {what}")
        names = [
            f"{head}{str(choice).zfill(width)}{tail}"
            for name in names
            for head, _, tail in [name.partition(found[0])]
            for choice in choices
        ]
    return names


def _file_names(paths: Sequence[str]) -> list[str]:
    """Printable base names; if two are equal, paths relative to the common folder instead."""
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, common) for path in paths]
    return [printable(name) for name in names]


def _list_folder(root: str, suffix: str) -> list[str]:
    """Sorted files in `root` that end in `suffix`; the Hub keeps Parquet in data/."""
    for folder in [root, os.path.join(root, "data")] if suffix == ".parquet" else [root]:
        _, _, names = next(os.walk(folder), ("", [], []))
        shards = [n for n in sorted(names) if n.lower().endswith(suffix) and n[0] != "."]
        paths = (os.path.join(folder, name) for name in shards)
        if found := [path for path in paths if os.path.isfile(path)]:
            return found
    return []
