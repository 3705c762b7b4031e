"""Rows of an ablation over their seeds: the numbers of every table and figure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stopmim.ablations.table import Row, Table
from stopmim.ablations.trial import NO_VERDICT, Answer, Outcome
from stopmim.config.architectures import printed
from stopmim.evals.protocols.tracking import TRACKED
from stopmim.evals.results import Estimate, over_seeds, paired
from stopmim.health.rules import COLLAPSES
from stopmim.runs.verdict import in_percent

HEALTH = {"norm of A": 3, "norm of m~": 3, "RankMe": 1}  # digits to show


@dataclass(frozen=True)
class Line:
    """A row over its seeds."""

    row: Row
    paper: Mapping[str, float]
    values: Mapping[str, Mapping[int, float]]  # metric -> seed -> percent
    health: Mapping[str, Mapping[int, float]]  # key of HEALTH -> seed -> value
    runs: Sequence[Outcome]

    @property
    def name(self) -> str:
        return self.row.name

    def per_seed(self, what: str) -> list[float]:
        return list((self.values.get(what) or self.health.get(what) or {}).values())

    def estimate(self, what: str) -> Estimate | None:
        values = self.per_seed(what)
        return over_seeds(values) if values else None

    def against(self, other: "Line | None", metric: str) -> Estimate | None:
        """Paired difference to another row."""
        if other is None or other is self:
            return None
        return paired(self.values.get(metric, {}), other.values.get(metric, {}))

    @property
    def verdict(self) -> str:
        """Verdicts of the doctor, or problems, of all seeds."""
        counts, runs = Counter(run.problem or run.verdict for run in self.runs), len(self.runs)
        return "; ".join(x if n == runs else f"{x} ({n} of {runs})" for x, n in counts.items())

    @property
    def judged(self) -> list[Outcome]:
        """Runs with a log, and so with a verdict, whether or not they were evaluated."""
        return [run for run in self.runs if run.verdict != NO_VERDICT]

    @property
    def collapsed(self) -> int:
        """Number of runs that have collapsed, in full or in part."""
        return sum(run.verdict in COLLAPSES for run in self.runs)


def lines(table: Table, arch: str, outcomes: Sequence[Outcome]) -> list[Line]:
    """Rows in the order of the outcomes, with the paper's numbers for `arch`."""
    rows, found = {row.name: row for row in table.rows}, []
    for name in dict.fromkeys(run.row for run in outcomes):
        runs = [run for run in outcomes if run.row == name]
        values: dict[str, dict[int, float]] = {}
        for run in runs:
            for answer in map(in_percent, run.answers):
                if what := metric(answer):
                    values.setdefault(what, {})[run.seed] = answer["value"]
        health = {
            "norm of A": {run.seed: run.norms[0] for run in runs if run.norms},
            "norm of m~": {run.seed: run.norms[1] for run in runs if run.norms},
            "RankMe": {run.seed: run.rank for run in runs if run.rank is not None},
        }
        row = rows.get(name, Row(name, {}))  # a given checkpoint is no row of the table
        found.append(Line(row, table.quoted(name, printed(arch)), values, health, runs))
    return found


def metric(answer: Answer) -> str | None:
    """Name of the column of an answer; None if it is not shown."""
    if answer["protocol"] == "tracking":
        return answer["name"] if answer["name"] in TRACKED else None
    if answer["name"] != "accuracy":
        return None
    label = "" if answer["label"] == "class" else answer["label"]
    chosen = "(paper)" if answer.get("selection") == "paper" else ""
    return " ".join(filter(None, [answer["protocol"], label, answer.get("on", ""), chosen]))


def metrics(found: Sequence[Line]) -> list[str]:
    """All columns, with the metric of the paper's ablations first."""
    names = dict.fromkeys(what for line in found for what in line.values)
    return sorted(names, key=lambda name: not name.startswith("lowshot"))


def random_init(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Metrics of the first row's network before training; other rows may have other networks."""
    found: dict[str, float] = {}
    for run in outcomes:
        for answer in map(in_percent, run.answers):
            if "random_init" in answer and (what := metric(answer)):
                found.setdefault(what, answer["random_init"])
    return found
