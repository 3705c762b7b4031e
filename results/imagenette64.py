"""Packs 3,000 training images of Imagenette into a file that every command reads: FOLDER OUT.npz

The first 300 of each class by name, squared and scaled to 64 px: 200 to train on, 100 to test on.
The validation images stay unseen. The folder is what imagenette2.tgz holds.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SIZE, TRAIN, TEST = 64, 200, 100
folder, out = map(Path, sys.argv[1:])
arrays: dict[str, list[np.ndarray]] = {"train_images": [], "val_images": []}
labels: dict[str, list[int]] = {"train_labels": [], "val_labels": []}
for label, own in enumerate(sorted((folder / "train").iterdir())):
    for i, file in enumerate(sorted(own.iterdir())[: TRAIN + TEST]):
        split = "train" if i < TRAIN else "val"
        image = ImageOps.fit(Image.open(file).convert("RGB"), (SIZE, SIZE), Image.Resampling.BOX)
        arrays[f"{split}_images"].append(np.asarray(image))
        labels[f"{split}_labels"].append(label)
np.savez(out, **{key: np.stack(value) for key, value in arrays.items()}, **labels)
