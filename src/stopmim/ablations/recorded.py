"""Recorded runs of a table's rows, found by their configs and not by names.

A row applied to the config of a recorded run gives another config. If that was run on the same
images too, it is this row in the same setting. So a new record finds its place by itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stopmim.ablations.lines import HEALTH, Line, lines, metric, metrics
from stopmim.ablations.questions import ASKED, is_scenes
from stopmim.ablations.record import Record, outcome_of
from stopmim.ablations.report import with_interval
from stopmim.ablations.run import identity
from stopmim.ablations.table import Row, Table
from stopmim.ablations.trial import Outcome
from stopmim.base.errors import UserError
from stopmim.config.architectures import printed
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config, PositionsConfig, override, resolve
from stopmim.runs.verdict import in_percent

NOT_RUN = "not run"
PAPER_SIGMA = resolve(Config()).positions.sigma  # its settings come first
Cells = dict[str, str]


# ------------------------------------------------------------------------------ recorded runs


@dataclass(frozen=True)
class Recorded:
    """A config trained on some images, with the records of all seeds and evaluations."""

    config: Config
    records: Sequence[Record]

    @property
    def updates(self) -> int:
        return max(int(record["updates"]) for record in self.records)

    @property
    def is_plain(self) -> bool:
        """Whether positions are default but for kind and sigma: only such runs can be a base."""
        own = self.config.positions
        return own == PositionsConfig(kind=own.kind, sigma=own.sigma)

    @property
    def source(self) -> str:
        return str(self.records[0]["data"]["source"])

    def outcomes(self, row: str, table: Table) -> Iterator[Outcome]:
        """Yields one per seed, with the answers from all of its records that the table asks for."""
        for seed in sorted({record["seed"] for record in self.records}):
            own = [record for record in self.records if record["seed"] == seed]
            answers = [a for record in own for a in _asked(table, record)]
            yield replace(outcome_of(own[0]), row=row, answers=answers)


Runs = Mapping[str, Recorded]  # by identity, whatever the seed


def recorded(records: Sequence[Record]) -> Runs:
    """All runs that `records` are about, the longest first."""
    found: dict[str, Recorded] = {}
    for record in records:
        if record["config"] is not None:  # else a foreign checkpoint
            config = Config.model_validate_json(json.dumps(record["config"]))
            config = resolve(override(config, {"seed": 0}))
            key = identity(config, _data(record))
            known = found[key].records if key in found else ()
            found[key] = Recorded(config, [*known, record])
    return dict(sorted(found.items(), key=lambda item: -item[1].updates))


def evaluated(records: Sequence[Record], table: Table) -> dict[str, str]:
    """Numbers of foreign checkpoints (``--checkpoint NAME=FILE``), by name."""
    found: dict[str, str] = {}
    for record in records:
        if record["config"] is None:
            answers = [in_percent(a) for a in record["answers"] if metric(a)]
            asked = [a for a in answers if a["protocol"].split()[0] in protocols_of(table)]
            if asked:
                values = (f"{metric(a)} {a['value']:.1f}" for a in asked)
                found[record["row"]] = ", ".join(values)
    return found


def protocols_of(table: Table) -> tuple[str, ...]:
    return ASKED[table.asks][0] if table.asks in ASKED else (table.asks,)


def _data(record: Record) -> str:
    data = record["data"]
    return str(data.get("fingerprint", data["source"]))


def _asked(table: Table, record: Record) -> Iterator[dict[str, Any]]:
    """Yields the answers of a record to the questions of a table, on its images."""
    shallow = table.asks in ASKED and ASKED[table.asks][1] == "last"
    for answer in record["answers"]:
        name, depth = [*answer["protocol"].split(" ", 1), ""][:2]
        if name not in protocols_of(table) or (depth == "last4" and shallow):
            continue
        if name == "tracking":
            yield answer
            continue
        on, source = str(answer["test_data"]).split(" (")[0], str(record["data"]["source"])
        same = (is_scenes(on) and is_scenes(source)) or on == source
        if same != (table.asks == "transfer"):
            named = answer.get("on") or answer.get("options", {}).get("recipe") or Path(on).stem
            yield answer if same else answer | {"on": named}


# ------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Setting:
    """Rows of a table that were run under equal conditions: base, images, kind of evaluation."""

    table: Table
    runs: Mapping[str, Recorded]  # by the name of the row

    @cached_property
    def lines(self) -> Mapping[str, Line]:
        outcomes = [o for row, run in self.runs.items() for o in run.outcomes(row, self.table)]
        return {line.name: line for line in lines(self.table, self.run.config.arch, outcomes)}

    @property
    def columns(self) -> list[str]:
        found = list(self.lines.values())
        return [*self.table.measures, *metrics(found)]

    @cached_property
    def rows(self) -> set[str]:
        """Names of the rows that have any measurement, or failed."""
        return {
            name
            for name, line in self.lines.items()
            if any(map(line.per_seed, self.columns)) or any(run.problem for run in line.runs)
        }

    @property
    def updates(self) -> int:
        return max(run.updates for run in self.runs.values())

    @property
    def sigma(self) -> float | None:
        """The variance of the noise, if it is the same in all rows that have noise."""
        found = {run.config.positions.sigma for run in self.runs.values()} - {None}
        return found.pop() if len(found) == 1 else None

    @property
    def run(self) -> Recorded:
        """The run of a row, which has what all rows share."""
        return next(iter(self.runs.values()))

    @property
    def arch(self) -> str:
        return printed(self.run.config.arch)

    @property
    def preset(self) -> str:
        return str(self.run.records[0]["preset"])

    def __str__(self) -> str:
        config, sigma = self.run.config, "" if self.sigma is None else f", sigma {self.sigma:g}"
        answers = [a for line in self.lines.values() for o in line.runs for a in o.answers]
        on = ", ".join(_on(answers))
        return (
            f"{self.arch} at {config.image_size} px, preset `{self.preset}`{sigma}, "
            f"{config.optim.epochs} epochs of `{self.run.source}` ({self.updates:,} updates)"
            f"{f', evaluated on {on}' if on else ''}"
        )

    def cells(self, row: Row) -> Cells:
        """Means over seeds, with their intervals and the paired differences to the baseline."""
        line, base = self.lines.get(row.name), self.lines.get(self.table.baseline)
        if line is None or not any(map(line.per_seed, self.columns)):
            problems = {run.problem for run in line.runs} - {""} if line else set()
            reason = "; ".join(sorted(problems)) or NOT_RUN
            return dict.fromkeys(self.columns, reason) | {"seeds": ""}
        cells = {}
        for name in self.columns:
            digits, gain = HEALTH.get(name, 1), with_interval(line.against(base, name), "+")
            value = with_interval(line.estimate(name), digits=digits)
            cells[name] = value if gain == "-" else f"{value} ({gain})"
        seeds = sorted({len(line.per_seed(name)) for name in self.columns} - {0})
        return cells | {"seeds": " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))}


def _on(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The images and videos that the answers are about, with their size unless unknown."""
    found: dict[str, str] = {}
    for answer in sorted(answers, key=lambda answer: "size" in answer):
        name = str(answer.get("videos") or answer["test_data"])
        size = f" at {answer['size']} px" if "size" in answer else ""
        found[name] = f"{name}{size} ({answer['n']} videos)" if "videos" in answer else name
    return list(found.values())


