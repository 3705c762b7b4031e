"""Two encoders on the same test images: is one better, or were its images easier?"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from stopmim.base.errors import UserError
from stopmim.base.random_keys import numpy_generator
from stopmim.data.images import Images
from stopmim.evals.suite import Measured, Options, measure
from stopmim.method.encoder import Encoder

RESAMPLES = 10_000


@dataclass(frozen=True)
class Comparison:
    """One protocol, asked of two encoders. What differs between seeds of training is not in it."""

    protocol: str
    label: str
    selection: str
    a: float
    b: float
    interval: tuple[float, float]  # 95 %, of b - a, over test images
    p: float  # of a split at least as uneven, were they equally good
    n: int

    @property
    def difference(self) -> float:
        return self.b - self.a

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["low"], fields["high"] = fields.pop("interval")
        return {"name": "difference", **fields, "value": self.difference}


def compare(
    a: Encoder, b: Encoder, train: Images, test: Images, options: Options | None = None
) -> list[Comparison]:
    """Every protocol that answers image by image, with a paired test of B against A."""
    options = options or Options()
    first, second = (measure(encoder, train, test, options) for encoder in (a, b))
    found = _pairs(first, second, options.seed)
    if not found:
        raise UserError("eval compare: none of these protocols answers image by image")
    return found


def _pairs(first: list[Measured], second: list[Measured], seed: int) -> list[Comparison]:
    def by_key(measured: list[Measured]) -> dict[tuple[str, str, str], Tensor]:
        return {
            (m.result.protocol, m.result.label, m.result.selection): m.correct
            for m in measured
            if m.correct is not None
        }

    ours, theirs = by_key(first), by_key(second)
    found = []
    for key in (key for key in ours if key in theirs):  # an encoder of two blocks has no "last 4"
        a, b = ours[key], theirs[key]
        only_a, only_b, n = int((a & ~b).sum()), int((b & ~a).sum()), len(a)
        found.append(
            Comparison(
                protocol=key[0],
                label=key[1],
                selection=key[2],
                a=int(a.sum()) / n,
                b=int(b.sum()) / n,
                interval=bootstrap(only_a, only_b, n, seed),
                p=mcnemar(only_a, only_b),
                n=n,
            )
        )
    return found


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p: of the images that one alone told right, half should be A's."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    logs = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def bootstrap(only_a: int, only_b: int, n: int, seed: int) -> tuple[float, float]:
    """95 % of the differences of accuracy over images drawn again, in pairs.

    Only how many of each kind are drawn counts, and that is multinomial.
    """
    share = [only_a / n, only_b / n, (n - only_a - only_b) / n]
    drawn = numpy_generator("compare", seed).multinomial(n, share, size=RESAMPLES)
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / n, (0.025, 0.975))
    return float(low), float(high)
