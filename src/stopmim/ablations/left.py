"""Rows of the paper's tables that are left to run, with the command for them and its cost."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stopmim.ablations.paper import TABLES
from stopmim.ablations.recorded import PAPER_SIGMA, Recorded, Runs, Setting, rows_from
from stopmim.ablations.table import Published, Row, Table
from stopmim.config.presets import PRESETS, Preset
from stopmim.config.schema import flatten, resolve

PAPER_PRESET = "ablation_b16_stop"
SEEDS = 3  # for a command, unless the records have another number


@dataclass(frozen=True)
class Scale:
    """The setting in which missing rows would be run, at a known cost."""

    runs: Runs
    preset: str = "tiny_cpu_quick"
    like: Recorded | None = None  # a run with StoP in this setting, if there is any

    @classmethod
    def of(cls, runs: Runs) -> "Scale":
        """The setting of the longest evaluated run whose time is that of its preset."""
        found = [run for run in runs.values() if run.records[0]["answers"] and _has_known_cost(run)]
        if not found:
            return cls(runs)
        best = min(found, key=lambda run: (-run.updates, run.config.positions.sigma != PAPER_SIGMA))
        return cls(runs, str(best.records[0]["preset"]), best)

    @property
    def seeds(self) -> int:
        return len({record["seed"] for record in self.like.records}) if self.like else SEEDS

    @property
    def options(self) -> str:
        """Command-line options of the setting: changes to its preset, data and labels."""
        if self.like is None:
            return ""
        changed = [f"--{key} {x}" for key, x in _changes(self.like, PRESETS[self.preset]).items()]
        used = " ".join(str(a.get("setting")) for r in self.like.records for a in r["answers"])
        few = re.search(r"\b(\d+)/class", used)
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
    """The work that is left for a table."""

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
        if not found:  # all rows are listed already
            columns = []
        # Records have no weights: what was not evaluated has to be trained again.
        lacking = scale.lacks(table) if rows else []
        needed = list(table.rows) if columns else lacking
        evals = {"tracking": " --eval DAVIS"}.get(table.asks, "")
        if table.asks == "transfer":
            tasks = [f"{_ours(table, column)}=DATA" for column in columns or table.columns]
            evals = f" --eval {' '.join(tasks)} --selection paper"
        return cls(rows, columns, needed, scale.command(name, needed, evals))


def _changes(run: Recorded, preset: Preset) -> dict[str, Any]:
    """Keys in which the config of a run differs from its preset."""
    plain, ours = (
        dict(flatten(config.model_dump(mode="json", exclude={"runtime", "seed"})))
        for config in (resolve(preset()), run.config)
    )
    return {key: value for key, value in ours.items() if plain[key] != value}


def _has_known_cost(run: Recorded) -> bool:
    """Whether a run is its preset, up to sigma, with StoP and on as many images."""
    preset = PRESETS.get(str(run.records[0]["preset"]))
    if preset is None or not preset.cost.minutes or run.config.positions.kind != "stochastic":
        return False
    same = run.records[0]["data"].get("images") == preset.cost.images
    return same and _changes(run, preset).keys() <= {"positions.sigma"}


def _ours(table: Table, column: str) -> str:
    """Part of the name of our column for one of the paper's; "" if all records have it."""
    if table.asks == "transfer":
        return column.lower().replace("/", "_")
    return "best depth" if column.endswith("best") else ""


def paper_hours(preset: str) -> int:
    """GPU hours of a run of the paper's size."""
    return PRESETS[preset].cost.hours or 0


def preset_of(line: Published) -> str | None:
    """The preset for a published line; None for methods of others."""
    kind = {"StoP": "stop", "I-JEPA": "ijepa"}.get(line.method)
    name = f"{line.arch.lower().replace('-', '_').replace('/', '')}_{kind}"
    return name if name in PRESETS else None


def hours_of(table: Table) -> int:
    """GPU hours of all rows, or of all lines of ours, at the paper's size."""
    if not table.published:
        return len(table.rows) * paper_hours(PAPER_PRESET)
    return sum(paper_hours(preset) for preset in map(preset_of, table.published) if preset)
