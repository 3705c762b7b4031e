"""What was found, for the pages: tables, numbers and figures of the records in results/.

A folder of results/ is a table, and its files are what `stopmim ablate` wrote to OUT/TABLE/records.
tables.py puts all of it into the pages.
"""

import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stability
from stopmim.ablations.lines import Line, lines, metrics, random_init
from stopmim.ablations.record import outcome_of
from stopmim.ablations.report import costs, differences, health, numbers
from stopmim.ablations.table import Row, Table
from stopmim.ablations.trial import Outcome
from stopmim.base.tables import markdown
from stopmim.evals.results import over_seeds, paired
from stopmim.insight.figures.pictures import BLOCKS, INK, SERIES, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = ("docs/results.md", "docs/results-history.md")
FIGURES = ROOT / "docs" / "figures"
COLOURS = (*SERIES, BLOCKS[4], BLOCKS[2], BLOCKS[0], BLOCKS[1])
NORMS = {"norm_A": "norm of A", "norm_mask_token": "norm of the mask token"}


@dataclass(frozen=True)
class Study:
    """A table over the records of its runs, which are in the order of its rows."""

    name: str
    table: Table
    records: Sequence[dict[str, Any]]

    @cached_property
    def outcomes(self) -> list[Outcome]:
        return [outcome_of(one) for one in self.records]

    @cached_property
    def lines(self) -> list[Line]:
        return lines(self.table, "vit_b16", self.outcomes)

    @cached_property
    def before(self) -> dict[str, float]:
        return random_init(self.outcomes)


def studies(root: Path = RESULTS) -> list[Study]:
    return [read(folder) for folder in sorted(root.glob("*/"))]


def read(folder: Path) -> Study:
    records = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    one = records[0]
    names = [*one.get("rows", ()), *(each["row"] for each in records)]
    rows = tuple(Row(name, {}) for name in dict.fromkeys(names))
    table = Table(one["about"], "", rows, one["baseline"])
    records.sort(key=lambda each: (names.index(each["row"]), each["seed"]))
    return Study(folder.name, table, records)


def all_tables(root: Path = RESULTS) -> dict[str, str]:
    """NAME, and NAME_differences, NAME_health and NAME_cost, of every study; those that exist."""
    found = dict[str, str]()
    for study in studies(root):
        tables = {
            "": numbers(study.lines, study.before),
            "_differences": differences(study.table.baseline, study.lines),
            "_health": health(study.lines),
            "_cost": costs(study.lines),
        }
        if study.name == stability.NAME:
            runs = stability.grid(study.records, study.outcomes)
            tables |= {"": stability.rates(runs), "_differences": stability.differences(runs)}
            tables["_verdicts"] = stability.verdicts(runs)
        found |= {f"{study.name}{what}": markdown(rows) for what, rows in tables.items() if rows}
    return found


def all_numbers(root: Path = RESULTS) -> dict[str, str]:
    """What a sentence may quote: ``TABLE.ROW.METRIC.mean`` and the like, as the tables have it."""
    found = dict[str, str]()
    for study in studies(root):
        base = next((line for line in study.lines if line.name == study.table.baseline), None)
        for line in study.lines:
            ours = dict[str, tuple[Any, str]]()  # value, and how it is written
            for metric in metrics(study.lines):
                for what, sign, estimate in (
                    ("mean", "", line.estimate(metric)),
                    ("difference", "+", line.against(base, metric)),
                ):
                    mean, half, _ = estimate or (None, None, 0)
                    ours[f"{metric}.{what}"] = mean, f"{sign}.1f"
                    ours[f"{metric}.{what}.half"] = half, ".1f"
            for key, form, value in (
                ("norm_A", ".3f", line.estimate("norm of A")),
                ("norm_mask_token", ".3f", line.estimate("norm of m~")),
                ("rank", ".1f", line.estimate("RankMe")),
            ):
                ours[key] = value and value.mean, form
            if loss := ending(study, line.name):
                ours["loss"] = over_seeds(list(loss.values())).mean, ".4f"
            if less := paired(loss, ending(study, study.table.baseline)):
                ours["loss.difference"] = less.mean, "+.4f"
                ours["loss.difference.half"] = less.half, ".4f"
            timed = [run.seconds / 60 for run in line.runs if run.seconds]
            ours["minutes"] = over_seeds(timed).mean if timed else None, ".1f"
            ours["updates"] = line.runs[0].updates, ",d"
            ours["seeds"] = len(line.runs), "d"
            own = f"{study.name}.{line.name}"
            found |= {f"{own}.{k}": f"{v:{form}}" for k, (v, form) in ours.items() if v is not None}
        found |= {f"{study.name}.random init.{k}": f"{v:.1f}" for k, v in study.before.items()}
        if study.name == stability.NAME:
            told = stability.numbers(stability.grid(study.records, study.outcomes))
            found |= {f"{study.name}.{key}": value for key, value in told.items()}
    return found


