"""The log of a run: the lines of metrics.jsonl, which may hold anything."""

from collections.abc import Mapping, Sequence
from typing import Any

from stopmim.base.files import number

Logged = Mapping[str, Any]  # one line, or the measurements in it


# Every measurement has these; the rules of rules.py rely on it.
MEASURED = ("target_rank", "target_spread", "target_image_share", "predicted_image_share", "skill")


def measurements(lines: Sequence[Logged]) -> tuple[Logged | None, list[Logged]]:
    """The measurement of the untrained network, if there is one, and all later ones."""
    begun = (_measured(line.get("random_init"), MEASURED) for line in lines)
    found = (_measured(line, ("step", *MEASURED)) for line in lines)
    return next(filter(None, begun), None), [line for line in found if line]


def _measured(line: object, needed: Sequence[str]) -> Logged | None:
    """The numbers of a line; None if one of `needed` is missing."""
    if not isinstance(line, dict) or needed[-1] not in line:
        return None
    numbers = {key: value for key, value in line.items() if number(value) is not None}
    return numbers if all(key in numbers for key in needed) else None


def training_seconds(lines: Sequence[Logged], batch_size: int) -> float:
    """Time spent on updates, from the throughput between log points; pauses do not count."""
    seconds, before = 0.0, 0.0
    for line in lines:
        step, rate = number(line.get("step")), number(line.get("images_per_s"))
        if step is not None and rate:
            seconds += max(0.0, step - before) * batch_size / rate
            before = step
    return seconds
