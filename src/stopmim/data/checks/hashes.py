"""Compares the content of images, all or a sample, with what was recorded earlier.

A fingerprint covers names and sizes. A file overwritten by another of the same size keeps it, and
would change a run that is resumed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stopmim.base.console import busy
from stopmim.base.errors import DataError
from stopmim.base.files import checked, parse_jsonl, read_regular, write_whole
from stopmim.data.checks.facts import Facts
from stopmim.data.images import Images
from stopmim.data.loading import Reader
from stopmim.data.remote.ahead import is_summed

NAME = "hashes.jsonl"
CHUNK = 8  # images per answer of a worker


def digests(reader: Reader, numbers: Sequence[int]) -> dict[int, str]:
    """Hashes of these images: of their files or else of their pixels; skips unreadable ones.

    Empty for remote shards, which have checksums of their own and would have to be fetched.
    """
    if is_summed(reader.images):
        return {}
    chunks = [list(numbers[i : i + CHUNK]) for i in range(0, len(numbers), CHUNK)]
    found = dict[int, str]()
    with busy("comparing images with those of the first start"):
        for facts in reader.facts(chunks):
            found |= _of(facts)
    return found


def _of(facts: Facts) -> dict[int, str]:
    # numpy drops zeros at the end of a byte string.
    hexes = [digest.ljust(16, b"\0").hex() for digest in facts.rows["digest"].tolist()]
    return dict(zip(facts.rows["number"].tolist(), hexes, strict=True))


class Comparison(NamedTuple):
    """Result of comparing all images; `problem` is "" if they are as recorded."""

    said: str  # for people
    problem: str = ""


def compare_content(images: Images, facts: Facts, where: Path) -> Comparison:
    """Compares images with the hashes in `where`, a run or a .jsonl file; records them at first.

    Before the first record of a run, the sample in its run.json is compared.
    """
    file = where / NAME if where.is_dir() else where
    found = {images.name(i): digest for i, digest in _of(facts).items()}
    if not file.exists():
        if changed := _changed(_sample(where, images), found):
            return _differ(changed, len(found), where / "run.json")
        if len(found) + len(facts.bad) < len(images):
            return Comparison(f"not recorded in {file}: that needs all images, without --limit")
        lines = ({"name": name, "sha256": digest} for name, digest in found.items())
        write_whole(file, "".join(checked(line, i) for i, line in enumerate(lines)))
        return Comparison(f"recorded the content of {len(found):,} images in {file}")
    known = _known(file)
    names = {images.name(i) for i in range(len(images))}
    if gone := [name for name in known if name not in names]:
        what = f"{len(gone)} of {len(known)} images in {file} are gone, such as {gone[0]}"
        return Comparison(what, what)
    if changed := _changed(known, found):
        return _differ(changed, len(found), file)
    new = len(found.keys() - known.keys())
    more = f"; {new:,} are not in it" if new else ""
    return Comparison(f"{len(found) - new:,} images are as recorded in {file}{more}")


def _changed(known: dict[str, str], found: dict[str, str]) -> list[str]:
    return [name for name, digest in found.items() if known.get(name, digest) != digest]


def _differ(changed: list[str], total: int, file: Path) -> Comparison:
    what = f"{len(changed)} of {total} images differ in content from {file}"
    return Comparison(f"{what}: {', '.join(changed[:5])}", f"{what}, such as {changed[0]}")


def _known(file: Path) -> dict[str, str]:
    """The hashes in a file that `compare_content` has written; every line must be intact."""
    known = {}
    for line in parse_jsonl(file):
        match line.tree:
            case {"name": str(name), "sha256": str(digest)}:
                known[name] = digest
            case _:
                what = "a damaged line; remove the file to record the images as they are now"
                raise DataError(f"{file}: {what}")
    return known


def _sample(run: Path, images: Images) -> dict[str, str]:
    """The hashes in run.json, by name of the image; {} where there are none."""
    try:
        sample = json.loads(read_regular(run / "run.json"))["data"]["sample"]
        return {images.name(int(i)): str(x) for i, x in sample.items() if int(i) < len(images)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
