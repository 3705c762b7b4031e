"""Fault points: named places where a test can kill, interrupt or fail the program.

``STOPMIM_FAULT=name@3:kill`` kills the process (-9) the third time it passes `name`. Other actions
are `term` and `int` (signals), `full` (no space left on device) and `nan`. Unset, nothing happens.
"""

import errno
import os
import signal
from collections import Counter

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
_passed: Counter[str] = Counter()


def faultpoint(name: str) -> str | None:
    """Does what STOPMIM_FAULT asks for here, and returns the action for the caller to act on."""
    if not (plan := os.environ.get("STOPMIM_FAULT")):
        return None
    place, action = plan.split(":")
    wanted, _, count = place.partition("@")
    _passed[name] += 1
    if wanted != name or _passed[name] != int(count or 1):
        return None
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    elif action != "nan":
        raise ValueError(f"STOPMIM_FAULT: unknown action {action!r}")
    return action
