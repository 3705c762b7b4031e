"""`kill -9` at any moment: the run that is started again is the run that was never killed."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from kill import SAVING

FEW = [
    "slow:step.end@5",  # the checkpoint of step 3 is being written
    *("save.copied@2", "save.synced@1", "save.pruned@1"),
    "save.renamed@4",  # the run is finished, but has not cleared up
    # a chain: killed at a step, then while saving after the resume, then at the next save
    "step.end@4,save.model@1,save.renamed@1",
]
RANDOM = random.Random(0)
ALL = [
    *(f"step.end@{i}" for i in range(1, 11)),
    *(f"slow:step.end@{i}" for i in range(1, 11)),
    *(f"{name}@{i}" for name in SAVING for i in range(1, 5)),
    *(f"slow:{name}@{i}" for name in SAVING for i in (1, 2)),
    *(f"save.pruned@{i}" for i in (1, 2)),
    *(f"step.end@{i},step.end@{j},save.synced@1" for i in (1, 3, 4) for j in (1, 2, 5)),
    *(f"slow:step.end@{i},slow:step.end@{j},save.moved@1" for i in (4, 5) for j in (4, 7)),
    *(f"{name}@1,{name}@1,{name}@1" for name in SAVING[:7]),
    *(f"after@{RANDOM.uniform(0.1, 2):.3f},after@{RANDOM.uniform(0.1, 2):.3f}" for _ in range(30)),
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
@pytest.mark.timeout(1800)
def test_a_run_killed_at_every_point_ends_bit_identical(tmp_path: Path) -> None:
    run_kills(tmp_path, ALL)
