"""Every example of docs/extend.md, carried out: its edits made to a copy of the package, and no
others, then its commands run, each in the state the one before left behind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiny import NoiseImages

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
EXAMPLES = {
    title: text
    for title, text in re.findall(r"^## (An? [^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
BLOCK = re.compile(r"^```(python|diff|sh)\n(.*?)^```$", re.M | re.S)
MOST = 40  # lines of an example, commands aside
QUICK = ("A position",)  # whose commands are fast tests
# What a command must say, by its first words; a refusal is a line that names the reason.
SAYS = {
    "A position": {"inspect": "dropped positions", "export": "no place for dropped positions"},
    "A mask sampler": {"report": "one half of the image seen"},
    "An evaluation protocol": {"eval": "centroid", "report": "centroid"},
    "A source of images": {"check": "40 images scanned", "inspect": "48x48 pixels"},
    "A weight format": {"inspect": "NumPy arrays", "eval": "knn"},
    "A target": {"inspect": "I-JEPA of several layers", "report": "I-JEPA of several layers"},
}
RUN = """
import shlex, sys
from stopmim.cli import main
for line in sys.stdin.read().splitlines():
    print("$", line)
    print("exit code", main(shlex.split(line)[1:]), flush=True)
"""


def blocks(example: str, kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(EXAMPLES[example]) if found == kind]


def apply(edit: str, package: Path) -> None:
    """A ``diff`` block: hunks, apart by an empty line, of lines to find, to remove and to add."""
    head, _, hunks = edit.partition("\n")
    path = package / head.removeprefix("# ")
    for hunk in hunks.strip("\n").split("\n\n"):
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        text = path.read_text()
        assert text.count(old) == 1, f"{path.name} has not exactly one:\n{old}"
        path.write_text(text.replace(old, new))


def add(code: str, package: Path) -> None:
    """A ``python`` block: a new file, or a piece of one, by the comment it begins with."""
    head, _, body = code.partition("\n")
    path, _, where = head.removeprefix("# ").partition(", ")
    file = package / path
    if not where:
        file.write_text(body.lstrip("\n"))
        return
    text = file.read_text()
    at = len(text) if where == "at the end" else text.index(f"class {where.split()[-1]}(")
    file.write_text(text[:at] + body.strip("\n") + "\n\n\n" + text[at:])


def extended(example: str, folder: Path) -> Path:
    """A copy of the package in `folder`, with the edits of the example."""
    package = folder / "stopmim"
    shutil.copytree(ROOT / "src" / "stopmim", package)  # what was compiled fits: times are kept
    for block in blocks(example, "python"):
        add(block, package)
    for block in blocks(example, "diff"):
        apply(block, package)
    return package


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short_and_fits_the_files_it_names(example: str, tmp_path: Path) -> None:
    code = [*blocks(example, "python"), *blocks(example, "diff")]
    # The first line of a block names a file and is no code.
    assert sum(len(block.splitlines()) - 1 for block in code) <= MOST
    for file in extended(example, tmp_path).rglob("*.py"):
        compile(file.read_text(), file, "exec")


@pytest.mark.parametrize(
    ("example", "changes"),
    [
        ("A position", {"positions.kind": "dropped", "positions.covariance": "fixed"}),
        ("A mask sampler", {"masking.kind": "halves", "masking.ratio": 0.5}),
        ("A target", {"target": "layers", "norm_pixels": False}),
    ],
)
def test_a_key_that_the_new_kind_ignores_is_refused(
    example: str, changes: dict[str, object], tmp_path: Path
) -> None:
    code = "from stopmim.config import presets, schema\n"
    code += f"schema.override(presets.find_config('tiny_cpu'), {changes})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(extended(example, tmp_path).parent)},
        capture_output=True,
        text=True,
    )
    assert "has no effect" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXAMPLES],
)
def test_an_example_needs_only_the_files_it_names(example: str, tmp_path: Path) -> None:
    package = extended(example, tmp_path / "package")
    (tmp_path / "my_arrays").mkdir()
    for i, image in enumerate(NoiseImages(40).images):
        np.save(tmp_path / "my_arrays" / f"{i}.npy", image)
    commands = [line for block in blocks(example, "sh") for line in block.splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input="\n".join(commands),
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = re.split(r"^\$ stopmim ", done.stdout, flags=re.M)[1:]
    assert len(said) == len(commands) >= 3
    for command, output in zip(commands, said, strict=True):
        word = command.split()[1]
        wanted = SAYS.get(example, {}).get(word, "")
        refused = wanted.startswith("no place")
        assert ("exit code 0" in output) != refused, done.stdout + done.stderr
        if word == "report":
            output = Path(tmp_path, *output.splitlines()[1].split("/")).read_text()
        assert wanted in (done.stderr if refused else output), output