def ending(study: Study, row: str) -> dict[int, float]:
    """By seed, the mean loss in the last quarter of the training curve."""
    found = {}
    for one in study.records:
        late = [line for line in one["curve"] if line["step"] > 0.75 * one["updates"]]
        logged = [line["loss"] for line in late if "loss" in line]
        if one["row"] == row and logged:
            found[one["seed"]] = sum(logged) / len(logged)
    return found


# ------------------------------------------------------------------------------ the figures


def all_figures(root: Path = RESULTS) -> dict[str, str]:
    """Name of a file in docs/figures to its SVG."""
    draw = {"norms": norms, "accuracy": accuracy, "grid": grid}
    return {
        f"results-{study.name}-{what}.svg": svg(draw[what](study), data(study, what))
        for study in studies(root)
        for what in figures(study)
    }


def figures(study: Study) -> list[str]:
    """What is drawn: the figures that a page of results shows."""
    text = "".join((ROOT / page).read_text() for page in PAGES)
    return [w for w in ("norms", "accuracy", "grid") if f"results-{study.name}-{w}.svg" in text]


def data(study: Study, what: str) -> str:
    """Equal for equal figures, whatever version of matplotlib draws them."""
    shown: list[Any]
    if what == "norms":
        shown = [[each["row"], points(each, key)] for key in NORMS for each in study.records]
    elif what == "accuracy":
        shown = [[line.name, line.values, study.before] for line in study.lines]
    else:
        shown = stability.grid(study.records, study.outcomes)
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def points(record: dict[str, Any], key: str) -> list[tuple[float, float]]:
    """Epoch and value, along the curve."""
    return [(line["epoch"], line[key]) for line in record["curve"] if key in line]


@house_style()
def svg(figure: "Figure", fingerprint: str) -> str:
    """The file, which says what data it was drawn from, and is the same when drawn again."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = fingerprint
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator"))
    figure.savefig(text, format="svg", metadata={"Description": f"data {fingerprint}", **nothing})
    return re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.M)


@house_style()
def norms(study: Study) -> "Figure":
    """Over training, a line per row: the mean over its seeds, and every seed behind it."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.6, 3.0), layout="constrained")
    for axes, (key, title) in zip(picture.subplots(1, 2), NORMS.items(), strict=True):
        for i, line in enumerate(study.lines):
            every = [points(each, key) for each in study.records if each["row"] == line.name]
            seeds = [dict(one) for one in every if one]
            dashes = ("-", "--", ":")[i // len(COLOURS) % 3]
            look = {"color": COLOURS[i % len(COLOURS)], "linestyle": dashes}
            for one in seeds:
                axes.plot([*one], [*one.values()], linewidth=0.5, alpha=0.4, **look)
            if seeds:  # a run that ended early was thinned to other lines
                epochs = sorted(set.intersection(*map(set, seeds)))
                mean = [over_seeds([one[epoch] for one in seeds]).mean for epoch in epochs]
                axes.plot(epochs, mean, linewidth=1.6, label=line.name, **look)
        _plain(axes, title, "y")
        axes.set_xlabel("epoch")
    handles, names = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return picture


@house_style()
def accuracy(study: Study) -> "Figure":
    """A panel per question, a line per row that was asked: mean, interval, every seed a dot."""
    from matplotlib.figure import Figure

    shown = [line for line in study.lines if any(line.values.values())]
    names, asked = [line.name for line in shown], metrics(shown)
    rows = -(-len(asked) // 2)
    picture = Figure(figsize=(6.6, rows * (0.8 + 0.22 * len(names))), layout="constrained")
    grid: Any = picture.subplots(rows, 2, squeeze=False, sharey=True)
    for axes in grid.flat[len(asked) :]:
        axes.set_axis_off()
    for axes, metric in zip(grid.flat, asked, strict=False):
        for i, line in enumerate(shown):
            values = [*line.values.get(metric, {}).values()]
            if values:
                mean, half, n = over_seeds(values)
                axes.plot(values, [i] * n, ".", color=COLOURS[0], alpha=0.5, markersize=4)
                axes.errorbar(mean, i, xerr=half, fmt="o", color=COLOURS[0], markersize=4)
        if metric in study.before:
            axes.axvline(study.before[metric], color=INK, linewidth=0.9, linestyle=":")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel("percent; dotted: random init" if metric in study.before else "percent")
        _plain(axes, metric, "x")
    return picture


def grid(study: Study) -> "Figure":
    return stability.figure(stability.grid(study.records, study.outcomes))


def _plain(axes: Any, title: str, grid: str) -> None:
    axes.set_title(title, size=9)
    axes.grid(axis=grid, linewidth=0.7)
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)


# ------------------------------------------------------------------------------ what people type

_COMPUTED = re.compile(r"<!-- (?:table|number): .*? -->.*?<!-- end -->", re.S)
_QUOTED = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.S | re.M)


def typed_decimals(page: str) -> list[str]:
    """Numbers with a point that are neither computed nor code: nobody would notice them go stale.

    Versions, as 2.13.0, are none.
    """
    text = _QUOTED.sub(" ", _COMPUTED.sub(" ", page))
    return re.findall(r"(?<![\w.])\d+\.\d+(?!\.?\d)", text)
