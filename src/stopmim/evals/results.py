"""The form in which every protocol answers, and the interval of an accuracy."""

import dataclasses
import math
from typing import Any, Literal

Z = 1.959964  # 97.5 % quantile of the normal distribution


@dataclasses.dataclass(frozen=True)
class Result:
    """One number, with what is needed to judge it; a line of results.jsonl."""

    name: str  # of the quantity: "accuracy", "rankme"
    protocol: str  # "knn", "linear", ...
    label: str  # what was to be told from the features; "" if nothing
    value: float  # accuracies are fractions, 0 to 1
    interval: tuple[float, float] | None  # 95 %, over the test samples
    n: int  # number of test samples
    selection: Literal["none", "held-out", "paper"]  # on what settings were chosen; paper: on test
    seed: int
    random_init: float | None = None  # the same quantity for the encoder before training
    train: int | None = None  # number of labelled samples that something was fitted to
    setting: str | None = None  # what was chosen

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the interval as `low` and `high`, and nothing that is None."""
        fields = dataclasses.asdict(self)
        fields["low"], fields["high"] = fields.pop("interval") or (None, None)
        return {key: value for key, value in fields.items() if value is not None}


def accuracy(
    protocol: str,
    label: str,
    correct: int,
    n: int,
    *,
    selection: Literal["none", "held-out", "paper"],
    seed: int,
    train: int | None = None,
    setting: str | None = None,
) -> Result:
    """`correct` of `n` test samples, with its interval."""
    return Result(
        "accuracy",
        protocol,
        label,
        correct / n,
        wilson_interval(correct, n),
        n,
        selection,
        seed,
        train=train,
        setting=setting,
    )


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Where the true fraction lies with 95 %, given `correct` of `n`; never outside 0 to 1."""
    if not 0 <= correct <= n or n == 0:
        raise ValueError(f"{correct} correct of {n}: there is no such fraction")
    share, spread = correct / n, Z * Z / n
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    # At the ends rounding would leave 1e-17, and a 0 that is not 0.
    low = 0.0 if correct == 0 else centre - half
    return low, 1.0 if correct == n else centre + half
