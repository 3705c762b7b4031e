"""Part of the images of a source: those not skipped, or one side of a split."""

import hashlib
from collections.abc import Sequence

import numpy as np

from stopmim.base.random_keys import numpy_generator
from stopmim.data.images import Chunked, Images, stamp


class Subset:
    """The `kept` of `images`, renumbered in ascending order, with a fingerprint of their own."""

    def __init__(self, images: Images, kept: Sequence[int] | np.ndarray) -> None:
        self.images, self.kept = images, np.unique(np.asarray(kept, np.int64))
        self.labels = {name: label[self.kept] for name, label in images.labels.items()}
        self.classes: list[str] = getattr(images, "classes", [])
        if isinstance(images, Chunked):  # the rest of a chunk is still contiguous
            self.chunks = np.searchsorted(self.kept, images.chunks)
            self.window = images.window
        left_out = np.setdiff1d(np.arange(len(images)), self.kept).astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(images.fingerprint.encode() + left_out).hexdigest()

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, i: int) -> np.ndarray:
        return self.images.read(int(self.kept[i]))

    def name(self, i: int) -> str:
        return self.images.name(int(self.kept[i]))

    def stamp(self) -> str:
        return stamp(self.images)


def underlying(images: Images) -> Images:
    """The images that a subset, or a subset of a subset, is taken from; or `images` itself."""
    return underlying(images.images) if isinstance(images, Subset) else images


def without_loose(images: Images) -> Images:
    """The images of class folders, without those that lie beside these folders."""
    if not getattr(underlying(images), "loose", 0):
        return images
    inside = images.labels["class"] >= 0
    return images if inside.all() else Subset(images, np.flatnonzero(inside))


def split_by_class(images: Images, share: float, seed: int) -> tuple[Subset, Subset]:
    """Images to fit on, and `share` of each class to test on, but neither none nor all of it.

    A class of one image is only fitted on. Classes are those of the label "class", or else of the
    first label.
    """
    none = np.zeros(len(images), np.int64)
    label = images.labels.get("class", next(iter(images.labels.values()), none))
    rng = numpy_generator("hold out", seed)
    tested = np.zeros(len(images), bool)
    for one in np.unique(label):
        own = rng.permutation(np.flatnonzero(label == one))
        tested[own[: min(len(own) - 1, max(1, round(share * len(own))))]] = True
    return Subset(images, np.flatnonzero(~tested)), Subset(images, np.flatnonzero(tested))
