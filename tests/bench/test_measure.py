"""benchmarks/measure.sh runs commands that exist, each once, and says which have failed."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stopmim.bench.step import _pair
from stopmim.cli.run import parse
from stopmim.method.build import configure

ROOT = Path(__file__).parents[2]
MARK = "pytest.mark." + "gpu"
# In place of Python: writes down what it is asked to run, and fails for one command.
STAND_IN = """#!/usr/bin/env python3
import shlex, sys
with open({log!r}, "a") as log:
    print(shlex.join(sys.argv[1:]), file=log)
print("as asked")
sys.exit("saving" in sys.argv)
"""


def measure(folder: Path, *stages: str) -> tuple[int, list[list[str]]]:
    """Exit code of the script, and the commands that it ran."""
    folder.parent.mkdir(exist_ok=True)
    log, stand_in = folder.parent / "log.txt", folder.parent / "python"
    stand_in.write_text(STAND_IN.format(log=str(log)))
    stand_in.chmod(0o755)
    log.write_text("")
    script = [str(ROOT / "benchmarks" / "measure.sh"), str(folder), *stages]
    env = os.environ | {"PYTHON": str(stand_in)}
    ended = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
    return ended.returncode, [shlex.split(line) for line in log.read_text().splitlines()]


def test_every_stage_is_of_commands_that_exist(tmp_path: Path) -> None:
    _, commands = measure(tmp_path / "figures")
    benches = [words[2:] for words in commands if words[:2] == ["-m", "stopmim"]]
    assert {words[1] for words in benches} == {"step", "kernels", "run", "evals", "saving"}
    for words in benches:
        asked: Any = parse(words)
        if hasattr(asked.what, "preset"):
            config = configure(asked.what.preset, asked.changes)
            for text in getattr(asked.what, "versus", ()):
                configure(config, _pair(text))
    (tests,) = [words for words in commands if "pytest" in words]
    places = [Path(word).resolve() for word in tests if "/" in word]
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if MARK in p.read_text()]
    for path in marked:
        assert any(path.is_relative_to(place) for place in places), path
    assert len(marked) == len(places)


def test_what_ended_well_is_not_repeated_and_what_failed_is(tmp_path: Path) -> None:
    folder = tmp_path / "my figures"
    code, first = measure(folder, "kernels", "saving")
    assert code == 1
    assert [words[3] for words in first] == ["kernels", "saving"]
    assert first[0][-2:] == ["--out", str(folder)]
    said = (folder / "measure.log").read_text()
    assert said.count("as asked") == 2
    assert "failed: saving" in said
    code, second = measure(folder, "kernels", "saving")
    assert second == first[1:]
    code, third = measure(folder, "kernels")
    assert (code, third) == (0, [])


@pytest.mark.parametrize("stages", [["kernel"], ["kernels", "--help"]])
def test_a_stage_that_does_not_exist_is_refused_before_any_is_run(
    tmp_path: Path, stages: list[str]
) -> None:
    assert measure(tmp_path / "figures", *stages) == (2, [])