def settings(table: Table, runs: Runs) -> list[Setting]:
    """Settings that show the rows, each with a row that the settings before it lack.

    Rows of an architecture that the paper has a line for count separately. Pairs come before single
    rows, presets of the package before others, long training before short, and the paper's sigma
    before others.
    """
    found = {
        frozenset((row, id(one)) for row, one in rows.items()): Setting(table, rows)
        for run in runs.values()
        if (rows := rows_from(table, run, runs))
    }

    def place(one: Setting) -> tuple[bool, bool, int, bool]:
        others = one.preset not in PRESETS, -one.updates, one.sigma != PAPER_SIGMA
        return len(one.rows) < 2, *others

    whole = [one for key, one in found.items() if not any(key < other for other in found)]
    published = {line.arch for line in table.published}
    shown, known = list[Setting](), set[tuple[str, str]]()
    for one in sorted(whole, key=place):
        own = {(one.arch if one.arch in published else "", row) for row in one.rows}
        if own - known:
            shown.append(one)
            known |= own
    return shown


def rows_from(table: Table, run: Recorded, runs: Runs) -> dict[str, Recorded]:
    """The rows of `table` that were run with `run` as their preset."""
    base, found, data = run.config, dict[str, Recorded](), _data(run.records[0])
    if not run.is_plain:
        return {}
    for row in table.rows:
        try:
            key = identity(resolve(override(base, row.of(base))), data)
        except UserError:  # the row does not fit this preset
            continue
        if key in runs:
            found[row.name] = runs[key]
    return found
