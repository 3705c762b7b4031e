"""The form of every result, its file, and confidence intervals over test images and seeds."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stopmim.base.errors import StorageError
from stopmim.base.faults import faultpoint
from stopmim.base.files import append_jsonl
from stopmim.runs.verdict import verdict

if TYPE_CHECKING:
    from torch import Tensor

Z, Z99 = 1.959964, 2.575829  # 97.5 % and 99.5 % quantile of the normal distribution
# The same of Student's t by degrees of freedom, from 1 on.
T = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)
T99 = (63.6567, 9.92484, 5.84091, 4.60409, 4.03214, 3.70743, 3.49948, 3.35539, 3.24984)
Reading = Literal["held-out", "paper"]  # settings are chosen on training or on test images
Selection = Literal["none", Reading]  # none: there was nothing to choose
Unit = Literal["percent", ""]


@dataclasses.dataclass(frozen=True)
class Result:
    """One number with its context; a line of results.jsonl."""

    name: str  # of the quantity: "accuracy", "rankme"
    protocol: str  # "knn", "linear", ...
    label: str  # label that was predicted; "" if none
    value: float  # a fraction, 0 to 1, where the unit is percent
    interval: tuple[float, float] | None  # 95 %, over the test samples
    n: int  # number of test samples
    selection: Selection
    seed: int
    random_init: float | None = None  # the same quantity before training, mean of several networks
    train: int | None = None  # number of labelled samples fitted to
    setting: str | None = None  # the chosen setting
    unit: Unit = "percent"  # in JSON, and wherever it is shown
    difference: tuple[float, float] | None = None  # 99 % interval of value - random_init
    chance: float | None = None  # one answer for all test images, see suite.py
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more keys of the line

    def as_dict(self) -> dict[str, Any]:
        """A line for JSON, in its unit, with the verdict; fields that are None are left out."""
        (low, high), (gain_low, gain_high) = (
            x or (None, None) for x in (self.interval, self.difference)
        )
        gain = None if self.random_init is None else self.value - self.random_init
        shares = {"value": self.value, "low": low, "high": high, "random_init": self.random_init}
        shares |= {"difference": gain, "difference_low": gain_low, "difference_high": gain_high}
        shares |= {"chance": self.chance}
        scale = 100 if self.unit == "percent" else 1
        names = ("name", "protocol", "label", "unit", "n", "selection", "seed", "train", "setting")
        line = {name: getattr(self, name) for name in names} | dict(self.facts)
        line |= {name: x if x is None else round(scale * x, 6) for name, x in shares.items()}
        line |= {"verdict": verdict(line) or None}
        return {key: value for key, value in line.items() if value is not None}


class Measured(NamedTuple):
    """A result and, for an accuracy, which test images were answered correctly."""

    result: Result
    correct: "Tensor | None" = None  # (n,) bool


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """95 % interval of the true fraction, given `correct` of `n`; never outside 0 to 1."""
    if not 0 <= correct <= n or n == 0:
        raise ValueError(f"{correct} correct of {n}: there is no such fraction")
    share, z2 = correct / n, Z * Z / n
    centre = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4) / (1 + z2)
    # Exact at the ends, where rounding would leave 1e-17.
    low = 0.0 if correct == 0 else centre - half
    return low, 1.0 if correct == n else centre + half


def destination(name: str | None, out: Path | None) -> Path | None:
    """File for results: `out`, or results.jsonl in the folder `out` or in the run `name`."""
    if out is None:
        is_run = name is not None and os.path.exists(os.path.join(name, "run.json"))
        return Path(name, "results.jsonl") if name is not None and is_run else None
    path = out if out.suffix and not out.is_dir() else out / "results.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out}: cannot write here: {error.strerror}") from None
    return path


def record(path: Path | None, lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Appends `lines`, each with the facts, to the file of results, if there is one."""
    if path is None:
        return
    faultpoint("results.begin")
    try:
        append_jsonl(path, *(dict(facts) | dict(line) for line in lines))
    except OSError as error:
        raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
    faultpoint("results.end")


class Estimate(NamedTuple):
    """Mean over `n` seeds with the half width of its 95 % interval, None for a single seed."""

    mean: float
    half: float | None
    n: int


def t_quantile(freedom: int, level: Literal[95, 99] = 95) -> float:
    """Quantile of Student's t for a two-sided interval; beyond the table by an expansion."""
    table, z = (T, Z) if level == 95 else (T99, Z99)
    if freedom <= len(table):
        return table[freedom - 1]
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
    """Mean difference over the seeds that both have; effects of a seed on both cancel."""
    both = sorted(values.keys() & baseline.keys())
    return over_seeds([values[seed] - baseline[seed] for seed in both]) if both else None
