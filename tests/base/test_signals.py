"""Ctrl-C, with real processes: answered within two seconds at any moment, in one quiet line."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stopmim import Run, pretrain
from stopmim.base.errors import InterruptedRunError
from terminal import CTRL_C, Terminal
from tiny import NoiseImages, assert_same_run, tiny

SOON = 10.0  # seconds: two on a quiet machine, and what is interrupted takes a minute
STOPPED = "stopmim: stopped"
# A call that takes a minute, lets other threads run, and hears of no signal.
LONG_CALL = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**27)"
SCRIPT = "import hashlib; from stopmim.base.signals import answer, signals; answer(); "


def start(*words: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], start_new_session=True, **pipes)


def interrupt(process: "subprocess.Popen[str]") -> tuple[float, str]:
    """Sends SIGINT as a terminal does; returns the seconds until the end, and all of stderr."""
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return time.monotonic() - begin, err


def wait(process: "subprocess.Popen[str]", is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("library", ["_pydantic_core", "libtorch_cpu"])
def test_an_interrupted_import_is_one_line(library: str, tmp_path: Path) -> None:
    """While the command line is imported, and while torch is."""
    process = start("-m", "stopmim", "pretrain", "scenes:64:24", "--out", str(tmp_path / "run"))
    wait(process, lambda: library in Path(f"/proc/{process.pid}/maps").read_text())
    seconds, err = interrupt(process)
    assert process.returncode == 130
    assert err.removeprefix("loading torch ...\n") == f"{STOPPED}\n"
    assert seconds <= SOON
    assert not (tmp_path / "run").exists()


def test_an_interrupt_while_the_answer_is_prepared_is_one_line() -> None:
    hit = "def hit(self): start(self); signal.raise_signal(signal.SIGINT)"
    begin = "import signal, threading; from stopmim.__main__ import run"
    begin += "; start = threading.Thread.start"
    process = start("-c", f"{begin}\n{hit}\nthreading.Thread.start = hit\nrun()")
    assert process.communicate(timeout=60)[1] == f"{STOPPED}\n"
    assert process.returncode == 130


def start_long_call(within: str) -> "subprocess.Popen[str]":
    process = start("-c", f"{SCRIPT}\n{within}: print(end='x', flush=True); {LONG_CALL}")
    assert process.stdout
    process.stdout.read(1)
    time.sleep(0.2)  # until the call has begun
    return process


def test_a_long_call_does_not_delay_the_answer() -> None:
    process = start_long_call("if True")
    seconds, err = interrupt(process)
    assert (process.returncode, err) == (130, f"{STOPPED}\n")
    assert seconds <= SOON


def test_a_loop_says_that_it_finishes_and_the_second_signal_ends_it() -> None:
    process = start_long_call("with signals()")
    assert process.stderr
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)  # as torchrun repeats it: no second one
    assert process.stderr.readline().startswith("stopping: the current step is finished and saved")
    assert time.monotonic() - begin <= SOON
    seconds, err = interrupt(process)
    assert process.returncode == 130
    assert seconds <= SOON
    assert err == f"{STOPPED} at once; the same command continues from the last checkpoint\n"


class Interrupting(NoiseImages):
    """Images whose first reading is interrupted."""

    pressed = False

    def read(self, i: int) -> np.ndarray:
        if not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().read(i)


def test_the_first_update_is_not_waited_for_since_there_is_nothing_to_save(tmp_path: Path) -> None:
    """It may be compiled for minutes. A resumed run has not lost anything either."""
    for updates in (0, 4):
        with pytest.raises(
            InterruptedRunError, match="stopped before an update was made"
        ) as caught:
            pretrain(Interrupting(), tmp_path / "run", tiny())
        assert caught.value.exit_code == 130
        if not updates:
            pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=4)
    whole = pretrain(NoiseImages(), tmp_path / "whole", tiny())
    assert_same_run(pretrain(NoiseImages(), tmp_path / "run", tiny()), whole)


def test_a_signal_during_a_save_that_is_waited_for_ends_the_run_with_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stopmim.gpu.copies.SPARE", 1.0)  # no memory for a copy
    monkeypatch.setenv("STOPMIM_FAULT", "save.model@1:int")
    monkeypatch.setattr("stopmim.base.faults._passed", Counter())
    with pytest.raises(InterruptedRunError, match="saved at step 3"):
        pretrain(NoiseImages(), tmp_path, tiny())
    assert Run(tmp_path).checkpoint.name == "step-00000003"


def test_a_signal_while_a_thread_saves_waits_for_it_and_saves_the_step_it_came_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPMIM_FAULT", "save.model@1:int")
    monkeypatch.setattr("stopmim.base.faults._passed", Counter())
    with pytest.raises(InterruptedRunError) as caught:
        pretrain(NoiseImages(), tmp_path, tiny(runtime={"keep": 9}))
    step = len(Run(tmp_path).metrics)
    assert f"stopped and saved at step {step};" in str(caught.value)  # all that was computed
    assert 3 <= step < 10
    found = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    assert found == sorted({3, step})


# ------------------------------------------------------------------------------ in a terminal


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A run of small and quick updates that would go on for hours."""
    return [
        *("pretrain", "scenes:64:24", "--out", str(tmp_path / "run"), "--preset", "tiny_cpu"),
        *("--arch", "vit_micro4", "--image-size", "24", "--masking.context-length", "10"),
        *("--optim.epochs", "100000", "--optim.batch_size", "32", "--runtime.device", "cpu"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_real_run_in_a_terminal_of_24_lines(columns: int, words: list[str]) -> None:
    with Terminal(words, columns) as terminal:
        terminal.until(lambda: "loss" in terminal.text)
        terminal.until(lambda: "left, until" in terminal.text)
        items = re.split(r" {2,}|\n|pretrain |\u2501 ", terminal.text)
        assert "64 images, ViT-Micro/4 at 24 px (tiny_cpu), 200,000 updates" in terminal.text
        for item in (r"\d+/200000", r"\d+ %", r"[\d:]+ left", r"epoch \d+/100000", r"\d+ img/s"):
            assert any(re.fullmatch(item, x) for x in items), (item, terminal.text)
        assert any(re.fullmatch(r"loss \d\.\d{4}", x) for x in items), terminal.text
        assert ("lr " in terminal.text) == (columns == 120)
        assert_answered(terminal, "stopped and saved at step")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loading torch", STOPPED),
        ("200,000 updates", "stopped before an update was made;"),
        ("loss 0.", "stopped and saved at step"),
    ],
)
def test_a_key_is_answered_at_any_moment(text: str, said: str, words: list[str]) -> None:
    with Terminal(words) as terminal:
        if text == "loading torch":
            maps = Path(f"/proc/{terminal.process.pid}/maps")
            terminal.until(lambda: "libtorch_cpu" in maps.read_text())
        else:
            terminal.until(lambda: text in terminal.text)
        assert_answered(terminal, said)


