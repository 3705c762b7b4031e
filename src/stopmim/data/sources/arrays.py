"""Images that fit in memory: ``.npz`` files."""

import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError, NoPartError
from stopmim.data.sources.folder import printable


class Arrays:
    """Images of one size in one array, which forked workers share.

    Attributes:
        labels: name of a label -> (n,) int64.
        classes: what the numbers of "class" mean, where that is known.
        fingerprint: sha256 of the shape and of all pixels.
    """

    def __init__(
        self,
        images: np.ndarray,  # (n, H, W, 3) or (n, H, W), uint8
        labels: dict[str, np.ndarray],
        classes: list[str],
        title: str,
    ) -> None:
        self.images, self.labels, self.classes, self.title = images, labels, classes, title
        digest = hashlib.sha256(repr(images.shape).encode())
        digest.update(np.ascontiguousarray(images).data)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def read(self, i: int) -> np.ndarray:
        """Image `i`, (H, W, 3) uint8; grey ones three times over."""
        image = self.images[i]
        return image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)

    def name(self, i: int) -> str:
        return f"{self.title} {i}"


def label_name(name: str) -> str:
    """What we call a label that others call `name`."""
    return "class" if name in ("label", "labels", "y") else name


def npz(path: Path | str, split: str | None = None) -> Arrays:
    """A NumPy archive of uint8 images, (n, H, W, 3) or (n, H, W), under any one name.

    Integer arrays of length n, or (n, 1), are labels; "label", "labels" and "y" are called "class".
    With arrays called train_images and test_images (or val_images), as in MedMNIST, these are the
    splits, and only labels that begin with train_ or test_ go with them.
    """
    name = printable(str(path))
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as found:
            prefix = _prefix(name, found.files, split)
            keys = [key for key in found.files if key.startswith(prefix)]
            arrays = {key.removeprefix(prefix): found[key] for key in keys}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())[:100]
        raise DataError(f"{name}: not a NumPy archive that can be read safely: {reason}") from None
    images = {k: a for k, a in arrays.items() if a.dtype == np.uint8 and _is_images(a)}
    if len(images) != 1:
        got = ", ".join(f"{k} {a.dtype} {a.shape}" for k, a in arrays.items())
        raise DataError(
            f"{name}: {len(images)} arrays of images; looked for one, uint8, (n, H, W, 3) or "
            f"(n, H, W); got {printable(got)[:200]}"
        )
    ((key, pixels),) = images.items()
    labels = {
        label_name(k): a.reshape(-1).astype(np.int64)
        for k, a in arrays.items()
        if k != key and a.dtype.kind in "iu" and a.shape in ((len(pixels),), (len(pixels), 1))
    }
    return Arrays(pixels, labels, [], printable(Path(path).name))


def _prefix(name: str, keys: list[str], split: str | None) -> str:
    """What the arrays of the split begin with; "" where there are no splits."""
    if "train_images" not in keys and split is None:
        return ""
    for prefix in ("test_", "val_") if split == "test" else ("train_",):
        if f"{prefix}images" in keys:
            return prefix
    raise NoPartError(f"{name}: no {split} split; looked for an array {split}_images")


def _is_images(array: np.ndarray) -> bool:
    return array.size > 0 and (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3))
