"""Statistics over training seeds: mean, 95 % interval, paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stopmim.evals.results import Z

# 97.5 % quantile of Student's t by degrees of freedom, from 1 on.
T = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)


class Estimate(NamedTuple):
    """Mean over `n` seeds with the half width of its 95 % interval, None for a single seed."""

    mean: float
    half: float | None
    n: int


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; beyond the table by an expansion, good to 4 digits."""
    if freedom <= len(T):
        return T[freedom - 1]
    z = Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of `values`, one per seed, with its interval by Student's t."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return Estimate(mean, t_quantile(n - 1) * math.sqrt(variance / n), n)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """Mean difference of `values` and `baseline` over the seeds that both have.

    Effects that a seed has on both, such as the order of images, cancel.
    """
    both = sorted(values.keys() & baseline.keys())
    return over_seeds([values[seed] - baseline[seed] for seed in both]) if both else None
