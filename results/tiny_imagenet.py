"""Packs half of Tiny-ImageNet into files that every command reads: FOLDER OUT.npz HELD.npz

Every second of its 200 classes, sorted by name: 50,000 training images and 5,000 to test on, 64 px.
The folder is what tiny-imagenet-200.zip holds. HELD.npz has the training images alone, the last
tenth of each class to test on: what a recipe may be chosen by.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

folder, out, held_out = map(Path, sys.argv[1:])
classes = sorted(path.name for path in (folder / "train").iterdir())[::2]
label = {name: i for i, name in enumerate(classes)}
found: dict[str, list[tuple[Path, int]]] = {"train": [], "val": []}
for first in range(0, 500, 100):  # every hundred files are a smaller set of all classes
    for name in classes:
        images = folder / "train" / name / "images"
        files = [images / f"{name}_{i}.JPEG" for i in range(first, first + 100)]
        found["train"] += [(file, label[name]) for file in files if file.exists()]
for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
    file, name = line.split("\t")[:2]
    if name in label:
        found["val"].append((folder / "val" / "images" / file, label[name]))
arrays = {}
for split, files in found.items():
    arrays[f"{split}_images"] = np.stack(
        [np.asarray(Image.open(f).convert("RGB")) for f, _ in files]
    )
    arrays[f"{split}_labels"] = np.array([y for _, y in files])
np.savez(out, **arrays)

images, labels = arrays["train_images"], arrays["train_labels"]
last = np.zeros(len(labels), dtype=bool)
for c in range(len(classes)):
    own = np.flatnonzero(labels == c)
    last[own[len(own) * 9 // 10 :]] = True
np.savez(
    held_out,
    train_images=images[~last],
    train_labels=labels[~last],
    val_images=images[last],
    val_labels=labels[last],
)
