"""The log of a run: the lines of metrics.jsonl, which may hold anything."""

from collections.abc import Mapping, Sequence
from typing import Any

from stopmim.base.files import number

Logged = Mapping[str, Any]  # one line, or the measurements in it


def measurements(lines: Sequence[Logged]) -> tuple[Logged | None, list[Logged]]:
    """The measurement of the untrained network, if there is one, and all later ones."""
    begun = (line["random_init"] for line in lines if isinstance(line.get("random_init"), dict))
    return next(begun, None), [line for line in lines if "target_rank" in line]


def training_seconds(lines: Sequence[Logged], batch_size: int) -> float:
    """Time spent on updates, from the throughput between log points; pauses do not count."""
    seconds, before = 0.0, 0.0
    for line in lines:
        step, rate = number(line.get("step")), number(line.get("images_per_s"))
        if step is not None and rate:
            seconds += max(0.0, step - before) * batch_size / rate
            before = step
    return seconds
