"""NumPy archives (.npz) of uint8 images that fit in memory."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError, NoPartError
from stopmim.data.decode import one_line
from stopmim.data.sources.arrays import Arrays, label_name
from stopmim.data.sources.paths import printable
from stopmim.data.sources.source import Source, Split


def open_npz(path: Path | str, split: Split | None = None) -> Arrays:
    """Opens an archive with one array of images, (n, H, W, 3) or (n, H, W), under any name.

    Integer arrays of length n, or (n, 1), are labels; "label", "labels" and "y" become "class".
    If there are arrays train_images and test_images (or val_images), as in MedMNIST, these are the
    splits, and only labels with the same prefix belong to them.
    """
    name = printable(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as found:
            prefix = _prefix(name, found.files, split)
            keys = [key for key in found.files if key.startswith(prefix)]
            arrays = {key.removeprefix(prefix): found[key] for key in keys}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = f"not a NumPy archive that can be read safely: {one_line(error)}"
        raise DataError(f"{name}: {reason}") from None
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


def _prefix(name: str, keys: list[str], split: Split | None) -> str:
    """The prefix of the arrays of this split; "" if there are no splits."""
    if "train_images" not in keys and split is None:
        return ""
    for prefix in ("test_", "val_") if split == "test" else ("train_",):
        if f"{prefix}images" in keys:
            return prefix
    raise NoPartError(f"{name}: no {split} split; looked for an array {split}_images")


def _is_images(array: np.ndarray) -> bool:
    return array.size > 0 and (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3))


NPZ = Source("npz", open_npz, suffix=".npz")
