"""The form of every result, and the confidence interval of an accuracy."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Z = 1.959964  # 97.5 % quantile of the normal distribution
Reading = Literal["held-out", "paper"]  # settings are chosen on training or on test images
Selection = Literal["none", Reading]  # none: there was nothing to choose


@dataclasses.dataclass(frozen=True)
class Result:
    """One number with its context; a line of results.jsonl."""

    name: str  # of the quantity: "accuracy", "rankme"
    protocol: str  # "knn", "linear", ...
    label: str  # label that was predicted; "" if none
    value: float  # accuracies are fractions, 0 to 1
    interval: tuple[float, float] | None  # 95 %, over the test samples
    n: int  # number of test samples
    selection: Selection
    seed: int
    random_init: float | None = None  # the same quantity for the untrained encoder
    train: int | None = None  # number of labelled samples fitted to
    setting: str | None = None  # the chosen setting

    def as_dict(self) -> dict[str, Any]:
        """Fields for JSON: the interval as `low` and `high`, fields that are None left out."""
        fields = dataclasses.asdict(self)
        fields["low"], fields["high"] = fields.pop("interval") or (None, None)
        return {key: value for key, value in fields.items() if value is not None}


class Measured(NamedTuple):
    """A result and, for an accuracy, which test images were right."""

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
