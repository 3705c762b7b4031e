"""Opens the images that a user names: finds the kind of source, and the split."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from stopmim.base.errors import DataError, NoPartError, UserError
from stopmim.base.secrets import hide
from stopmim.data.images import Images
from stopmim.data.remote.attempt import is_url
from stopmim.data.sources.arrays import NPZ
from stopmim.data.sources.cifar import CIFAR100
from stopmim.data.sources.datasets_library import HF, HF_FOLDER
from stopmim.data.sources.folder import AS_ARRAYS, FILE, FOLDER, PICTURES, SPLITS, Folder
from stopmim.data.sources.groups import GROUPS
from stopmim.data.sources.layouts import CLEVR, DAVIS, INAT2018
from stopmim.data.sources.lists import LIST
from stopmim.data.sources.parquet import PARQUET
from stopmim.data.sources.scanning import SUFFIXES
from stopmim.data.sources.scenes import BAND_SCENES, SCENES
from stopmim.data.sources.shards import is_pattern
from stopmim.data.sources.source import Source, Split, printable
from stopmim.data.sources.tar import TAR
from stopmim.data.sources.urls import URL, open_url
from stopmim.data.subset import Selected

# In the order of recognition: known layouts of folders first, any folder last.
SOURCES = [
    *(URL, HF, HF_FOLDER, SCENES, FILE, BAND_SCENES, CLEVR, INAT2018, CIFAR100, DAVIS),
    *(PARQUET, TAR, SPLITS, NPZ, GROUPS, LIST, FOLDER, PICTURES, AS_ARRAYS),
]


def open_images(source: str | Path | Images, split: Split | None = None) -> Images:
    """Opens `source`; docs/data.md has every form. Images are returned unchanged.

    Args:
        source: a folder (plain, or in a known layout), tar shards, Parquet, .npz, a list file,
            FOLDER@LIST, or scenes[:count[:size[:seed]]]. The kind is detected from the name and
            the content, unless a prefix states it, as in ``tar:some/folder``. Before any of them,
            ``channels:0,3,5:`` selects channels, by number or name.
        split: None means all images of a source without splits, otherwise the training images.
    """
    if not isinstance(source, str | Path):
        return source
    wanted, kind, text = _find(os.fspath(source))
    return _selected(kind.open(text, split), wanted)


def open_test(source: str | Path | Images) -> Images | None:
    """Opens the test split of `source`; None if it has none, or only one generated on demand."""
    if not isinstance(source, str | Path):
        return None
    wanted, kind, text = _find(os.fspath(source))
    try:
        return None if kind.generated else _selected(kind.open(text, "test"), wanted)
    except NoPartError:
        return None


def is_generated(source: str) -> bool:
    """Whether the images are made on demand: they can always be made again, in two splits."""
    stated, text = _split_prefix(_split_channels(source)[1])
    return any(kind.generated for kind in SOURCES if kind is stated or kind.name == text)


def keep_outside(out: Path, data: str | Path | Images) -> None:
    """Refuses a new output folder inside the images: its figures would become images.

    Call it before the folder is made: beside train/ and val/, even an empty folder is too many.
    """
    roots = [str(data.root)] if isinstance(data, Folder) else []
    if isinstance(data, str | Path):
        stated, rest = _split_prefix(text := _split_channels(os.fspath(data))[1])
        if not (stated and stated.generated):
            roots = [path for path in (text, rest) if os.path.isdir(path)]
    place = Path(os.path.realpath(out))
    for root in map(os.path.realpath, roots):
        inside = place.relative_to(root).parts if place.is_relative_to(root) else (".",)
        if not any(part.startswith(".") for part in inside):  # a hidden folder is not read
            raise UserError(
                f"{out}: lies in the folder of the images, {printable(root)}, where figures of a "
                f"run would become images; choose another --out"
            )


def source_of(data: str | Path | Images, images: Images) -> str:
    """The name of the images in run.json."""
    named = isinstance(data, str | Path) or type(data).__str__ is not object.__str__
    return hide(str(data)) if named else images.fingerprint


def _selected(images: Images, wanted: list[str]) -> Images:
    return Selected(images, wanted) if wanted else images


def _split_channels(text: str) -> tuple[list[str], str]:
    """The channels that ``channels:0,3,5:`` selects, none if it is missing, and the rest."""
    if not text.startswith("channels:"):
        return [], text
    _, wanted, rest = [*text.split(":", 2), ""][:3]
    channels = [one.strip() for one in wanted.split(",")]
    if not rest or not all(channels) or len({*channels}) < len(channels):
        raise UserError(f"{printable(text)}: expected channels:0,3,5:DATA, each of them once")
    return channels, rest


def _find(text: str) -> tuple[list[str], Source, str]:
    """The selected channels, the kind of the source `text`, and the text without prefixes."""
    channels, text = _split_channels(text)
    text = hide(text)
    stated, rest = _split_prefix(text)
    if stated and is_url(rest):
        return channels, replace(URL, open=partial(open_url, kind=stated.name)), rest
    if stated:
        return channels, stated, rest
    if found := next((source for source in SOURCES if source.matches(text)), None):
        return channels, found, text
    if os.path.isfile(text) or is_pattern(text):
        if os.fsencode(text).lower().endswith(SUFFIXES):
            what = "not a source of images; give the folder that the images are in"
            raise DataError(f"{printable(text)}: {what}")
        suffixes = ", ".join(source.suffix for source in SOURCES if source.suffix)
        raise DataError(
            f"{printable(text)}: not a source of images; give a folder, or a file that ends in "
            f"{suffixes}; docs/data.md has every form"
        )
    raise DataError(f"{printable(text)}: no such folder or file; give a folder of images")


def _split_prefix(text: str) -> tuple[Source | None, str]:
    """The kind that a prefix such as ``tar:`` states, if any, and the rest of the text."""
    word, colon, rest = text.partition(":")
    known = SOURCES if colon and not rest.startswith("//") else []
    stated = next((source for source in known if source.name == word), None)
    return stated, rest if stated else text
