"""Named points at which a test can make the program die, fail, or be interrupted.

``STOPMIM_FAULT=name@3:kill`` kills the process (-9) the third time it passes `name`; other actions
are `term`, `int` (signals), `full` (no space left on the device) and `nan`. Unset, it does nothing.
"""

import errno
import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def faultpoint(name: str) -> str | None:
    """Does what STOPMIM_FAULT says at this point; returns the action, for points that act on it."""
    if not (plan := os.environ.get("STOPMIM_FAULT")):
        return None
    place, action = plan.split(":")
    wanted, _, count = place.partition("@")
    _passed[name] += 1
    if wanted != name or _passed[name] != int(count or 1):
        return None
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "int":
            os.kill(os.getpid(), signal.SIGINT)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        case "nan":
            pass
        case unknown:
            raise ValueError(f"STOPMIM_FAULT: unknown action {unknown!r}")
    return action
