"""Images at URLs: tar shards, Parquet files, and lists of images, through fsspec.

Files are fetched whole to a local cache (remote/cache.py) and read there by the same code as local
ones, so that a run does not depend on where its images are. An ``index.json`` of `stopmim pack`
beside shards states their sizes and checksums. Without it a server is asked for each size.
"""

import contextlib
import hashlib
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.base.secrets import remember, reveal, shown
from stopmim.data.decode import BadImageError, decode
from stopmim.data.images import Images
from stopmim.data.remote.attempt import PROTOCOLS, About, DeniedError, MissingError, is_url
from stopmim.data.remote.cache import Remote, RemoteFiles, changed, recorded
from stopmim.data.remote.fetch import fetch_small, list_files, look
from stopmim.data.sources.indexed_tar import IndexedTar
from stopmim.data.sources.lists import add_labels, parse_list
from stopmim.data.sources.packed import INDEX, MAX_INDEX, Index, PackedShard, parse_index
from stopmim.data.sources.parquet import Parquet
from stopmim.data.sources.shards import choose_split, expand_braces
from stopmim.data.sources.source import Source, Split, no_split, printable, read_bytes, refuse_split
from stopmim.data.sources.tar import COMPRESSED, Tar

LISTS = (".txt", ".csv", ".tsv")
MAX_LIST = 2**30
AT_ONCE = 16  # servers are asked for this many sizes at the same time


