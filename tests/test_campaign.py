"""The campaign notices what it looks for, and passes a few cases of each family."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# Commands that do what none may do, each with a word of the complaint.
PLANTED = """
import mmap, os, subprocess, sys, tempfile, time
from pathlib import Path
from campaign.cases import Family, run_family
from campaign.processes import Limits, Started

def shared_memory():
    Path(f"/dev/shm/torch_{os.getpid()}_planted").touch()

def complaint(*lines):
    for line in lines:
        print(f"stopmim: error: {line}", file=sys.stderr)
    return 4

PLANTED = [
    (lambda: 0, ""),
    (lambda: complaint("one line"), ""),
    (lambda: 1, "code 1"),
    (lambda: os.abort(), "code -6"),
    (lambda: 4, "not one line"),
    (lambda: complaint("a", "b"), "not one line"),
    (lambda: complaint("x" * 5000), "a line of 5016 characters"),
    (lambda: complaint(chr(27) + "[2J"), "control characters"),
    (lambda: 1 / 0, "code 1"),
    (lambda: subprocess.Popen(["sleep", "60"]) and 0, "left behind process"),
    (lambda: tempfile.mkdtemp() and 0, "left behind file"),
    (lambda: shared_memory(), "left behind shared memory torch_"),
    (lambda: time.sleep(60), "took more than 5 s"),
    (lambda: len(bytearray(os.urandom(1)) * (600 << 20)) and time.sleep(3), "MiB"),
]

def case(case):
    job, word = PLANTED[case.number]
    seconds = 5 if word.startswith("took") else 60  # a busy machine takes its time
    started = Started(job, case.folder / "command", Limits(seconds, memory=400 << 20))
    case.judge(started.finish())

from campaign import processes
processes.GRACE = 0.5
family, numbers = Family("planted", "", 1, 1, case), range(len(PLANTED))
outcome = run_family(family, numbers, seed=0, jobs=2, root=Path(sys.argv[1]))
for number, (_, word) in enumerate(PLANTED):
    problem = outcome.failures.get(number, "")
    assert word in problem and bool(word) == bool(problem), (number, word, problem)
for path in Path("/dev/shm").glob("torch_*_planted"):
    path.unlink()
print(len(outcome.failures), "noticed")
"""


def test_what_no_command_may_do_is_noticed(tmp_path: Path) -> None:
    done = python("-c", PLANTED, str(tmp_path))
    assert done.stdout == "12 noticed\n", done.stdout + done.stderr


def campaign(folder: Path, *words: str) -> dict[str, Any]:
    """The record of a campaign."""
    done = python("-m", "campaign", *words, "--json", str(folder / "record.json"))
    assert (folder / "record.json").exists(), done.stderr
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    failures = {one["family"]: one["failures"] for one in record["outcomes"]}
    assert done.returncode == any(failures.values()), done.stdout
    return record


@pytest.mark.slow
def test_a_few_cases_of_the_quick_families_pass(tmp_path: Path) -> None:
    record = campaign(tmp_path, "checkpoints", "configs", "storage", "--count", "3")
    assert [one["cases"] for one in record["outcomes"]] == [3, 3, 3]
    assert [one["failures"] for one in record["outcomes"]] == [{}, {}, {}]
    resumed, configs, _ = (one["counts"] for one in record["outcomes"])
    assert resumed["exact"] + resumed.get("refused", 0) == 3
    assert configs["commands"] == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_some_cases_of_every_family_pass(tmp_path: Path) -> None:
    from campaign.__main__ import FAMILIES

    record = campaign(tmp_path, "--count", "12", "--seed", "1")
    assert [one["family"] for one in record["outcomes"]] == list(FAMILIES)
    assert {one["family"]: one["failures"] for one in record["outcomes"] if one["failures"]} == {}


@pytest.mark.slow
def test_a_page_gets_the_table_of_one_or_more_campaigns(tmp_path: Path) -> None:
    page, records = tmp_path / "page.md", [str(tmp_path / f"{i}.json") for i in range(2)]
    page.write_text("# A\n\n<!-- campaign -->\nold\n<!-- end -->\n\nB\n")
    code = (
        "import sys\nfrom pathlib import Path\nfrom campaign.cases import Outcome\n"
        "from campaign.record import record, write_json\n"
        "for i, path in enumerate(sys.argv[1:]):\n"
        "    one = Outcome('kills', 'nothing is lost', 1000, 61.0, {5 + i: 'lost'})\n"
        "    one.counts.update(kills=310)\n"
        "    write_json(record([one], 'abc', 7), Path(path))"
    )
    assert python("-c", code, *records).returncode == 0
    done = python("-m", "campaign", "--records", *records, "--page", str(page))
    assert done.returncode == 1, done.stderr  # there are failures
    text = page.read_text()
    assert text.startswith("# A\n\n<!-- campaign -->\n")
    assert text.endswith("<!-- end -->\n\nB\n")
    assert "old" not in text
    assert "seed 7, stopmim" in text
    assert "at commit `abc`" in text
    assert "Below the long form: `checkpoints`, `run_files`" in text
    assert "| `kills` | nothing is lost | 2,000 | 320 | 2 | 2:02 | 620 kills |" in text
