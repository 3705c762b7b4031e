"""The effective rank of features; health/measure.py has the computation."""

from collections.abc import Iterator
from dataclasses import dataclass

from stopmim.evals.protocols.protocol import Inputs, Measured, Protocol
from stopmim.evals.results import Result


@dataclass(frozen=True)
class RankMe(Protocol):
    """Effective rank of the features; needs more test images than features."""

    name = "rankme"
    needs = "images"

    def obstacle(self, inputs: Inputs) -> str:
        n, width = len(inputs.test), inputs.encoder.width
        return "" if n > width else f"{n} test images cannot fill {width} dimensions"

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        from stopmim.evals.features import rankme

        value, n = rankme(inputs.last(inputs.test_x)), len(inputs.test)
        found = Result("rankme", self.name, "", value, None, n, "none", inputs.seed, unit="")
        yield Measured(found)
