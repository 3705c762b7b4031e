"""The campaign notices faults that are there, repeats a case, and passes a few of each family."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def campaign(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "campaign", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
