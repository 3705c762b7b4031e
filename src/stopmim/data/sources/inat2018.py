"""iNaturalist 2018: the images that train2018.json or val2018.json lists."""

import os
from pathlib import Path

import numpy as np

from stopmim.base.errors import DataError
from stopmim.data.sources.folder import Files
from stopmim.data.sources.paths import printable
from stopmim.data.sources.source import Source, Split, contains, read_json


def open_inat2018(text: Path | str, split: Split | None = None) -> Files:
    """Label "class": the third part of a path, as in ``train_val2018/Aves/2761/x.jpg``.

    Classes are numbered in the order of these parts, as text, over the training set.
    """
    root = Path(text)
    train = _species(root / "train2018.json")
    paths, labels = train if split != "test" else _species(root / "val2018.json")
    classes = sorted(set(train[1]))
    index = {name: i for i, name in enumerate(classes)}
    if unknown := sorted(set(labels) - set(classes)):
        raise DataError(f"{printable(root)}: class {unknown[0]} is not in train2018.json")
    files = Files(root, paths)
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


INAT2018 = Source(
    "inat2018",
    open_inat2018,
    recognise=lambda text: contains(text, "train2018.json", "val2018.json"),
)