def open_url(text: str, split: Split | None, kind: str = "") -> Images:
    """Opens the images at a URL, a pattern of URLs, or a folder with an index."""
    if text.startswith("file://"):
        raise DataError(f"{text}: give the path alone: {text.removeprefix('file://')}")
    if "::" in text:
        raise DataError(f"{text}: chains of protocols are not supported; give a single URL")
    name = text.lower()
    if name.endswith(COMPRESSED):
        raise DataError(f"{text}: a compressed tar has no random access; decompress it")
    if kind == "list" or (not kind and name.endswith(LISTS)):
        refuse_split(text, split)
        return RemoteList(text)
    suffix = next((s for s in (".tar", ".parquet") if name.endswith(s)), "")
    urls = _expand(text) if suffix else []
    folder = _folder(text) if suffix else text.rstrip("/")
    index = _index(folder, needed=not suffix)
    kind = kind or suffix.lstrip(".") or (index.kind if index else "")
    if kind not in ("tar", "parquet"):
        raise DataError(
            f"{text}: not a source of images; looked for .tar, .parquet, {', '.join(LISTS)}, or a "
            f"folder with an index.json of `stopmim pack`"
        )
    if suffix:
        urls = choose_split(urls, text, split)
    elif index:
        urls = [_beside(folder, one.name) for one in _of_split(index, text, split)]
    else:
        urls = choose_split(_expand(f"{folder}/*.{kind}"), text, split)
    known = {one.name: one for one in index.shards} if index else {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        shards = pool.map(lambda url: _remote(url, known.get(os.path.basename(url))), urls)
        files = RemoteFiles(list(shards))
    if kind == "parquet":
        return Parquet(files)
    counts = [known[name].images for url in urls if (name := os.path.basename(url)) in known]
    if index and len(counts) == len(urls):
        return IndexedTar(files, counts, index.classes)
    return Tar(files)


def _index(folder: str, needed: bool) -> Index | None:
    """The index in a folder; None if there is none, or the credentials do not cover it."""
    url = _beside(folder, INDEX)
    try:
        return parse_index(fetch_small(url, MAX_INDEX), url)
    except MissingError:
        return None
    except DeniedError:
        if needed:
            raise
        return None


def _of_split(index: Index, text: str, split: Split | None) -> list[PackedShard]:
    wanted = split or "train"
    found = [one for one in index.shards if one.split == wanted]
    if not found and split is None:
        found = index.shards
    if not found:
        raise no_split(text, wanted)
    return list(found)


def _remote(url: str, known: PackedShard | None) -> Remote:
    if known is not None:
        return Remote(url, About(known.bytes, ""), known.sha256)
    about = look(url)
    before = (recorded(url) or {}).get("bytes", about.size)
    if before != about.size:
        raise changed(url, f"{before} bytes -> {about.size}")
    return Remote(url, about)


def _expand(pattern: str) -> list[str]:
    """URLs, as shown, that a pattern with braces or a glob stands for."""
    head, query = _parts(pattern)
    urls = [remember(name + query) for name in expand_braces(head)]
    found = [url for one in urls for url in (list_files(one) if _is_glob(one) else [one])]
    if not found:
        raise DataError(f"{pattern}: no file of that name")
    return list(dict.fromkeys(found))


def _is_glob(url: str) -> bool:
    return "*" in url or "[" in url.partition("://")[2].partition("/")[2]


def _beside(folder: str, name: str) -> str:
    """The URL, as shown, of a file in a folder; with the credentials of the folder."""
    head, query = _parts(folder)
    return remember(f"{head.rstrip('/')}/{name}{query}")


def _folder(url: str) -> str:
    """The URL, as shown, of the folder that a file is in; with the credentials of the file."""
    head, query = _parts(url)
    return remember(head.rpartition("/")[0] + query)


def _parts(url: str) -> tuple[str, str]:
    """The whole URL without its query, and the query."""
    full = reveal(url)
    at = re.search(r"[?#]|$", full)
    assert at  # the end, if nothing else
    return full[: at.start()], full[at.start() :]


# ------------------------------------------------------------------------------ lists


class RemoteList:
    """Images that a list names, each a file of its own at a URL, fetched when it is read.

    Lines are as in a local list. In a remote one, a path is relative to its folder. The fingerprint
    covers the URLs alone: asking for a million sizes would take hours.
    """

    def __init__(self, place: str) -> None:
        is_remote, name = is_url(place), printable(place)
        data = fetch_small(place, MAX_LIST) if is_remote else read_bytes(Path(place))
        lines, labels, self.ignored = parse_list(name, data)
        folder = _folder(place) if is_remote else ""
        self.urls = [_resolve(name, folder, line) for line in lines]
        url, times = Counter(self.urls).most_common(1)[0]
        if times > 1:
            raise DataError(f"{name}: {printable(url)} is listed {times} times, but for its query")
        self.files = RemoteFiles([Remote(url) for url in self.urls])
        self.labels: dict[str, np.ndarray] = {}
        self.classes: list[str] = []
        self.label_hint = f"give each line of {name} a label: PATH,LABEL, or a column called label"
        add_labels(self, labels or {})
        self.fingerprint = hashlib.sha256("\n".join(self.urls).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.urls)

    def file_of(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def read(self, i: int) -> np.ndarray:
        return self.read_reduced(i, None)

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        try:
            with open(self.files[i], "rb") as file:
                return decode(file.read(), enough=enough)
        except MissingError as error:
            raise BadImageError(str(error)) from None

    def name(self, i: int) -> str:
        return printable(self.urls[i])


def _resolve(name: str, folder: str, line: bytes) -> str:
    """The URL, as shown, that a line of a list means; `folder` is "" for a local list."""
    text = line.decode("utf-8", "replace")
    if is_url(text):
        scheme = text.partition("://")[0]
        if scheme not in PROTOCOLS or (scheme == "memory") > folder.startswith("memory://"):
            raise DataError(f"{name}: {printable(shown(text))}: not a URL that a list may hold")
        return remember(text)
    if not folder or text.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", text):
        where = "below the folder of the list" if folder else "a URL, as other lines are"
        raise DataError(f"{name}: {printable(text)}: not {where}")
    return _beside(folder, text)


def _recognise(text: str) -> bool:
    """Whether `text` is a URL, or a local list of URLs."""
    if is_url(text):
        return True
    if not (text.lower().endswith(LISTS) and os.path.isfile(text)):
        return False
    with contextlib.suppress(OSError), open(text, "rb") as file:
        return b"://" in file.read(2**14)
    return False


URL = Source("url", open_url, recognise=_recognise)
