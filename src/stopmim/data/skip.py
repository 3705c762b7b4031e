"""Lists of images to skip, such as broken ones.

A line is ``{"name": ..., "reason": ...}``, with ``"part": "test"`` for an image of the test split:
train/cat/1.jpg and val/cat/1.jpg have the same name.
"""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from stopmim.base.errors import DataError, StorageError, UserError
from stopmim.base.files import read_regular, write_whole
from stopmim.data.images import Images
from stopmim.data.subset import Subset

_START = '{"name": "'  # of every line that `write_list` writes

Bad = list[tuple[str, str]]  # names and reasons


def without(images: Images, names: set[str]) -> Subset:
    """The images that do not have one of these names."""
    return Subset(images, [i for i in range(len(images)) if images.name(i) not in names])


def without_skipped(images: Images, file: str | Path | None) -> Images:
    """Training images without those that `file` lists; all of them if it is None."""
    names = read_list(Path(file)) if file is not None else set[str]()
    # Empty: there is no list, or it is of test images only.
    return _without(str(file), [(images, names)])[0] if names else images


def both_without_skipped(
    train: Images, test: Images, file: str | Path | None
) -> tuple[Images, Images]:
    """Training and test images without those that `file` lists.

    An entry without a part names an image of `train`, or of `test` if `train` has none so named.
    """
    if file is None:
        return train, test
    names = read_list(Path(file))
    fitted = names & {train.name(i) for i in range(len(train))}
    tested = (names - fitted) | read_list(Path(file), "test")
    train, test = _without(str(file), [(train, fitted), (test, tested)])
    return train, test


def _without(file: str, parts: list[tuple[Images, set[str]]]) -> list[Images]:
    rest = list[Images]()
    for images, names in parts:
        left = without(images, names)
        if not len(left):
            raise DataError(f"{file}: names all of the {len(images)} images; none is left")
        # A part that loses nothing keeps its own fingerprint.
        rest.append(left if len(left) < len(images) else images)
    total = sum(len(images) for images, _ in parts)
    if any(names for _, names in parts) and sum(map(len, rest)) == total:
        raise DataError(f"{file}: names none of the {total} images; is it the right list?")
    return rest


def read_list(file: Path, part: str = "train") -> set[str]:
    """Names of `part` in a list of JSON lines; a line without a part counts as train.

    Ignores a line that a full disk or a kill has cut short.
    """
    try:
        text = read_regular(file).decode()
        lines = [_parse(line) for line in text.splitlines() if line.strip()]
        return {str(line["name"]) for line in lines if line and line.get("part", "train") == part}
    except OSError as error:
        raise DataError(f"{file}: cannot read this list of images: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        reason = 'not a list of images: expected lines like {"name": ...}'
        raise DataError(f"{file}: {reason}") from None


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        if line.startswith(_START) or _START.startswith(line):
            return None  # cut short
        raise


def check_writable(file: Path) -> None:
    """Raises an error if `write_list` could not write this file, or `data.skip` not accept it."""
    if file.suffix != ".jsonl":
        raise UserError(f"{file}: the name of a list of images must end in .jsonl")
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise StorageError(f"{file}: cannot write the list: {error.strerror}") from None


def write_list(file: Path, bad: Bad, test_bad: Bad) -> None:
    """Writes the broken training and test images, for `read_list`."""
    lines = [{"name": name, "reason": why} for name, why in bad]
    lines += [{"name": name, "reason": why, "part": "test"} for name, why in test_bad]
    write_whole(file, "".join(json.dumps(line) + "\n" for line in lines))
