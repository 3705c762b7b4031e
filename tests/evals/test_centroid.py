"""A new protocol costs one file and one line, and is then part of everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent / "centroid.py"
RANDOM = "random:vit_micro6@24"


def run(out: Path, *words: str) -> str:
    command = [sys.executable, str(FILE), "eval", *words]
    known = os.environ | {"STOPMIM_CACHE": str(out / "cache"), "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=known)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_protocol_is_one_file_of_forty_lines(tmp_path: Path) -> None:
    assert len(FILE.read_text().splitlines()) <= 40
    assert "Label of the nearest class mean." in run(tmp_path, "--help")
    for command in ("centroid", "suite", "compare"):
        assert "norm by which distances are measured" in run(tmp_path, command, "--help")
    images = ["--data", "scenes:48:24", "--label", "count", "--out", str(tmp_path)]
    shown = run(tmp_path, "centroid", RANDOM, *images, "--norm", "1")
    assert "centroid  count" in shown
    assert "norm 1" in shown
    lines = tmp_path / "results.jsonl"
    (line,) = map(json.loads, lines.read_text().splitlines())
    assert (line["protocol"], line["label"], line["train"]) == ("centroid", "count", 48)
    assert line["low"] <= line["value"] == line["random_init"] <= line["high"]
    films = ["--videos", "scenes:1:32", "--video-size", "32"]
    assert "centroid" in run(tmp_path, "suite", RANDOM, *images, "--layers", "last", *films)
    assert "centroid" in (tmp_path / "evaluation.html").read_text()
    assert "centroid" in run(tmp_path, "compare", RANDOM, "random:vit_micro8@24", *images)
