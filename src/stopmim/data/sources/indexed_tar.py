"""Remote tar shards with an index.json: opened without fetching any, and fetched when read."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache

import numpy as np

from stopmim.data.rasters.raster import Raster
from stopmim.data.remote.attempt import RemoteError
from stopmim.data.remote.cache import Remote, RemoteFiles
from stopmim.data.sources.shards import Shards
from stopmim.data.sources.tar import WINDOW, Tar

OPEN = 256  # shards whose index each process keeps in memory
AT_ONCE = 8  # shards that are fetched at the same time, for their labels


class IndexedTar(Shards):
    """The images of tar shards, each a `Tar` of its own as soon as one of its images is read.

    The numbers of images, the checksums and the fingerprint come from the index. Labels are in the
    shards: asking for all of them fetches every shard once.
    """

    files: RemoteFiles
    window = WINDOW
    label_hint = Tar.label_hint

    def __init__(self, files: RemoteFiles, counts: list[int], classes: list[str]) -> None:
        self.files, self.classes = files, classes
        self.chunks = np.cumsum([0, *counts])
        self.any_order = len(self) <= WINDOW  # as for the same shards in a local folder
        self.labels: dict[str, np.ndarray] = _Labels(self)  # type: ignore[assignment]
        digest = hashlib.sha256()
        for remote in files.remotes:
            digest.update(f"{os.path.basename(remote.url)}\0{remote.sha256}\n".encode())
        self.fingerprint = digest.hexdigest()

    def shard(self, chunk: int) -> Tar:
        return _shard(self.files.remotes[chunk], int(np.diff(self.chunks)[chunk]))

    def open(self, i: int) -> Raster | None:
        chunk = self._chunk(i)
        return self.shard(chunk).open(i - int(self.chunks[chunk]))

    def read(self, i: int) -> np.ndarray:
        return self.read_reduced(i, None)

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        chunk = self._chunk(i)
        _ = self.files[chunk]  # fetched here and kept; the shard would do so in another thread
        return self.shard(chunk).read_reduced(i - int(self.chunks[chunk]), enough)

    def name(self, i: int) -> str:
        chunk = self._chunk(i)
        return self.shard(chunk).name(i - int(self.chunks[chunk]))


@lru_cache(OPEN)
def _shard(remote: Remote, stated: int) -> Tar:
    shard = Tar(RemoteFiles([remote]))
    if len(shard) != stated:
        raise RemoteError(f"{remote.url}: {len(shard)} images, index.json states {stated}")
    return shard


class _Labels(Mapping[str, np.ndarray]):
    """The labels of all images, or of some, without fetching the shards of the others."""

    def __init__(self, images: IndexedTar) -> None:
        self.images = images

    def at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        chunks = self.images.file_of(numbers)
        inside = numbers - self.images.chunks[chunks]
        shards = [self.images.shard(chunk).labels for chunk in chunks.tolist()]
        if not all("class" in labels for labels in shards):
            return {}
        pairs = zip(shards, inside.tolist(), strict=True)
        return {"class": np.array([labels["class"][i] for labels, i in pairs], np.int64)}

    @cached_property
    def _all(self) -> dict[str, np.ndarray]:
        images, found = self.images, list[np.ndarray]()
        every = range(len(images.files))
        with ThreadPoolExecutor(AT_ONCE) as pool, images.progress() as update:
            for shard in pool.map(images.shard, every):
                if "class" not in shard.labels:
                    return {}
                found.append(shard.labels["class"])
                update(len(found))
        return {"class": np.concatenate(found)}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
