"""Values that change over a run, as functions of the step alone: a resumed run needs no replay.

The released code steps its schedulers before an update and takes the momentum after it, so update
`i` (from 0) uses the value at ``i + 1`` for learning rate and weight decay, and at `i` for the EMA.
"""

import math


def cosine(step: float, *, total: int, start: float, final: float) -> float:
    """Half a cosine from `start` at step 0 to `final` at `total`, and `final` from there on."""
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
    """A straight line from `start` at step 0 to `final` at `total`."""
    return start + (final - start) * min(1.0, step / total)
