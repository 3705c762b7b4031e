"""Some images of a source: those that are not skipped, or one of two parts that were split."""

import hashlib
from collections.abc import Sequence

import numpy as np

from stopmim.base.random_keys import numpy_generator
from stopmim.data.images import Chunked, Images


class Some:
    """The `kept` of `images`, in ascending order, numbered anew; with a fingerprint of its own."""

    def __init__(self, images: Images, kept: Sequence[int] | np.ndarray) -> None:
        self.images, self.kept = images, np.unique(np.asarray(kept, np.int64))
        self.labels = {name: label[self.kept] for name, label in images.labels.items()}
        self.classes: list[str] = getattr(images, "classes", [])  # which a label is a number of
        if isinstance(images, Chunked):  # what is left of a chunk still lies side by side
            self.chunks = np.searchsorted(self.kept, images.chunks)
            self.window = images.window
        digest = hashlib.sha256(images.fingerprint.encode())
        left_out = np.setdiff1d(np.arange(len(images)), self.kept)
        digest.update(left_out.astype("<i8").tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, i: int) -> np.ndarray:
        return self.images.read(int(self.kept[i]))

    def name(self, i: int) -> str:
        return self.images.name(int(self.kept[i]))


def source(images: Images) -> Images:
    """What `images` are some of, or they themselves."""
    return source(images.images) if isinstance(images, Some) else images


def held_out(images: Images, share: float, seed: int) -> tuple[Some, Some]:
    """Images to fit on and images to test on: `share` of each class, but neither none nor all.

    A class of one image is in the first part. Classes are those of "class", or of the first label
    there is.
    """
    none = np.zeros(len(images), np.int64)
    label = images.labels.get("class", next(iter(images.labels.values()), none))
    rng = numpy_generator("hold out", seed)
    tested = np.zeros(len(images), bool)
    for one in np.unique(label):
        own = rng.permutation(np.flatnonzero(label == one))
        tested[own[: min(len(own) - 1, max(1, round(share * len(own))))]] = True
    return Some(images, np.flatnonzero(~tested)), Some(images, np.flatnonzero(tested))
