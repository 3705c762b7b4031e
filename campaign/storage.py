"""Disks that are full, small, read-only or gone: one line, and the run goes on where it was."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from campaign.cases import Case, Family, need
from campaign.processes import Limits, Started
from campaign.sample import copy, need_same, prepare, same_model, words
from kill import SAVING
from stopmim.runs import saver

STORAGE = 5
CAN_MOUNT = os.geteuid() == 0


def case(case: Case) -> None:
    kinds = (full_at_a_point, small_files, moved, removed, full_disk, read_only_disk)
    kind = kinds[case.number % len(kinds)]
    if kind in (full_disk, read_only_disk) and not CAN_MOUNT:  # no small disk to be had
        kind = full_at_a_point
    case.about = kind.__name__
    kind(case)


def resumed(case: Case, run: Path, *, logged: bool = True) -> None:
    """The same command, once the disk is well again, ends with the uninterrupted run.

    Unless `logged`, its log is lost, and the model alone is compared.
    """
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    done = case.run(*line)
    need(done.code == 0, f"not resumed: {done}")
    if logged:
        need_same(run, case.shared / "whole")
    need(same_model(run, case.shared / "whole"), "resumed to another model")


def full_at_a_point(case: Case) -> None:
    """No space left inside a save: training goes on, or ends with the code for storage."""
    run, dice = case.folder / "run", case.dice
    point = f"{dice.choice(SAVING[1:])}@{dice.randint(1, 4)}"
    case.about += f" {point}"
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    done = case.run(*line, before=lambda: os.environ.update(STOPMIM_FAULT=f"{point}:full"))
    need(done.code in (0, STORAGE), str(done))
    resumed(case, run)


def small_files(case: Case) -> None:
    """No file may be larger than a limit: a quota."""
    run = case.folder / "run"
    size = int(10 ** case.dice.uniform(0, 7.2))
    case.about += f" of {size} bytes"
    if case.dice.random() < 0.5:
        copy(case.shared / "half", run)
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    done = case.run(*line, limits=Limits(file=size))
    need(done.code in (0, STORAGE), str(done))
    resumed(case, run)


def slowly() -> None:
    """Makes the run wait at every point of a save, so that it can be disturbed."""
    real = saver.__dict__["faultpoint"]

    def waits(name: str) -> None:
        time.sleep(0.03)
        real(name)

    saver.__dict__["faultpoint"] = waits


def begun(case: Case, run: Path) -> Started:
    """A run that has made some updates and is still at it."""
    line = words(case.shared / "images", run, case.shared / "config.yaml")
    started = case.start(*line, before=slowly)
    while not (run / "metrics.jsonl").exists() and not started.is_over():
        time.sleep(0.002)
    started.wait(case.dice.uniform(0, 0.4))
    return started


def moved(case: Case) -> None:
    """The run directory is renamed under the run, and later named back."""
    run, away = case.folder / "run", case.folder / "away"
    started = begun(case, run)
    run.rename(away)
    done = started.finish()
    case.judge(done)
    need(done.code in (0, STORAGE), str(done))
    # A run that was about to end may not have looked again; any other has noticed.
    complete = (away / "checkpoints" / "step-00000010").exists()
    need(done.code == STORAGE or complete, f"code 0, and the run is lost: {done}")
    elsewhere = [path for path in case.folder.glob("run*") if path.is_dir()]
    if run.exists():
        shutil.rmtree(run)
    away.rename(run)
    resumed(case, run)
    for path in elsewhere:  # a save elsewhere resumes as well
        if path != run and (path / "run.json").exists():
            resumed(case, path, logged=False)
            case.counts["rescued"] += 1


def removed(case: Case) -> None:
    """The run directory is deleted under the run."""
    run = case.folder / "run"
    started = begun(case, run)
    shutil.rmtree(run, ignore_errors=True)
    if run.exists():  # a file was written while it was being deleted
        shutil.rmtree(run, ignore_errors=True)
    is_late = started.is_over()
    done = started.finish()
    case.judge(done)
    need(done.code == STORAGE or is_late, f"code 0, and the run is lost: {done}")
    for path in case.folder.glob("run*"):  # a save elsewhere
        if (path / "run.json").exists():
            resumed(case, path, logged=False)
            case.counts["rescued"] += 1


def mounted(case: Case, size: int) -> Path:
    """A small disk in memory."""
    disk = case.folder / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    subprocess.run(["mount", *options], check=True, capture_output=True)
    return disk


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def unmount(disk: Path) -> None:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def full_disk(case: Case) -> None:
    """A disk that has room for some of the files; then it grows."""
    disk = mounted(case, size := int(10 ** case.dice.uniform(3.6, 7.5)))
    case.about += f" of {size} bytes"
    try:
        run = disk / "run"
        line = words(case.shared / "images", run, case.shared / "config.yaml")
        done = case.run(*line)
        need(done.code in (0, STORAGE), str(done))
        remount(disk, "size=1g")
        resumed(case, run)
    finally:
        unmount(disk)


def read_only_disk(case: Case) -> None:
    """A disk that becomes read-only under the run, as after an error of the hardware."""
    disk = mounted(case, 1 << 30)
    try:
        run = disk / "run"
        if case.dice.random() < 0.5:  # before it starts
            copy(case.shared / "half", run)
            remount(disk, "ro")
            done = case.run(*words(case.shared / "images", run, case.shared / "config.yaml"))
            need(done.code == STORAGE, str(done))
        else:
            started = begun(case, run)
            started.signal(signal.SIGSTOP)  # files that are open for writing keep it writable
            is_read_only = _try_read_only(disk)
            started.signal(signal.SIGCONT)
            done = started.finish()
            case.judge(done)
            need(done.code in ((0, STORAGE) if is_read_only else (0,)), str(done))
        remount(disk, "rw")
        resumed(case, run)
    finally:
        unmount(disk)


def _try_read_only(disk: Path) -> bool:
    command = ["mount", "-o", "remount,ro", str(disk)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


FAMILY = Family(
    "storage",
    "a disk that fails costs one line; what was saved resumes exactly",
    quick=18,
    long=60,
    case=case,
    prepare=prepare,
)
