"""Folders as data sets are released: CLEVR, iNaturalist 2018 and DAVIS."""

import bisect
import os
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.folder import Files, Folder
from stopmim.data.sources.source import Source, Split, contains, printable, read_json, refuse_split

CLEVR_SCENES = ("scenes/CLEVR_train_scenes.json", "scenes/CLEVR_val_scenes.json")
DISTANCES = (8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # inclusive upper bounds of the classes of CLEVR/Dist
INAT_LISTS = ("train2018.json", "val2018.json")


def _open_clevr(text: str, split: Split | None) -> Files:
    """Opens CLEVR v1.0 with the labels of CLEVR/Count and CLEVR/Dist.

    Label "count": objects less 3, of 8 classes; "distance": depth of the nearest, of 6.
    """
    part = "val" if split == "test" else "train"
    path = Path(text, CLEVR_SCENES[split == "test"])
    content = read_json(path)
    try:
        scenes = content["scenes"]
        paths = [os.fsencode(f"images/{part}/{scene['image_filename']}") for scene in scenes]
        counts = [len(scene["objects"]) - 3 for scene in scenes]
        depths = [min(float(o["pixel_coords"][2]) for o in scene["objects"]) for scene in scenes]
    except (LookupError, TypeError, ValueError, ArithmeticError):
        raise DataError(f"{printable(path)}: not a file of CLEVR scenes") from None
    files = Files(text, paths)
    distances = [bisect.bisect_left(DISTANCES, depth) for depth in depths]
    files.labels = {"count": np.array(counts, np.int64), "distance": np.array(distances, np.int64)}
    return files


def _open_inat2018(text: str, split: Split | None) -> Files:
    """Label "class": the third part of a path, as in ``train_val2018/Aves/2761/x.jpg``.

    Classes are numbered in the order of these parts, as text, over the training set.
    """
    train = _species(Path(text, INAT_LISTS[0]))
    paths, labels = train if split != "test" else _species(Path(text, INAT_LISTS[1]))
    classes = sorted(set(train[1]))
    index = {name: i for i, name in enumerate(classes)}
    if unknown := sorted(set(labels) - set(classes)):
        raise DataError(f"{printable(text)}: class {unknown[0]} is not in {INAT_LISTS[0]}")
    files = Files(text, paths)
    files.classes = [printable(name) for name in classes]
    files.labels = {"class": np.array([index[name] for name in labels], np.int64)}
    return files


def _species(path: Path) -> tuple[list[bytes], list[str]]:
    """Paths and classes of the images in a list of iNaturalist."""
    content = read_json(path)
    try:
        paths = [str(image["file_name"]) for image in content["images"]]
        return [os.fsencode(path) for path in paths], [path.split("/")[2] for path in paths]
    except (LookupError, TypeError, ValueError):  # the last: a lone surrogate is no file name
        raise DataError(
            f"{printable(path)}: not a list of iNaturalist 2018; expected images with a file_name "
            f"like train_val2018/Aves/2761/x.jpg"
        ) from None


def _open_davis(text: str, split: Split | None) -> Folder:
    """Opens all frames as single images, at 480p if there are several sizes."""
    refuse_split(text, split)
    frames = os.path.join(text, "JPEGImages")
    return Folder(os.path.join(frames, "480p") if contains(frames, "480p") else frames)


CLEVR = Source("clevr", _open_clevr, recognise=lambda text: contains(text, *CLEVR_SCENES))
INAT2018 = Source("inat2018", _open_inat2018, recognise=lambda text: contains(text, *INAT_LISTS))
DAVIS = Source("davis", _open_davis, recognise=lambda text: contains(text, "JPEGImages/"))
