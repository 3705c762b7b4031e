"""CLEVR v1.0: the images of one split with the labels of CLEVR/Count and CLEVR/Dist."""

import bisect
import os
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.folder import Files
from stopmim.data.sources.source import Source, Split, contains, printable, read_json

DISTANCES = (8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # inclusive upper bounds of the classes of CLEVR/Dist
SCENES = "scenes/CLEVR_{}_scenes.json"


def _open(text: str, split: Split | None) -> Files:
    """Label "count": objects less 3, of 8 classes; "distance": depth of the nearest, of 6."""
    part = "val" if split == "test" else "train"
    path = Path(text, SCENES.format(part))
    content = read_json(path)
    try:
        scenes = content["scenes"]
        paths = [os.fsencode(f"images/{part}/{scene['image_filename']}") for scene in scenes]
        counts = [len(scene["objects"]) - 3 for scene in scenes]
        depths = [min(float(o["pixel_coords"][2]) for o in scene["objects"]) for scene in scenes]
    except (KeyError, TypeError, IndexError, ValueError):
        raise DataError(f"{printable(path)}: not a file of CLEVR scenes") from None
    files = Files(text, paths)
    distances = [bisect.bisect_left(DISTANCES, depth) for depth in depths]
    files.labels = {"count": np.array(counts, np.int64), "distance": np.array(distances, np.int64)}
    return files


CLEVR = Source(
    "clevr", _open, recognise=lambda text: contains(text, *map(SCENES.format, ("train", "val")))
)
