"""iNaturalist 2018: the images that train2018.json or val2018.json lists."""

import os
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.folder import Files
from stopmim.data.sources.source import Source, Split, contains, printable, read_json

LISTS = ("train2018.json", "val2018.json")


def _open(text: str, split: Split | None) -> Files:
    """Label "class": the third part of a path, as in ``train_val2018/Aves/2761/x.jpg``.

    Classes are numbered in the order of these parts, as text, over the training set.
    """
    train = _species(Path(text, LISTS[0]))
    paths, labels = train if split != "test" else _species(Path(text, LISTS[1]))
    classes = sorted(set(train[1]))
    index = {name: i for i, name in enumerate(classes)}
    if unknown := sorted(set(labels) - set(classes)):
        raise DataError(f"{printable(text)}: class {unknown[0]} is not in {LISTS[0]}")
    files = Files(text, paths)
    files.classes = [printable(name) for name in classes]
    files.labels = {"class": np.array([index[name] for name in labels], np.int64)}
    return files


def _species(path: Path) -> tuple[list[bytes], list[str]]:
    content = read_json(path)
    try:
        paths = [str(image["file_name"]) for image in content["images"]]
        return [os.fsencode(path) for path in paths], [path.split("/")[2] for path in paths]
    except (KeyError, TypeError, IndexError):
        raise DataError(
            f"{printable(path)}: not a list of iNaturalist 2018; expected images with a file_name "
            f"like train_val2018/Aves/2761/x.jpg"
        ) from None


INAT2018 = Source("inat2018", _open, recognise=lambda text: contains(text, *LISTS))
