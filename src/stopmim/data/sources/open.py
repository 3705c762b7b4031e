"""From what a user types to images: which kind of source it is, and which of its splits."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stopmim.base.errors import DataError, NoPartError, UserError
from stopmim.data.images import Images
from stopmim.data.sources.arrays import npz
from stopmim.data.sources.cifar import cifar100, is_cifar100
from stopmim.data.sources.folder import Folder, holds_images, printable
from stopmim.data.sources.layouts import (
    TEST_NAMES,
    clevr,
    has_splits,
    inat2018,
    split_folder,
    split_of_folder,
)
from stopmim.data.sources.lists import listed
from stopmim.data.sources.parquet import Parquet
from stopmim.data.sources.scenes import Scenes
from stopmim.data.sources.tar import Tar

Split = Literal["train", "test"]

KINDS = (
    "folder",
    "splits",
    "davis",
    "list",
    "tar",
    "parquet",
    "npz",
    "cifar100",
    "inat2018",
    "clevr",
)
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.lz4")
MAX_FILES = 1_000_000  # that a pattern may stand for

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
# A word of a file's name, as in train-00000-of-00004.parquet or imagenet1k-validation-00.tar.
_SPLIT = re.compile(rf"(?:^|[-_.])(train|{'|'.join(TEST_NAMES)})(?=[-_.]|\d)")


def open_images(source: str | Path | Images, split: Split | None = None) -> Images:
    """The images of `source`; docs/data.md has every form.

    Args:
        source: a folder (plain, or in a known layout), tar shards, Parquet, .npz, a list file,
            FOLDER@LIST, or scenes[:count[:size[:seed]]]. What it is is found out by looking; a
            prefix, as in ``tar:some/folder``, decides. Images are returned as they are.
        split: None takes all images of a source without splits, and else those to train on.
            The test split of scenes has the seed plus one.
    """
    if not isinstance(source, str | Path):
        return source
    text = os.fspath(source)
    kind, colon, rest = text.partition(":")
    if kind == "scenes":
        return _scenes(text, split)
    if not (colon and kind in KINDS):
        kind, rest = _kind(text), text
    root = Path(rest)
    match kind:
        case "splits":
            return split_of_folder(root, split)
        case "list":
            return _list(rest, split)
        case "tar":
            return Tar(_files(rest, ".tar", split))
        case "parquet":
            return Parquet(_files(rest, ".parquet", split))
        case "npz":
            return npz(root, split)
        case "cifar100":
            return cifar100(root, split)
        case "inat2018":
            return inat2018(root, split)
        case "clevr":
            return clevr(root, split)
    if split is not None:
        raise _no_split(rest, split)
    if kind == "davis":
        frames = root / "JPEGImages"
        return Folder(frames / "480p" if (frames / "480p").is_dir() else frames)
    return Folder(root)


def open_test(source: str | Path | Images) -> Images | None:
    """The images that lie in the test split of `source`, or None.

    Scenes have none of their own: those to test on are drawn when they are asked for.
    """
    if not isinstance(source, str | Path) or os.fspath(source).split(":")[0] == "scenes":
        return None
    try:
        return open_images(source, "test")
    except NoPartError:
        return None


def keep_outside(out: Path, data: str | Path | Images) -> None:
    """Refuses a new place to write to below the images: figures there would become images.

    To be asked before it is made: beside train/ and val/ an empty folder is one too many.
    """
    named = [os.fspath(data)] if isinstance(data, str | Path) else []
    named += [text.partition(":")[2] for text in named if text.partition(":")[0] in KINDS]
    roots = [data.root] if isinstance(data, Folder) else [p for p in named if os.path.isdir(p)]
    place = Path(os.path.realpath(out))
    for root in map(os.path.realpath, roots):
        if not place.is_relative_to(root):
            continue
        if not any(part.startswith(".") for part in place.relative_to(root).parts):  # hidden
            raise UserError(
                f"{out}: lies in the folder of the images, {printable(root)}, where figures of a "
                f"run would become images; choose another --out"
            )


def source_of(data: str | Path | Images, images: Images) -> str:
    """What run.json says the images came from."""
    named = isinstance(data, str | Path) or type(data).__str__ is not object.__str__
    return str(data) if named else images.fingerprint


def _kind(text: str) -> str:
    """What lies at `text`, by name and content."""
    if text.lower().endswith(COMPRESSED):
        raise DataError(
            f"{printable(text)}: a compressed tar cannot be read from the middle, and images are "
            f"compressed already; decompress it"
        )
    suffix = os.path.splitext(text)[1].lower()
    is_pattern = not os.path.exists(text) and re.search(r"[*?\[{]", text)
    if os.path.isfile(text) or is_pattern:
        kinds = {".tar": "tar", ".parquet": "parquet", ".npz": "npz", ".txt": "list"}
        if suffix in kinds and not (is_pattern and suffix in (".npz", ".txt")):
            return kinds[suffix]
        raise DataError(
            f"{printable(text)}: not a source of images; looked for a folder, .tar, .parquet, "
            f".npz or a list .txt; one of {', '.join(KINDS)} and a colon in front says what it is"
        )
    if not os.path.exists(text) and "@" in text:
        return "list"
    if not os.path.isdir(text):
        raise DataError(f"{printable(text)}: no such folder or file; give a folder of images")
    return _kind_of_folder(Path(text))


def _kind_of_folder(root: Path) -> str:
    def has(name: str) -> bool:
        return os.path.exists(root / name)

    if has("scenes/CLEVR_train_scenes.json") or has("scenes/CLEVR_val_scenes.json"):
        return "clevr"
    if has("train2018.json") or has("val2018.json"):
        return "inat2018"
    if is_cifar100(root):
        return "cifar100"
    if os.path.isdir(root / "JPEGImages"):
        return "davis"
    if has_splits(root):
        shards = _kind_of_folder(root / "train")
        return shards if shards in ("tar", "parquet") else "splits"
    # Beside images a .tar or .parquet is something else: a backup, a table of metadata.
    for kind in ("parquet", "tar"):
        if _in_folder(root, f".{kind}") and not holds_images(root):
            return kind
    return "folder"


def _in_folder(root: Path, suffix: str) -> list[str]:
    """Files of `root` that end in `suffix`, or of data/ in it, where the Hub has Parquet."""
    for folder in [root, root / "data"] if suffix == ".parquet" else [root]:
        try:
            names = [n for n in os.listdir(folder) if n.lower().endswith(suffix) and n[0] != "."]
        except OSError:
            continue
        if found := [os.path.join(folder, n) for n in names if os.path.isfile(folder / n)]:
            return sorted(found)
    return []


def _files(text: str, suffix: str, split: Split | None) -> list[str]:
    """The files of one split that a folder, a file, a glob or a brace list stands for."""
    if os.path.isdir(text):
        root, found = Path(text), _in_folder(Path(text), suffix)
        if not found and has_splits(root):  # train/*.tar, val/*.tar
            return _files(str(split_folder(root, split)), suffix, None)
    elif os.path.exists(text):
        found = [text]
    else:
        found = expand(text)
    if not found:
        raise DataError(f"{printable(text)}: no file that ends in {suffix}")
    return _of_split(text, found, split)


def _of_split(text: str, files: Sequence[str], split: Split | None) -> list[str]:
    """Those of `files` that a word in their names puts in the split."""
    by_word: dict[str, list[str]] = {}
    for file in files:
        found = _SPLIT.findall(os.path.basename(file))
        by_word.setdefault(found[-1] if found else "", []).append(file)
    for word in TEST_NAMES if split == "test" else ("train",):
        if word in by_word:
            return by_word[word]
    if split is not None:
        raise _no_split(text, split)
    return list(files)


def expand(pattern: str) -> list[str]:
    """What a pattern stands for: first ``{000..146}`` and ``{a,b}``, then ``*`` and ``?``.

    What braces name must be there; what a glob finds is sorted.
    """
    names = [pattern]
    while found := _BRACES.search(names[0]):
        choices: Sequence[str | int] = found[1].split(",")
        width = 0
        if ends := _RANGE.fullmatch(found[1]):
            choices = range(int(ends[1]), int(ends[2]) + 1)
            width = len(ends[1]) if ends[1].startswith("0") else 0
        if not 0 < len(names) * len(choices) <= MAX_FILES:
            raise DataError(f"{printable(pattern)}: stands for none or over {MAX_FILES} files")
        names = [
            f"{head}{str(choice).zfill(width)}{tail}"
            for name in names
            for head, _, tail in [name.partition(found[0])]
            for choice in choices
        ]
    files, missing = list[str](), list[str]()
    for name in names:
        here = sorted(glob.glob(name)) if glob.has_magic(name) else [name] * os.path.exists(name)
        files += here
        missing += [] if here else [name]
    if missing:
        raise DataError(
            f"{printable(pattern)}: {len(missing)} of {len(names)} names lead to no file, first "
            f"{printable(missing[0])}"
        )
    return list(dict.fromkeys(files))


def _list(text: str, split: Split | None) -> Images:
    """FOLDER@LIST, or a list alone. A list picks from the split to train on, not to test on."""
    folder, at, path = text.rpartition("@")
    if not at or os.path.exists(text):
        if split is not None:
            raise _no_split(text, split)
        return listed(text)
    root = Path(folder)
    if root.is_dir() and has_splits(root):
        return split_of_folder(root, split) if split == "test" else listed(path, root / "train")
    if split is not None:
        raise _no_split(text, split)
    return listed(path, root)


def _scenes(text: str, split: Split | None) -> Scenes:
    count, size, seed = parse_scenes(text)
    return Scenes(count, size, seed + (split == "test"))


def parse_scenes(text: str) -> tuple[int, int, int]:
    """Count, size and seed of ``scenes[:count[:size[:seed]]]``, without rendering any."""
    _, *numbers = text.split(":")
    if not all(map(str.isdecimal, numbers)) or 0 in map(int, numbers[:2]) or len(numbers) > 3:
        raise UserError(f"{text}: expected scenes[:count[:size[:seed]]], as scenes:10000:64")
    count, size, seed = [int(n) for n in numbers] + [8192, 64, 0][len(numbers) :]
    return count, size, seed


def _no_split(text: str, split: Split) -> NoPartError:
    return NoPartError(
        f"{printable(text)}: no {split} split in this source; looked for train/ and val/, or for "
        f"these words in the names of files; eval --hold-out 0.2 makes one"
    )
