"""Paired comparison of two encoders on the same test images."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stopmim.base.errors import UserError
from stopmim.base.random_keys import numpy_generator
from stopmim.evals.inputs import Inputs
from stopmim.evals.protocols import IMAGE_BY_IMAGE
from stopmim.evals.protocols.protocol import Protocol
from stopmim.evals.suite import measure, quantity

RESAMPLES = 10_000


@dataclass(frozen=True)
class Comparison:
    """One protocol on two encoders; variation over training seeds is not included."""

    protocol: str
    label: str
    selection: str
    a: float
    b: float
    interval: tuple[float, float]  # 95 %, of b - a, over test images
    p: float  # McNemar's: probability of a split at least as uneven if both were equally good
    n: int

    @property
    def difference(self) -> float:
        return self.b - self.a

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["low"], fields["high"] = fields.pop("interval")
        return {"name": "difference", **fields, "value": self.difference}


def compare(a: Inputs, b: Inputs, protocols: Sequence[Protocol] | None = None) -> list[Comparison]:
    """Compares B with A on the same images by paired tests, by default k-NN, linear, low-shot."""
    protocols = [kind() for kind in IMAGE_BY_IMAGE] if protocols is None else protocols
    theirs = {quantity(m.result): m.correct for m in measure(b, protocols)}
    found = []
    for result, ours in measure(a, protocols):
        other = theirs.get(quantity(result))  # none for "last 4", if B has two blocks
        if ours is None or other is None:
            continue
        only_a, only_b, n = int((ours & ~other).sum()), int((other & ~ours).sum()), len(ours)
        shares = int(ours.sum()) / n, int(other.sum()) / n
        interval, p = bootstrap(only_a, only_b, n, a.seed), mcnemar(only_a, only_b)
        what = result.protocol, result.label, result.selection
        found.append(Comparison(*what, *shares, interval, p, n))
    if not found:
        raise UserError("eval compare: none of these protocols answers image by image")
    return found


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value; of images that only one gets right, half should be A's."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    logs = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def bootstrap(only_a: int, only_b: int, n: int, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the difference in accuracy, over pairs of answers."""
    # Only the number of pairs of each kind matters, and it is multinomial.
    share = [only_a / n, only_b / n, (n - only_a - only_b) / n]
    drawn = numpy_generator("compare", seed).multinomial(n, share, size=RESAMPLES)
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / n, (0.025, 0.975))
    return float(low), float(high)
