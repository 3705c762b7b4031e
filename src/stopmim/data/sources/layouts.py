"""Data sets whose folders have a layout of their own."""

import bisect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from stopmim.base.errors import DataError, NoPartError
from stopmim.data.sources.folder import Files, Folder, class_folders, printable, subfolders

TEST_NAMES = ("val", "validation", "test")  # of the folder or the files to test on, best first
DISTANCES = (8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # CLEVR/Dist: each class ends with its threshold


def has_splits(root: Path) -> bool:
    """Whether `root` holds train/ and val/ (or validation/, or test/), and no other folder."""
    folders = {os.fsdecode(name) for name in subfolders(os.fsencode(root))}
    return "train" in folders and len(folders) > 1 and folders <= {"train", *TEST_NAMES}


def split_folder(root: Path, split: str | None) -> Path:
    """Where a split of `root` lies."""
    names = TEST_NAMES if split == "test" else ("train",)
    return next((root / name for name in names if os.path.isdir(root / name)), root / names[0])


def split_of_folder(root: Path, split: str | None) -> Folder:
    """One split of a root with train/ and val/, as ImageNet and Places205 have.

    Classes are numbered by the folders of train/ in all splits.
    """
    classes = class_folders(root / "train") if split == "test" else ()
    return Folder(split_folder(root, split), classes)


def inat2018(root: Path, split: str | None = None) -> Files:
    """iNaturalist 2018: the images that train2018.json or val2018.json lists.

    Label "class": the third part of a path, as in ``train_val2018/Aves/2761/x.jpg``; numbered in
    the order of these parts, as text, over the training set.
    """

    def species(part: str) -> tuple[list[bytes], list[str]]:
        about = _json(root / f"{part}2018.json")
        try:
            paths = [str(image["file_name"]) for image in about["images"]]
            return [os.fsencode(path) for path in paths], [path.split("/")[2] for path in paths]
        except (KeyError, TypeError, IndexError):
            raise DataError(
                f"{printable(str(root / f'{part}2018.json'))}: not a list of iNaturalist 2018; "
                f"expected images with a file_name like train_val2018/Aves/2761/x.jpg"
            ) from None

    train = species("train")
    paths, labels = train if split != "test" else species("val")
    classes = sorted(set(train[1]))
    index = {name: i for i, name in enumerate(classes)}
    if unknown := sorted(set(labels) - set(classes)):
        raise DataError(f"{printable(str(root))}: class {unknown[0]} is not in train2018.json")
    files = Files(root, paths)
    files.classes = [printable(name) for name in classes]
    files.labels = {"class": np.array([index[name] for name in labels], np.int64)}
    return files


def clevr(root: Path, split: str | None = None) -> Files:
    """CLEVR v1.0: the images of one split with the labels of CLEVR/Count and CLEVR/Dist.

    "count": number of objects less 3, of 8 classes. "distance": depth of the nearest object, of six
    classes with the upper bounds 8, 8.5, 9, 9.5, 10 and 100, each within its class.
    """
    part = "val" if split == "test" else "train"
    path = root / "scenes" / f"CLEVR_{part}_scenes.json"
    about = _json(path)
    try:
        scenes = about["scenes"]
        paths = [os.fsencode(f"images/{part}/{scene['image_filename']}") for scene in scenes]
        counts = [len(scene["objects"]) - 3 for scene in scenes]
        depths = [min(float(o["pixel_coords"][2]) for o in scene["objects"]) for scene in scenes]
    except (KeyError, TypeError, IndexError, ValueError):
        raise DataError(f"{printable(str(path))}: not a file of CLEVR scenes") from None
    files = Files(root, paths)
    distances = [bisect.bisect_left(DISTANCES, depth) for depth in depths]
    files.labels = {"count": np.array(counts, np.int64), "distance": np.array(distances, np.int64)}
    return files


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:  # there is one file for each part
        raise NoPartError(f"{printable(str(path))}: {error.strerror}") from None
    except OSError as error:
        raise DataError(f"{printable(str(path))}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{printable(str(path))}: not JSON: {str(error)[:100]}") from None
