"""`kill -9` at any moment: the run that is started again is the run that was never killed."""

import subprocess
import sys
from pathlib import Path

import pytest

SAVING = ["save.begin", "save.model", "save.synced", "save.renamed"]
FEW = [
    "step.end@5",
    *(f"{name}@{1 + i % 2}" for i, name in enumerate(SAVING)),
    "save.pruned@1",
    "save.renamed@4",  # the run is finished, but has not cleared up
    # a chain: killed at a step, then while saving after the resume, then at the next save
    "step.end@4,save.model@1,save.renamed@1",
]
ALL = [
    *(f"step.end@{i}" for i in range(1, 11)),
    *(f"{name}@{i}" for name in SAVING for i in range(1, 5)),
    *(f"save.pruned@{i}" for i in (1, 2)),
    *(f"step.end@{i},step.end@{j},save.synced@1" for i in (1, 3, 4) for j in (1, 2, 5)),
    *(f"{name}@1,{name}@1,{name}@1" for name in SAVING[:3]),
]


def run_kills(folder: Path, points: list[str]) -> None:
    harness = Path(__file__).parents[1] / "kill.py"
    done = subprocess.run(
        [sys.executable, str(harness), str(folder), *points],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == len(points)


def test_a_run_killed_at_any_point_ends_bit_identical(tmp_path: Path) -> None:
    run_kills(tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_every_point_ends_bit_identical(tmp_path: Path) -> None:
    run_kills(tmp_path, ALL)
