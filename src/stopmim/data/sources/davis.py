"""The frames of DAVIS as single images: those of 480p, if there are several sizes."""

import os

from stopmim.data.sources.folder import Folder
from stopmim.data.sources.source import Source, Split, contains, no_split


def _open(text: str, split: Split | None) -> Folder:
    if split is not None:
        raise no_split(text, split)
    frames = os.path.join(text, "JPEGImages")
    return Folder(os.path.join(frames, "480p") if contains(frames, "480p") else frames)


DAVIS = Source("davis", _open, recognise=lambda text: contains(text, "JPEGImages/"))
