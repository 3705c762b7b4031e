"""A list of images that are not to be used, and the images without them."""

import json
from pathlib import Path

from stopmim.data.images import Images
from stopmim.data.some import Some
from stopmim.errors import DataError, StorageError


def without(images: Images, names: set[str]) -> Some:
    """`images` less those with the given names."""
    return Some(images, [i for i in range(len(images)) if images.name(i) not in names])


def without_skipped(images: Images, file: str | Path | None) -> Images:
    """`images` less those that `file` lists; just `images` if it is None."""
    if file is None:
        return images
    rest = without(images, read_list(Path(file)))
    if len(rest) == len(images):
        raise DataError(f"{file}: names none of the {len(images)} images; is it the right list?")
    if not len(rest):
        raise DataError(f"{file}: names all of the {len(images)} images; none is left")
    return rest


def read_list(file: Path) -> set[str]:
    """The names in a list of JSON lines, as ``{"name": ..., "reason": ...}``."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return {str(json.loads(line)["name"]) for line in lines if line.strip()}
    except OSError as error:
        raise DataError(f"{file}: cannot read this list of images: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f'{file}: not a list of images: expected lines as {{"name": ...}}'
        ) from None


def write_list(file: Path, bad: list[tuple[str, str]]) -> None:
    """A list of (name, reason) that `read_list` and bad_files.jsonl have the form of."""
    text = "".join(json.dumps({"name": name, "reason": why}) + "\n" for name, why in bad)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file}: cannot write the list: {error.strerror}") from None
