"""Paired comparison of two encoders on the same test images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stopmim.base.console import say
from stopmim.base.errors import UserError
from stopmim.evals.inputs import Inputs
from stopmim.evals.paired import bootstrap, mcnemar
from stopmim.evals.protocols import IMAGE_BY_IMAGE
from stopmim.evals.protocols.protocol import Protocol
from stopmim.evals.suite import measure, quantity
from stopmim.runs.verdict import Tally, judge


@dataclass(frozen=True)
class Comparison:
    """One protocol on two encoders; variation over training seeds is not included."""

    protocol: str
    label: str
    selection: str
    a: float  # accuracies are fractions, 0 to 1
    b: float
    interval: tuple[float, float]  # 99 %, of b - a, over test images
    p: float  # McNemar's: probability of a split at least as uneven if both were equally good
    n: int

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def word(self) -> str:
        """Whether B is above A, below it, or not distinguishable from it."""
        return judge(*self.interval)

    def as_dict(self) -> dict[str, Any]:
        """A line for JSON, in percent."""
        low, high = self.interval
        shares = {"a": self.a, "b": self.b, "value": self.difference, "low": low, "high": high}
        names = ("protocol", "label", "selection", "p", "n")
        line = {"name": "difference", "unit": "percent", "verdict": f"{self.word} A"}
        line |= {name: getattr(self, name) for name in names}
        return line | {name: round(100 * x, 6) for name, x in shares.items()}


def conclusion(found: Sequence[Comparison], a: str, b: str, data: str) -> str:
    """The verdicts counted, in a sentence that names both encoders and the data."""
    tally = Tally.of(data, [c.word for c in found], other="A")
    return f"On {data}, B ({b}) is {tally}; A is {a}."


def compare(
    a: Inputs,
    b: Inputs,
    protocols: Sequence[Protocol] | None = None,
    names: tuple[str, str] = ("A", "B"),
) -> list[Comparison]:
    """Compares B with A on the same images by paired tests, by default k-NN, linear, low-shot.

    `names` announce the two while they are measured.
    """
    protocols = [kind() for kind in IMAGE_BY_IMAGE] if protocols is None else protocols
    say(names[0])
    measured = measure(a, protocols, aloud=True)
    say(names[1])
    theirs = {quantity(m.result): m.correct for m in measure(b, protocols, aloud=True)}
    found = []
    for result, ours in measured:
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
