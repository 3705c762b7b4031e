"""`kill -9` at any moment: an evaluation that is started again prints what it would have printed.

What it has in the cache by then was written by the one that was killed.
"""

import os
import random
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from stopmim.base.files import parse_jsonl
from stopmim.cli import main

# Low-shot has a view, and so features, of its own here.
SUITE = "eval suite random:vit_micro6@24 --layers last --per-class 4 --crops clevr_count --seed 1"
QUICK = [*SUITE.split(), "--random-inits", "1"]
FILMS = ["--videos", "scenes:1:32", "--video-size", "32"]
# One attempt after the other: features, numbers, an untrained network's, the file of results.
FEW = "cache.written@2,eval.measured@2,cache.written@4,results.begin,results.end"
ALL = [
    *(f"cache.written@{i}" for i in range(1, 9)),
    *(f"eval.measured@{i}" for i in range(1, 13)),
    *("results.begin", "results.end"),
    *(f"cache.written@{i},cache.written@{j},results.end" for i in (1, 3) for j in (1, 2)),
]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Option that names dark and light images, in two splits."""
    rng, parts = np.random.default_rng(0), dict[str, np.ndarray]()
    for part in ("train", "val"):
        labels = np.arange(40) % 2
        pixels = rng.integers(0, 250, (40, 24, 30, 3)) + labels[:, None, None, None]
        parts |= {f"{part}_images": pixels.astype(np.uint8), f"{part}_labels": labels}
    np.savez(tmp_path / "images.npz", **parts)  # type: ignore[arg-type]
    return ["--data", str(tmp_path / "images.npz")]


def lines(out: Path) -> list[dict[str, object]]:
    """Every line of the file of results, none of them torn."""
    file = out / "results.jsonl"
    found = parse_jsonl(file)
    assert all(line.tree is not None and line.number is not None for line in found)
    return [line.tree for line in found if line.tree is not None]


def attempt(
    words: list[str], out: Path, fault: str | None = None, seconds: float | None = None
) -> tuple[int, str]:
    """Evaluates in a child process with a cache of its own; returns signal and output.

    The child is killed at `fault`, or after some `seconds`, if it has not ended by then.
    """
    out.mkdir(exist_ok=True)
    (out / "output").write_text("")
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.environ["STOPMIM_CACHE"] = str(out / "cache")
            if fault:
                os.environ["STOPMIM_FAULT"] = f"{fault}:kill"
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends in a moment
            with open(out / "output", "w") as sys.stdout:
                code = main([*words, "--out", str(out)])
        finally:
            os._exit(code)
    if seconds is not None:
        end, look = time.monotonic() + seconds, os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < end and os.waitid(os.P_PID, child, look) is None:
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)  # it is not forgotten yet, even if it has ended
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    said = (out / "output").read_text().replace(str(out), "OUT")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, said


def load_modules() -> None:
    """Loads what a child would otherwise load after the fork, in more time than it evaluates."""
    import_module("torch._dynamo")  # L-BFGS imports it
    for module in ("suite", "table", "tracking", "linear", "finetune"):
        import_module(f"stopmim.evals.{module}")


def kill_and_compare(words: list[str], points: list[str], folder: Path) -> None:
    load_modules()
    whole = attempt(words, folder / "whole")
    expected = lines(folder / "whole")
    assert whole[0] == 0
    assert "lowshot" in whole[1]
    for i, chain in enumerate(points):
        out = folder / str(i)
        for fault in chain.split(","):
            died, said = attempt(words, out, fault)
            assert died == signal.SIGKILL, f"{chain}: {fault} was not reached"
            assert not said
            assert lines(out) in ([], expected)  # all of one evaluation, or nothing
        assert attempt(words, out) == whole, chain
        assert lines(out)[-len(expected) :] == expected, chain


def test_an_evaluation_killed_at_any_point_prints_the_same_numbers(
    data: list[str], tmp_path: Path
) -> None:
    kill_and_compare([*QUICK, *data], [FEW], tmp_path)


@pytest.mark.slow
def test_an_evaluation_killed_at_every_point_prints_the_same_numbers(
    data: list[str], tmp_path: Path
) -> None:
    kill_and_compare([*QUICK, *data, *FILMS], ALL, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["suite", "finetune"])
def test_an_evaluation_killed_at_any_moment_prints_the_same_numbers(
    what: str, data: list[str], tmp_path: Path
) -> None:
    """By the clock: ten evaluations, each killed three times before it is left alone."""
    tune = "eval finetune random:vit_micro6@24 --batch-size 8 --epochs 2"
    words = [*([*QUICK, *FILMS] if what == "suite" else tune.split()), *data]
    load_modules()
    begin, whole = time.monotonic(), attempt(words, tmp_path / "whole")
    took, expected = time.monotonic() - begin, lines(tmp_path / "whole")
    assert whole[0] == 0
    chance = random.Random(0)
    for i in range(10):
        out, limit, kills = tmp_path / str(i), took, 0
        while kills < 3:
            died, _ = attempt(words, out, seconds=limit * chance.random())
            kills += died == signal.SIGKILL
            limit *= 1.0 if died else 0.5  # with what is cached it takes less
            assert lines(out) == expected * (len(lines(out)) // len(expected))
        assert attempt(words, out) == whole
        assert lines(out)[-len(expected) :] == expected
