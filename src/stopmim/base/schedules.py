"""Schedules as functions of the step alone, so that a resumed run needs no replay.

As in the released code, update `i` (from 0) uses the value at ``i + 1`` for learning rate and
weight decay, which are stepped before the update, and at `i` for the EMA momentum.
"""

import math


def cosine(step: float, *, total: int, start: float, final: float) -> float:
    """Half a cosine from `start` at step 0 to `final` at `total`, then constant."""
    done = min(1.0, step / total)
    return final + (start - final) * 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_cosine(
    step: int, *, total: int, warmup: int, start: float, peak: float, final: float
) -> float:
    """Linear from `start` to `peak` in `warmup` steps, then half a cosine to `final` at `total`."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    return cosine(step - warmup, total=max(1, total - warmup), start=peak, final=final)


def linear(step: int, *, total: int, start: float, final: float) -> float:
    """A line from `start` at step 0 to `final` at `total`, then constant."""
    return start + (final - start) * min(1.0, step / total)
