"""A list of images that are not to be used, and the images without them."""

import hashlib
import json
from pathlib import Path

import numpy as np

from stopmim.data.images import Chunked, Images
from stopmim.errors import DataError, StorageError


class Without:
    """`images` less those with the given names, numbered anew; with a fingerprint of its own."""

    def __init__(self, images: Images, names: set[str]) -> None:
        skipped = [i for i in range(len(images)) if images.name(i) in names]
        self.images, self.skipped = images, len(skipped)
        self.kept = np.delete(np.arange(len(images)), skipped)
        self.labels = {name: label[self.kept] for name, label in images.labels.items()}
        if isinstance(images, Chunked):  # what is left of a chunk still lies side by side
            self.chunks = np.searchsorted(self.kept, images.chunks)
            self.window = images.window
        digest = hashlib.sha256(images.fingerprint.encode())
        digest.update(np.array(skipped, "<i8").tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, i: int) -> np.ndarray:
        return self.images.read(int(self.kept[i]))

    def name(self, i: int) -> str:
        return self.images.name(int(self.kept[i]))


def without_skipped(images: Images, file: str | Path | None) -> Images:
    """`images` less those that `file` lists; just `images` if it is None."""
    if file is None:
        return images
    rest = Without(images, read_list(Path(file)))
    if not rest.skipped:
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
