"""Runs that are killed (-9), in forks of a process that has torch loaded: no import per kill.

Called by test_kill.py as ``python kill.py FOLDER POINT...``; a point is ``name@count``. Every point
is one run that is killed there, started again, and compared with a run that was left alone.
Several points joined by ``,`` are kills one after the other in the same run. ``slow:`` before a
point delays the thread that saves, so that training is ahead of it; ``after@0.3`` is a moment,
in seconds, whatever the run is doing.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which an optimizer imports, in more time than a run takes

from stopmim import Run, pretrain
from stopmim.base.faults import faultpoint
from stopmim.config.schema import Config
from stopmim.runs import saver
from tiny import NoiseImages, assert_same_run, tiny

DELAY = 0.03  # seconds at every point of a slow save: an update takes less
# In the thread that saves, but for the first: from the copy on the device to the old checkpoints.
SAVING = [
    *("save.copied", "save.begin", "save.host", "save.model", "save.optimizer", "save.hashed"),
    *("save.synced", "save.moved", "save.renamed"),
]


def slowly(name: str) -> None:
    time.sleep(DELAY)
    faultpoint(name)


def attempt(out: Path, fault: str | None, config: Config | None = None) -> int:
    """Trains in a child process; returns the signal that killed it, or 0."""
    slow, point = (fault or "").startswith("slow:"), (fault or "").removeprefix("slow:")
    timed = point.startswith("after@")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if slow or timed:
                saver.__dict__["faultpoint"] = slowly
            if point and not timed:
                os.environ["STOPMIM_FAULT"] = f"{point}:kill"
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends in a moment
            pretrain(NoiseImages(), out, config or tiny())
            status = 0
        finally:
            os._exit(status)
    if timed:
        time.sleep(float(point.removeprefix("after@")))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main() -> None:
    torch.set_num_threads(1)
    root, points = Path(sys.argv[1]), sys.argv[2:]
    assert attempt(root / "whole", None) == 0
    for i, chain in enumerate(points):
        out = root / str(i)
        for fault in chain.split(","):
            died = attempt(out, fault)
            is_sure = not fault.startswith("after@")  # a run may end before its time
            assert died == signal.SIGKILL or not (died or is_sure), f"{chain}: {fault} ({died})"
        assert attempt(out, None) == 0, chain
        assert_same_run(Run(out), Run(root / "whole"))
        assert not list((out / "checkpoints").glob(".tmp*")), chain
        assert len(list((out / "checkpoints").iterdir())) == 2, chain
        print(f"{chain}: ok", flush=True)


if __name__ == "__main__":
    main()