@pytest.mark.slow
def test_an_evaluation_is_interrupted_while_it_counts(tmp_path: Path) -> None:
    suite = ["eval", "suite", "random:vit_micro8@48", "--data", "scenes:8192:48"]
    with Terminal(suite) as terminal:
        terminal.until(lambda: "features" in terminal.text)
        assert_answered(terminal, STOPPED)


def assert_answered(terminal: Terminal, said: str) -> None:
    begin = time.monotonic()
    terminal.press(CTRL_C)
    assert terminal.end() == 130
    assert time.monotonic() - begin <= SOON
    assert "".join(said.split()) in "".join(terminal.text.split())  # a line may be wrapped
    assert "error" not in terminal.text
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_half_of_a_file_is_never_left(tmp_path: Path, number: signal.Signals) -> None:
    """While features, a report or a shard are written; SIGTERM is what schedulers send."""
    script = f"""
import sys, time
from pathlib import Path
from stopmim import cli
from stopmim.base.files import replaced

def main():
    try:
        with replaced(Path({str(tmp_path / "f.npz")!r})) as temporary:
            print("begun", flush=True)
            time.sleep(60)
    except KeyboardInterrupt:
        from stopmim.base.signals import stopped
        return stopped()

cli.main = main
from stopmim.__main__ import run
run()
"""
    process = start("-c", script)
    assert process.stdout
    assert process.stdout.readline() == "begun\n"
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, f"{STOPPED}\n")
    assert list(tmp_path.iterdir()) == []
