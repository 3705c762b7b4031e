"""Images of one size in one array, which forked workers share, and NumPy archives of them."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError, NoPartError
from stopmim.base.files import open_to_read
from stopmim.data.channels import MOST, as_kind
from stopmim.data.decode import one_line
from stopmim.data.rasters.raster import kind_of
from stopmim.data.sources.source import MAX_EXPANDED, MAX_SHARD, Source, Split, printable


class Arrays:
    """Images in memory; the default fingerprint is the sha256 of the shape and of all pixels.

    Planes (n, H, W) of 8 bits are grey pictures, shown in red, green and blue alike; of any other
    type they are images of one channel.
    """

    label_hint = "add an integer array called labels, with one value per image, to the archive"

    def __init__(
        self,
        pixels: np.ndarray,  # (n, H, W, C) or (n, H, W), see channels.as_kind
        labels: dict[str, np.ndarray],  # name of a label -> (n,) int64
        classes: list[str],  # names of the values of "class", if known
        title: str,
        fingerprint: str = "",
        channel_names: Sequence[str] = (),
    ) -> None:
        if (converted := as_kind(pixels)) is None:
            raise ValueError(f"pixels of type {pixels.dtype}; expected real numbers")
        pixels = converted
        if pixels.ndim == 3 and pixels.dtype != np.uint8:
            pixels = pixels[..., None]
        self.channels, self.kind = pixels.shape[3] if pixels.ndim == 4 else 3, pixels.dtype.name
        self.channel_names = list(channel_names)
        self.pixels, self.labels, self.classes, self.title = pixels, labels, classes, title
        if not fingerprint:
            digest = hashlib.sha256(repr(pixels.shape).encode())
            if pixels.dtype != np.uint8:
                digest.update(self.kind.encode())
            digest.update(np.ascontiguousarray(pixels).data)
            fingerprint = digest.hexdigest()
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, i: int) -> np.ndarray:
        """Image `i`, (H, W, C); grey is repeated in all three channels."""
        image = self.pixels[i]
        return image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)

    def read_together(self, numbers: np.ndarray) -> np.ndarray | None:
        images = self.pixels[numbers]
        return images if images.ndim == 4 else np.repeat(images[..., None], 3, axis=3)

    def resident_pixels(self) -> np.ndarray | None:
        return self.pixels if self.pixels.ndim == 4 else None

    def name(self, i: int) -> str:
        return f"{self.title} {i}"


def label_name(name: str) -> str:
    """Our name of a label that a file calls `name`."""
    return "class" if name in ("label", "labels", "y") else name


def _open_npz(path: str, split: Split | None) -> Arrays:
    """Opens an archive with one array of images, (n, H, W, C) or (n, H, W), under any name.

    Pictures of 8 bits win over other arrays, which may be masks or depths. An array of C texts
    names the channels.
    Integer arrays of length n, or (n, 1), are labels; "label", "labels" and "y" become "class".
    If there are arrays train_images and test_images (or val_images), as in MedMNIST, these are the
    splits, and only labels with the same prefix belong to them.
    """
    name = printable(path)
    try:
        with open_to_read(path, MAX_SHARD) as file, np.load(file, allow_pickle=False) as found:
            size = os.fstat(file.fileno()).st_size
            _check_expansion(sum(record.file_size for record in found.zip.infolist()), size)
            prefix = _prefix(name, found.files, split)
            keys = [key for key in found.files if key.startswith(prefix)]
            arrays = {key.removeprefix(prefix): found[key] for key in keys}
    except NoPartError:
        raise
    except Exception as error:  # zip, NumPy and its compressors raise almost anything
        reason = f"not a NumPy archive that can be read safely: {one_line(error)}"
        raise DataError(f"{name}: {reason}") from None
    images = _arrays_of_images(arrays)
    if len(images) != 1:
        got = ", ".join(f"{k} {a.dtype} {a.shape}" for k, a in arrays.items())
        raise DataError(
            f"{name}: {len(images)} arrays of images; looked for one, (n, H, W, C) with up to "
            f"{MOST} channels or (n, H, W); got {printable(got)[:200]}"
        )
    pixels = arrays.pop(images[0])
    try:  # what is converted may take four times as much
        _check_expansion(pixels.size * np.dtype(kind_of(pixels.dtype)).itemsize, size)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    texts = [a for a in arrays.values() if a.dtype.kind == "U" and a.shape == pixels.shape[3:]]
    labels = {
        label_name(k): a.reshape(-1).astype(np.int64)
        for k, a in arrays.items()
        if a.dtype.kind in "iu" and a.shape in ((len(pixels),), (len(pixels), 1))
    }
    names = [printable(text) for text in texts[0].tolist()] if texts else []
    return Arrays(pixels, labels, [], printable(Path(path).name), channel_names=names)


def _arrays_of_images(arrays: dict[str, np.ndarray]) -> list[str]:
    """Keys of the arrays that may be the images: pictures, or else any stacks of channels."""
    full = {key: a for key, a in arrays.items() if a.size and a.dtype.kind in "buif"}
    stacks = [key for key, a in full.items() if a.ndim == 4 and _channels_last(*a.shape[1:])]
    planes = [key for key, a in full.items() if a.ndim == 3]
    pictures = [key for key in stacks if full[key].shape[3] == 3] + planes
    pictures = [key for key in pictures if full[key].dtype == np.uint8]
    return pictures or stacks or planes


def _channels_last(height: int, width: int, channels: int) -> bool:
    """Whether the axes can have this order; in C, H, W with H = W the last two would be equal."""
    return channels <= MOST and not height < width == channels


def _check_expansion(total: int, size: int) -> None:
    """Refuses an archive of `size` bytes that expands to `total`, many times as much."""
    if total > max(MAX_EXPANDED, 4 * size):
        raise ValueError(f"expands to {total} bytes; STOPMIM_MAX_BYTES={total} allows it")


def _prefix(name: str, keys: list[str], split: Split | None) -> str:
    """The prefix of the arrays of this split; "" if there are no splits."""
    if "train_images" not in keys and split is None:
        return ""
    for prefix in ("test_", "val_") if split == "test" else ("train_",):
        if f"{prefix}images" in keys:
            return prefix
    raise NoPartError(f"{name}: no {split} split; looked for an array {split}_images")


NPZ = Source("npz", _open_npz, suffix=".npz")
