"""What the runs of an ablation found, row by row over their seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stopmim.ablations.paper import printed
from stopmim.ablations.table import Table
from stopmim.evals.statistics import Estimate, over_seeds, paired
from stopmim.evals.suite import TRACKED

if TYPE_CHECKING:
    from stopmim.ablations.run import Outcome
    from stopmim.ablations.trial import Answer


@dataclass(frozen=True)
class Line:
    """A row over its seeds."""

    name: str
    paper: Mapping[str, float]
    values: Mapping[str, Mapping[int, float]]  # metric -> seed -> percent
    runs: Sequence["Outcome"]

    def estimate(self, metric: str) -> Estimate | None:
        values = self.values.get(metric)
        return over_seeds(list(values.values())) if values else None

    def against(self, other: "Line", metric: str) -> Estimate | None:
        """The paired difference to `other`."""
        if other is self:
            return None
        return paired(self.values.get(metric, {}), other.values.get(metric, {}))

    @property
    def verdict(self) -> str:
        """What the doctor says, or what went wrong; of all seeds."""
        said = [run.problem or run.verdict for run in self.runs]
        return "; ".join(
            f"{one} ({said.count(one)} of {len(said)})" if said.count(one) < len(said) else one
            for one in dict.fromkeys(said)
        )

    def norm(self, which: int) -> Estimate | None:
        known = [run.norms[which] for run in self.runs if run.norms]
        return over_seeds(known) if known else None

    @property
    def rank(self) -> Estimate | None:
        known = [run.rank for run in self.runs if run.rank is not None]
        return over_seeds(known) if known else None


def metric(answer: "Answer") -> str | None:
    """What an answer is called as a column; None: it is not shown."""
    if answer["protocol"] == "tracking":
        return answer["name"] if answer["name"] in TRACKED else None
    if answer["name"] != "accuracy":
        return None
    label = "" if answer["label"] == "class" else answer["label"]
    return " ".join(filter(None, [answer["protocol"], label, answer.get("on", "")]))


def lines(table: Table, arch: str, outcomes: Sequence["Outcome"]) -> list[Line]:
    """Row by row, in the order of the outcomes; `arch` is that of the paper's numbers beside."""
    found = []
    for name in dict.fromkeys(run.row for run in outcomes):
        runs = [run for run in outcomes if run.row == name]
        values: dict[str, dict[int, float]] = {}
        for run in runs:
            for answer in run.answers:
                if what := metric(answer):
                    values.setdefault(what, {})[run.seed] = 100 * answer["value"]
        found.append(Line(name, table.quoted(name, printed(arch)), values, runs))
    return found


def untrained(outcomes: Sequence["Outcome"]) -> dict[str, float]:
    """The same questions, of the network before training: that of the first row.

    Other rows may have another one, and encoders of others do.
    """
    found: dict[str, float] = {}
    for run in outcomes:
        for answer in run.answers:
            if "random_init" in answer and (what := metric(answer)):
                found.setdefault(what, 100 * answer["random_init"])
    return found


def metrics(found: Sequence[Line]) -> list[str]:
    """All columns, that of the paper's ablations first."""
    names = dict.fromkeys(what for line in found for what in line.values)
    return sorted(names, key=lambda name: not name.startswith("lowshot"))
