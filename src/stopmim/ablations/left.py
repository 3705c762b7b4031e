"""What is left to run of the paper's tables, with the command for it and its cost."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stopmim.ablations.paper import TABLES
from stopmim.ablations.recorded import PAPER_SIGMA, Recorded, Runs, Setting, rows_from
from stopmim.ablations.table import Published, Row, Table
from stopmim.config.presets import PRESETS
from stopmim.config.schema import flatten, resolve

PAPER_PRESET = "ablation_b16_stop"
SEEDS = 3  # of a command, unless the records have others


@dataclass(frozen=True)
class Scale:
    """The setting in which rows that were not run would be run, at a known cost."""

    runs: Runs
    preset: str = "tiny_cpu_quick"
    like: Recorded | None = None  # a run with StoP in this setting, if there is any

    @classmethod
    def of(cls, runs: Runs) -> "Scale":
        """The setting of the longest evaluated run of a preset whose time is known."""
        found = [
            run
            for run in runs.values()
            if run.config.positions.kind == "stochastic"
            and run.is_plain
            and run.records[0]["answers"]
            and (preset := PRESETS.get(str(run.records[0]["preset"])))
            and preset.cost.minutes
        ]
        if not found:
            return cls(runs)
        best = min(found, key=lambda run: (-run.updates, run.config.positions.sigma != PAPER_SIGMA))
        return cls(runs, str(best.records[0]["preset"]), best)

    @property
    def seeds(self) -> int:
        return len({record["seed"] for record in self.like.records}) if self.like else SEEDS

    @property
    def options(self) -> str:
        """What the setting changes in its preset, and the data and labels that it uses."""
        if self.like is None:
            return ""
        plain, ours = (
            dict(flatten(config.model_dump(mode="json", exclude={"runtime", "seed"})))
            for config in (resolve(PRESETS[self.preset]()), self.like.config)
        )
        changed = [f"--{key} {_word(x)}" for key, x in ours.items() if plain[key] != x]
        told = " ".join(str(a.get("setting")) for r in self.like.records for a in r["answers"])
        few = re.search(r"\b(\d+)/class", told)
        data = [f"--data {self.like.source}", *([f"--few {few[1]}"] if few else [])]
        return " " + " ".join(changed + data)

    def lacks(self, table: Table) -> list[Row]:
        """Rows of a table that were not run in this setting."""
        if self.like is None:
            return list(table.rows)
        run = rows_from(table, self.like, self.runs)
        known = Setting(table, run).rows if run else set()
        return [row for row in table.rows if row.name not in known]

    def command(self, name: str, rows: Sequence[Row], evals: str = "") -> str:
        whole = len(rows) == len(TABLES[name].rows)
        chosen = "" if whole else f" --rows {' '.join(row.name for row in rows)}"
        shared = f"{chosen} --preset {self.preset}{self.options}{evals} --seeds {self.seeds}"
        return f"stopmim ablate {name}{shared}"

    def minutes(self, rows: Sequence[Row]) -> str:
        hardware = "CPU" if PRESETS[self.preset].needs.hardware == "CPU" else "GPU"
        minutes = len(rows) * self.seeds * (PRESETS[self.preset].cost.minutes or 0)
        return f"{minutes:,.0f} {hardware} minutes"


@dataclass(frozen=True)
class Left:
    """What is left to do for a table."""

    rows: Sequence[Row]  # run in no setting
    columns: Sequence[str]  # of the paper, measured in no setting
    needed: Sequence[Row]  # to be run for them
    command: str

    @classmethod
    def of(cls, name: str, found: Sequence[Setting], scale: Scale) -> "Left":
        table = TABLES[name]
        run = {row for setting in found for row in setting.rows}
        rows = [row for row in table.rows if row.name not in run]
        ours = {column for setting in found for column in setting.columns}
        columns = [
            column
            for column in table.columns
            if (part := _ours(table, column)) and not any(part in one for one in ours)
        ]
        if not found:  # said of the rows already
            columns = []
        # Records have no weights: what was not evaluated has to be trained again.
        lacking = scale.lacks(table) if rows else []
        needed = list(table.rows) if columns else lacking
        evals = {"tracking": " --eval DAVIS"}.get(table.asks, "")
        if table.asks == "transfer":
            tasks = [f"{_ours(table, column)}=DATA" for column in columns or table.columns]
            evals = f" --eval {' '.join(tasks)} --selection paper"
        return cls(rows, columns, needed, scale.command(name, needed, evals))


def _word(value: object) -> str:
    """A value of a config as one word of a command."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _ours(table: Table, column: str) -> str:
    """A part of the name that our column has for one of the paper's, where records may lack it."""
    if table.asks == "transfer":
        return column.lower().replace("/", "_")
    return "best depth" if column.endswith("best") else ""


def paper_minutes(preset: str) -> int:
    """GPU minutes of a run of the paper's size."""
    return 60 * (PRESETS[preset].cost.hours or 0)


def preset_of(line: Published) -> str | None:
    """The preset for a published line; None for methods of others."""
    kind = {"StoP": "stop", "I-JEPA": "ijepa"}.get(line.method)
    name = f"{line.arch.lower().replace('-', '_').replace('/', '')}_{kind}"
    return name if name in PRESETS else None


def minutes_of(table: Table) -> int:
    """GPU minutes of all rows, or of all lines of ours, at the paper's size."""
    if not table.published:
        return len(table.rows) * paper_minutes(PAPER_PRESET)
    return sum(paper_minutes(preset) for preset in map(preset_of, table.published) if preset)
