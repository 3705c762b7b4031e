"""Hostile files of every kind through the commands that read them: see hostile_files.py."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile_files import CANARY, COMMANDS, Commands, every, prepare, problems

# One file, and the command that once took gigabytes, minutes, or an exit code of 1 with it. Files
# of weights have a test of their own.
FAILED_ONCE = {
    "run with weights of 64 GB of holes": "inspect",
    "images with 400 scans.jpg": "features",
    "arrays of 2 ** 40 pixels": "check",
    "an array of DICOM that is rescaled": "check",
    "an array of floats of 64 bits": "check",
    "npz of a shape of 30 digits.npz": "check",
    "npz encrypted.npz": "check",
    "npz of unknown method.npz": "check",
    "npz of damaged LZMA.npz": "check",
    "table of the same column twice.parquet": "check",
    "table of deep metadata.parquet": "check",
    "table of one image for all rows.parquet": "check",
    "table that lies about a dictionary.parquet": "check",
    "shard of records.tar": "check",
    "list endless.txt": "check",
    "inat of a surrogate": "check",
    "clevr of infinite depth": "check",
    "cifar of marks": "check",
    "cifar of keys of tuples": "check",
    "videos in a list of bytes": "tracking",
    "videos with a mask of another size": "tracking",
    "videos with as many objects as pixels": "tracking",
    "videos of long frames": "tracking",
    "skip list in a pipe.jsonl": "features",
    "preset of 120,000 keys.yaml": "dry run",
    "preset of digits.yaml": "dry run",
    "preset of keys of lines.yaml": "dry run",
    "preset that is endless.yaml": "dry run",
    "table of rows of long names.yaml": "ablate",
    "table of a date.yaml": "ablate",
    "table that is a pipe.yaml": "ablate",
    "records of nested lists": "page",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    prepare(root)
    return root


@pytest.fixture(scope="module")
def commands(root: Path) -> Iterator[Commands]:
    with Commands(root) as commands:
        yield commands


def test_there_are_hundreds_of_each_and_all_have_names_of_their_own() -> None:
    kinds = Counter(one.kind for one in every())
    assert kinds.keys() == COMMANDS.keys()
    assert len({one.name for one in every()}) == len(every()) >= 400


@pytest.mark.parametrize("name", FAILED_ONCE)
def test_what_failed_once_costs_one_line(name: str, root: Path, commands: Commands) -> None:
    [one] = [one for one in every() if one.name == name]
    answer = commands.run(one.commands(one.at(root))[FAILED_ONCE[name]])
    assert problems(one, answer) == [], answer
    assert not (root / CANARY).exists()


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", COMMANDS)
def test_every_hostile_file_costs_every_command_one_line(
    kind: str, root: Path, commands: Commands
) -> None:
    found = {}
    for one in (one for one in every() if one.kind == kind and one.name not in FAILED_ONCE):
        for name, words in one.commands(one.at(root)).items():
            if wrong := problems(one, answer := commands.run(words)):
                found[one.name[:80], name] = wrong, answer.err[-300:]
    assert found == {}
    assert not (root / CANARY).exists()
