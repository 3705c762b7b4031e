"""The batch script does what it says, with stand-ins for the commands of SLURM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stopmim.cli.options import split_changes
from stopmim.cli.run import main, parse

WORDS = ["pretrain", "my images", "--preset", "tiny_cpu", "--optim.ema", "0.9", "1"]

# One task after the other is started, each in the background, as srun does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> "$NOTES/srun"; shift; done
for i in 0 1 2 3; do SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) "$@" & done
code=0
for job in $(jobs -p); do wait $job || code=$?; done
exit $code
"""
PYTHON = """#!/bin/bash
trap 'exit 143' TERM
echo $$ >> "$NOTES/pids"
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT" >> "$NOTES/ranks"
printf '%s\\n' "$@" > "$NOTES/words$RANK"
if [ "$FOREVER" ]; then while true; do sleep 0.1; done; fi
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$NOTES/scontrol"
if [ "$2" = hostnames ]; then echo node7; echo node8; fi
if [ "$2" = job ]; then echo "$JOB"; fi
"""
SCANCEL = """#!/bin/bash
echo "$@" >> "$NOTES/scancel"
kill -TERM $(cat "$NOTES/pids")
"""
SBATCH = """#!/bin/bash
cat > "$NOTES/script"
echo "$@" > "$NOTES/sbatch"
if [ "$CODE" = 0 ]; then echo "1234;cluster"; else echo "sbatch: error: no such partition" >&2; fi
exit "$CODE"
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins on the PATH, which write down here what they are asked."""
    commands = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "sbatch": SBATCH}
    for name, text in (commands | {"python": PYTHON}).items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.setenv("CODE", "0")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    for name, value in {"JOB_ID": "41234", "NTASKS": "4", "JOB_NODELIST": "node[7-8]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return tmp_path


@pytest.fixture
def job(notes: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script of a job of two nodes with two GPUs."""
    out = str(notes / "a run")
    sbatch = "partition=gpu comment='two words'"
    assert main([*WORDS, "--out", out, "--slurm", "2x2", "--sbatch", sbatch, "--dry-run"]) == 0
    path = notes / "job.sh"
    path.write_text(capsys.readouterr().out)
    assert not (notes / "script").exists()  # a dry run submits nothing
    return path


def test_the_script_is_valid_and_asks_for_what_was_asked(job: Path) -> None:
    subprocess.run(["bash", "-n", str(job)], check=True)
    text = job.read_text()
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert {"--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--requeue"} <= {*asked}
    assert "--signal=B:USR1@120" in asked
    assert asked[-2:] == ["--partition=gpu", "'--comment=two words'"]  # after ours, so they win


@pytest.mark.parametrize("code", [0, 6])
def test_every_task_is_a_rank_with_the_command_as_it_was_typed(
    job: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("CODE", str(code))
    assert subprocess.run(["bash", str(job)], check=False).returncode == code
    assert sorted((notes / "ranks").read_text().splitlines()) == [
        f"{rank} {rank % 2} 4 2 node7 21234" for rank in range(4)
    ]
    words = (notes / "words3").read_text().splitlines()
    assert words[:2] == ["-m", "stopmim"]
    assert parse(words[2:]) == parse([*WORDS, "--out", str(notes / "a run")])
    assert split_changes(words[2:])[1] == {"optim.ema": [0.9, 1]}
    assert "requeue" not in (notes / "scontrol").read_text()


def test_the_job_is_queued_again_when_its_time_is_up(
    job: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREVER", "1")
    shell = subprocess.Popen(["bash", str(job)])
    until = time.monotonic() + 20
    while time.monotonic() < until and len(list(notes.glob("words?"))) < 4:
        time.sleep(0.05)
    shell.send_signal(signal.SIGUSR1)
    assert shell.wait(20) == 143
    assert (notes / "scancel").read_text().split() == ["--signal=TERM", "41234"]
    assert "requeue 41234" in (notes / "scontrol").read_text()


def about(state: str, preempted: str) -> str:
    """As `scontrol show job` has it; what may be preempted has a time from which on."""
    return f"JobState={state} Reason=None\n PreemptEligibleTime=2026-11-16 PreemptTime={preempted}"


@pytest.mark.parametrize(
    ("code", "job_is", "again"),
    [
        (143, about("RUNNING", "2026-11-16T04:00:00"), True),
        (143, about("COMPLETING", "2026-11-16T04:00:00"), False),  # by scancel
        (143, about("RUNNING", "None"), False),
        (6, about("RUNNING", "2026-11-16T04:00:00"), False),  # it would fail again
    ],
)
def test_a_job_that_ends_because_it_is_preempted_is_queued_again_and_no_other(
    job: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, code: int, job_is: str, again: bool
) -> None:
    monkeypatch.setenv("CODE", str(code))
    monkeypatch.setenv("JOB", job_is)
    assert subprocess.run(["bash", str(job)], check=False).returncode == code
    assert ("requeue 41234" in (notes / "scontrol").read_text()) == again


def test_tasks_get_the_cores_that_the_job_asked_for(
    job: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    subprocess.run(["bash", str(job)], check=True)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    subprocess.run(["bash", str(job)], check=True)
    stop = "--kill-on-bad-exit=1"
    assert (notes / "srun").read_text().split() == [stop, stop, "--cpus-per-task=12"]


def test_a_job_is_submitted_and_named(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = notes / "new" / "run"
    assert main([*WORDS, "--out", str(out), "--slurm", "1x8"]) == 0
    assert capsys.readouterr().out == f"job 1234, log in {out}\n"
    assert out.is_dir()  # for the log
    assert f"#SBATCH --output={out}/slurm-%j.log" in (notes / "script").read_text()


def test_a_percent_sign_is_no_pattern_in_the_place_of_the_log(
    notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--out", "runs/10%j", "--slurm", "1x1", "--dry-run"]) == 0
    assert "#SBATCH --output=runs/10%%j/slurm-%j.log\n" in capsys.readouterr().out


def test_text_reaches_the_job_as_it_was_typed(
    notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["--init", 'runs/first #2 "a"', "--data.skip", "a: b.jsonl", "--runtime.device", "cpu"]
    assert main([*WORDS, *typed, "--out", "x", "--slurm", "1x1", "--dry-run"]) == 0
    (notes / "job.sh").write_text(capsys.readouterr().out)
    subprocess.run(["bash", str(notes / "job.sh")], check=True)
    words = (notes / "words0").read_text().splitlines()
    assert split_changes(words)[1] == split_changes([*WORDS, *typed])[1]
    assert split_changes(words)[1]["init"] == 'runs/first #2 "a"'


def test_a_log_that_has_no_place_is_one_line(
    notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (notes / "file").touch()
    assert main([*WORDS, "--out", str(notes / "file"), "--slurm", "1x8"]) == 5
    assert f"{notes / 'file'}: cannot write here: File exists" in capsys.readouterr().err
    assert not (notes / "script").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--slurm", "8"], "expected NODESxGPUS"),
        (["--slurm", "0x8"], "expected NODESxGPUS"),
        (["--slurm", f"1x{'9' * 5000}"], "expected NODESxGPUS"),
        (["--slurm", "1x3", "--optim.batch_size", "64"], "64 images cannot be shared by 3 GPUs"),
        (["--slurm", "1x8", "--optim.lrr", "1"], "unknown key"),
        (["--sbatch", "partition=x"], "without --slurm"),
        (["--slurm", "1x8", "--sbatch", "comment='a"], '--sbatch: "comment=\'a": no closing quota'),
        (["--slurm", "1x8", "--sbatch", "comment='a\nb'"], "a batch script cannot hold"),
    ],
)
def test_a_job_that_cannot_work_is_refused_before_it_waits_in_a_queue(
    notes: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main([*WORDS, "--out", str(notes / "run"), *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not (notes / "script").exists()


def test_what_sbatch_refuses_is_passed_on_in_one_line(
    notes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "1")
    assert main([*WORDS, "--out", str(notes / "run"), "--slurm", "1x8"]) == 7
    assert "no such partition" in capsys.readouterr().err
    (notes / "bin" / "sbatch").write_bytes(b"#!/bin/sh\necho 'refus\xe9' >&2; exit 1\n")  # Latin-1
    assert main([*WORDS, "--out", str(notes / "run"), "--slurm", "1x8"]) == 7
    assert "sbatch: refus\\udce9" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(notes))
    assert main([*WORDS, "--out", str(notes / "run"), "--slurm", "1x8"]) == 7
    assert capsys.readouterr().err.count("\n") == 1


def test_images_in_a_folder_of_any_name_are_submitted(notes: Path) -> None:
    words = ["pretrain", os.fsdecode(b"pictures \xff"), *WORDS[2:]]
    assert main([*words, "--out", str(notes / "run"), "--slurm", "1x8"]) == 0
    assert b"'pictures \xff'" in (notes / "script").read_bytes()


def test_a_job_needs_a_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--slurm", "1x8", "--dry-run"]) == 2
    assert "--out is missing" in capsys.readouterr().err
