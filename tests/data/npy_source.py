"""A new kind of source, complete: with this file and one line in `open.SOURCES` it works."""

import hashlib
from pathlib import Path

import numpy as np

from stopmim.data.decode import BadImageError
from stopmim.data.sources.source import Source, Split, no_split
from stopmim.data.stamps import stamp_files


class NpyFolder:
    """The .npy files of a folder, one image (H, W, 3) uint8 each."""

    def __init__(self, root: str, split: Split | None) -> None:
        if split is not None:
            raise no_split(root, split)
        self.files = sorted(Path(root).glob("*.npy"))
        self.labels: dict[str, np.ndarray] = {}
        about = [(file.name, file.stat().st_size) for file in self.files]
        self.fingerprint = hashlib.sha256(repr(about).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> np.ndarray:
        try:
            return np.asarray(np.load(self.files[i], allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise BadImageError(str(error)) from None

    def name(self, i: int) -> str:
        return self.files[i].name

    def stamp(self) -> str:  # optional: cached results notice files that were overwritten
        return stamp_files(self.files)


NPY = Source("npy", NpyFolder, recognise=lambda text: any(Path(text).glob("*.npy")))
