"""Packs Imagenette into files that every command reads: FOLDER OUT.npz HELD.npz

The folder is what imagenette2.tgz holds: train/CLASS/*.JPEG and val/CLASS/*.JPEG. Packs of encoded
images do as well: imagenette*train*.npz and imagenette*val*.npz with arrays blob, offsets (image i
is blob[offsets[i]:offsets[i + 1]]) and label. Images are squared to 224 px: the shorter edge is
resized, and the middle is cut out. HELD.npz has the training images alone, the last fifth of each
class to test on: what a recipe may be chosen by.
"""

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

EDGE = 224
folder, out, held_out = map(Path, sys.argv[1:])


def encoded(split: str) -> Iterator[tuple[bytes, int]]:
    """Every image of a split, as a file, with its label."""
    for path in sorted(folder.glob(f"imagenette*{split}*.npz")):
        with np.load(path, allow_pickle=False) as pack:
            blob, ends, labels = pack["blob"], pack["offsets"], pack["label"]
        for start, end, label in zip(ends[:-1], ends[1:], labels, strict=True):
            yield blob[start:end].tobytes(), int(label)
    if (folder / split).is_dir():
        for label, name in enumerate(sorted(path.name for path in (folder / split).iterdir())):
            for path in sorted((folder / split / name).iterdir()):
                yield path.read_bytes(), label


def squared(file: bytes) -> np.ndarray:
    """(EDGE, EDGE, 3) uint8."""
    image = Image.open(io.BytesIO(file)).convert("RGB")
    return np.asarray(ImageOps.fit(image, (EDGE, EDGE), Image.Resampling.BICUBIC))


arrays = {}
with ProcessPoolExecutor() as pool:
    for split in ("train", "val"):
        found = list(encoded(split))
        if not found:
            sys.exit(f"{folder}: no {split} images; expected {split}/CLASS/*.JPEG")
        images = pool.map(squared, [file for file, _ in found], chunksize=64)
        arrays[f"{split}_images"] = np.stack(list(images))
        arrays[f"{split}_labels"] = np.array([label for _, label in found])
np.savez(out, **arrays)

images, labels = arrays["train_images"], arrays["train_labels"]
last = np.zeros(len(labels), dtype=bool)
for c in np.unique(labels):
    own = np.flatnonzero(labels == c)
    last[own[len(own) * 4 // 5 :]] = True
np.savez(
    held_out,
    train_images=images[~last],
    train_labels=labels[~last],
    val_images=images[last],
    val_labels=labels[last],
)
