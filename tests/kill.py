"""Runs that are killed (-9), in forks of a process that has torch loaded: no import per kill.

Called by test_kill.py as ``python kill.py FOLDER POINT...``; a point is ``name@count``. Every point
is one run that is killed there, started again, and compared with a run that was left alone.
Several points joined by ``,`` are kills one after the other in the same run.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # which an optimizer imports, in more time than a run takes

from stopmim import Run, pretrain
from tiny import NoiseImages, assert_same_run, tiny


def attempt(out: Path, fault: str | None) -> int:
    """Trains in a child process; returns the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if fault:
                os.environ["STOPMIM_FAULT"] = f"{fault}:kill"
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends in a moment
            pretrain(NoiseImages(), out, tiny())
            status = 0
        finally:
            os._exit(status)
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
            assert died == signal.SIGKILL, f"{chain}: {fault} was not reached ({died})"
        assert attempt(out, None) == 0, chain
        assert_same_run(Run(out), Run(root / "whole"))
        assert not list((out / "checkpoints").glob(".tmp*")), chain
        assert len(list((out / "checkpoints").iterdir())) == 2, chain
        print(f"{chain}: ok", flush=True)


if __name__ == "__main__":
    main()
