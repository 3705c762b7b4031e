"""Images of one size in one array, which forked workers share."""

import hashlib

import numpy as np


class Arrays:
    """Images in memory; the default fingerprint is the sha256 of the shape and of all pixels."""

    def __init__(
        self,
        pixels: np.ndarray,  # (n, H, W, 3) or (n, H, W), uint8
        labels: dict[str, np.ndarray],  # name of a label -> (n,) int64
        classes: list[str],  # names of the values of "class", if known
        title: str,
        fingerprint: str | None = None,
    ) -> None:
        self.pixels, self.labels, self.classes, self.title = pixels, labels, classes, title
        self.fingerprint = fingerprint or _fingerprint(pixels)

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, i: int) -> np.ndarray:
        """Image `i`, (H, W, 3) uint8; grey is repeated in all three channels."""
        image = self.pixels[i]
        return image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)

    def resident_pixels(self) -> np.ndarray | None:
        return self.pixels if self.pixels.ndim == 4 else None

    def name(self, i: int) -> str:
        return f"{self.title} {i}"


def _fingerprint(pixels: np.ndarray) -> str:
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def label_name(name: str) -> str:
    """Our name of a label that a file calls `name`."""
    return "class" if name in ("label", "labels", "y") else name
