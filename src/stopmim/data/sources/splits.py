"""A folder with train/ and val/ (or validation/, or test/), as ImageNet and Places205 have."""

import os
from pathlib import Path

from stopmim.data.sources.folder import Folder, class_folders, subfolders
from stopmim.data.sources.source import Source, Split

TEST_NAMES = ("val", "validation", "test")  # of the folder or the files to test on, best first


def has_splits(root: Path | str) -> bool:
    """Whether `root` holds train/ and at least one of `TEST_NAMES`, and no other folder."""
    if not os.path.isdir(Path(root, "train")):
        return False  # without listing a folder of a million files
    folders = {os.fsdecode(name) for name in subfolders(os.fsencode(root))}
    return "train" in folders and len(folders) > 1 and folders <= {"train", *TEST_NAMES}


def split_folder(root: Path | str, split: Split | None) -> Path:
    """The folder of one split of `root`."""
    names = TEST_NAMES if split == "test" else ("train",)
    folders = [Path(root, name) for name in names]
    return next((folder for folder in folders if os.path.isdir(folder)), folders[0])


def open_split(root: Path | str, split: Split | None) -> Folder:
    """Opens one split; in all splits classes are numbered by the folders of train/."""
    classes = class_folders(Path(root, "train")) if split == "test" else ()
    return Folder(split_folder(root, split), classes)


SPLITS = Source("splits", open_split, recognise=has_splits)
