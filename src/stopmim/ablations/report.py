"""The table of an ablation: rows over seeds beside the paper's numbers, as Markdown, CSV and HTML.

Times, which differ between two equal ablations, have tables and files of their own.
"""

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stopmim.ablations.lines import HEALTH, Line, lines, metrics, random_init
from stopmim.ablations.trial import Outcome, Plan
from stopmim.base import tables
from stopmim.base.console import duration
from stopmim.base.files import own_folder, replaced, write_whole
from stopmim.config.architectures import printed
from stopmim.evals.results import Estimate, over_seeds
from stopmim.insight.analyse import DPI
from stopmim.insight.figures import pictures, sweep, theory
from stopmim.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
PM = "\u00b1"
NOTE = "Percent; mean over seeds with its 95 % interval (Student's t), none for a single seed."
PAPER_NOTE = (
    " The paper's numbers are top-1 on ImageNet-1k, or what the column says, of models of other "
    "size and training: compare differences between rows, not numbers."
)
WIDTH = 80
Cells = dict[str, str]


# ------------------------------------------------------------------------------ tables


def numbers(found: Sequence[Line], before: Mapping[str, float]) -> list[Cells]:
    """Means over seeds; `before` are the metrics of the network before training."""
    rows = [
        {"row": line.name}
        | {f"paper: {c}": decimal(line.paper.get(c)) for c in _columns(found)}
        | {name: with_interval(line.estimate(name)) for name in metrics(found)}
        for line in found
    ]
    if before:
        last = {"row": "random init"} | {name: decimal(value) for name, value in before.items()}
        rows.append(dict.fromkeys(rows[0], "") | last)
    return rows


def differences(baseline: str, found: Sequence[Line]) -> list[Cells]:
    """Paired differences to the baseline; empty if it is not among the rows."""
    rows, base = [], next((line for line in found if line.name == baseline), None)
    for line in found:
        if base is None or line is base:
            continue
        gains = {c: line.paper[c] - base.paper[c] for c in line.paper if c in base.paper}
        cells = {f"paper: {c}": decimal(gains.get(c), "+") for c in _columns(found)}
        cells |= {name: with_interval(line.against(base, name), "+") for name in metrics(found)}
        rows.append({"row": line.name} | cells)
    return rows


def health(found: Sequence[Line]) -> list[Cells]:
    return [
        {"row": line.name, "seeds": str(len(line.runs)), "verdict": line.verdict}
        | {
            name: with_interval(line.estimate(name), digits=digits)
            for name, digits in HEALTH.items()
        }
        for line in found
    ]


def runs(found: Sequence[Line]) -> list[Cells]:
    """One row per run; empty if no row has several, as the other tables then show them."""
    if all(len(line.runs) < 2 for line in found):
        return []
    return [
        {"row": line.name, "seed": str(run.seed), "verdict": run.problem or run.verdict}
        | {"RankMe": decimal(run.rank)}
        | {name: decimal(line.values.get(name, {}).get(run.seed)) for name in metrics(found)}
        for line in found
        for run in line.runs
    ]


def collapse_rate(found: Sequence[Line]) -> str:
    """A sentence with the share of runs that collapsed; "" if the doctor has judged none."""
    judged = sum(len(line.judged) for line in found)
    if not judged:
        return ""
    collapsed = sum(line.collapsed for line in found)
    share = f"{collapsed} of {judged} runs ({100 * collapsed / judged:.0f} %)"
    return f"Collapsed, in full or in part: {share}."


def costs(found: Sequence[Line]) -> list[Cells]:
    rows = []
    for line in found:
        if timed := [run for run in line.runs if run.seconds]:
            seconds = over_seeds([run.seconds for run in timed]).mean
            rate = over_seeds([run.updates / run.seconds for run in timed]).mean
            cells = {"row": line.name, "updates": f"{timed[0].updates:,}"}
            rows.append(cells | {"time": duration(seconds), "updates/s": f"{rate:.2f}"})
    return rows


def all_digits(
    planned: Plan, found: Sequence[Line], before: Mapping[str, float]
) -> list[dict[str, object]]:
    """Rows of table.csv: one per row and metric, with all digits, for programs."""
    rows, baseline = [], planned.table.baseline
    base = next((line for line in found if line.name == baseline), None)
    for line, name in itertools.product(found, metrics(found)):
        cells: dict[str, object] = {"table": planned.name, "row": line.name, "metric": name}
        estimates = {"": line.estimate(name), "difference_": line.against(base, name)}
        for key, estimate in estimates.items():
            mean, half, n = estimate or (None, None, 0)
            cells |= {f"{key}mean": mean, f"{key}half": half, f"{key}seeds": n}
        cells |= {"random_init": before.get(name), "verdict": line.verdict}
        cells |= {"runs": len(line.judged), "collapsed": line.collapsed}
        for key, measure in (
            ("norm_A", "norm of A"),
            ("norm_mask_token", "norm of m~"),
            ("rankme", "RankMe"),
        ):
            cells[key] = (line.estimate(measure) or [None])[0]
        rows.append(cells | {"paper": json.dumps(line.paper) if line.paper else None})
    return rows


def _columns(found: Sequence[Line]) -> list[str]:
    """Names of the paper's numbers that any row has."""
    return list(dict.fromkeys(column for line in found for column in line.paper))


def decimal(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1f}"


def with_interval(estimate: Estimate | None, sign: str = "", digits: int = 1) -> str:
    if estimate is None:
        return "-"
    half = "" if estimate.half is None else f" {PM} {estimate.half:.{digits}f}"
    return f"{estimate.mean:{sign}.{digits}f}{half}"


# ------------------------------------------------------------------------------ files


def write_report(planned: Plan, outcomes: Sequence[Outcome]) -> Path:
    """Writes table.md, table.csv, cost.csv, results.jsonl, figures and table.html, the page."""
    folder, table = own_folder(planned.out / planned.name), planned.table
    found, before = lines(table, planned.base.arch, outcomes), random_init(outcomes)
    drawn = figures(planned, found, before)
    for name, figure in drawn.items():
        with pictures.house_style():
            with replaced(folder / f"{name}.png") as temporary:
                figure.savefig(temporary, dpi=DPI)
            with replaced(folder / f"{name}.svg") as temporary:
                figure.savefig(temporary, metadata={"Date": None})
    sections = {
        "Results": numbers(found, before),
        f"Difference to {table.baseline}, seed by seed": differences(table.baseline, found),
        "Health": health(found),
        "Runs": runs(found),
        "As published": [
            {"method": p.method, "architecture": p.arch}
            | ({"epochs": str(p.epochs or "-")} if table.published[0].epochs else {})
            | {column: decimal(p.numbers.get(column)) for column in table.columns}
            for p in table.published
        ],
        "Cost": costs(found),
    }
    sections = {title: rows for title, rows in sections.items() if rows}
    about = {"table": planned.name, "preset": planned.preset, "data": planned.data}
    results = "".join(json.dumps(about | asdict(run)) + "\n" for run in outcomes)
    write_whole(folder / "results.jsonl", results)
    write_whole(folder / "table.csv", as_csv(all_digits(planned, found, before)))
    write_whole(folder / "cost.csv", as_csv(costs(found)))
    below = notes(planned, found)
    write_whole(folder / "table.md", as_markdown(planned, sections, below))
    write_whole(folder / "table.html", as_page(planned, sections, below, drawn))
    return folder / "table.html"


def terminal(planned: Plan, outcomes: Sequence[Outcome]) -> str:
    """Results and health as aligned text; a table too wide for a terminal is transposed."""
    found = lines(planned.table, planned.base.arch, outcomes)
    shown = numbers(found, random_init(outcomes)), health(found)
    return "\n\n".join(filter(None, [*map(_fitting, shown), collapse_rate(found)]))


def _fitting(rows: Sequence[Cells]) -> str:
    text = tables.aligned(rows)
    if max(map(len, text.splitlines())) <= WIDTH:
        return text
    names = [name for name in rows[0] if name != "row"]
    return tables.aligned([{"": n} | {row["row"]: row[n] for row in rows} for n in names])


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file.getvalue()


def as_markdown(
    planned: Plan, sections: Mapping[str, Sequence[Cells]], below: Mapping[str, str]
) -> str:
    """All tables, each with the note that `below` has for it."""
    parts = [f"# {planned.name}: {planned.table.about}"]
    parts += ["\n".join(f"- {name}: {value}" for name, value in _facts(planned).items())]
    for title, rows in sections.items():
        parts += [f"## {title}", tables.markdown(rows)]
        parts += filter(None, [below.get(title)])
    return "\n\n".join(parts) + "\n"


def as_page(
    planned: Plan,
    sections: Mapping[str, Sequence[Cells]],
    below: Mapping[str, str],
    drawn: Mapping[str, "Figure"],
) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("ablation.html").render(
        name=planned.name,
        table=planned.table,
        facts=_facts(planned),
        tables=sections,
        notes=below,
        figures={name: Markup(pictures.svg(figure, name)) for name, figure in drawn.items()},
        css=Markup((HERE.parent / "base" / "page.css").read_text(encoding="utf-8")),
    )


def notes(planned: Plan, found: Sequence[Line]) -> dict[str, str]:
    """Notes below the tables, by their titles."""
    results = [NOTE + (PAPER_NOTE if planned.table.columns else ""), planned.table.note]
    return {"Results": " ".join(filter(None, results)), "Health": collapse_rate(found)}


def _facts(planned: Plan) -> Cells:
    seeds = sorted({trial.seed for trial in planned.trials if trial.config})
    asked = []
    for q in planned.trials[0].questions:
        sources = [q.request.get(key) for key in ("data", "videos", "train", "test")]
        asked.append(f"{', '.join(q.protocols)} on {q.on or ' and '.join(filter(None, sources))}")
    trained = {
        "preset": planned.preset,
        "network": f"{printed(planned.base.arch)}, {planned.base.image_size} px",
        "pretrained on": planned.data,
        "seeds" if len(seeds) != 1 else "seed": ", ".join(map(str, seeds)),
    }
    about = {"in the paper": planned.table.source} | (trained if planned.trains else {})
    return about | {"evaluated": "; ".join(asked)}


# ------------------------------------------------------------------------------ figures


def figures(
    planned: Plan, found: Sequence[Line], before: Mapping[str, float]
) -> dict[str, "Figure"]:
    """Accuracy and norms of rows along their axes; for `tie`, the norm of A over training.

    Lines whose axes differ in meaning have panels of their own, side by side at the same height.
    """
    axes = planned.table.axes

    def panels(what: str, title: str = "", level: float | None = None) -> list[sweep.Panel]:
        points = [
            (line.row.line, sweep.Point(line.row.x, line.per_seed(what)))
            for line in found
            if line.row.x is not None
        ]
        lines = sweep.along(points)
        return [
            sweep.Panel(
                title or what, axis, {n: p for n, p in lines.items() if axes[n] == axis}, level
            )
            for axis in dict.fromkeys(axes[name] for name in lines)
        ]

    accuracy = [panel for name in metrics(found) for panel in panels(name, level=before.get(name))]
    norms = [*panels("norm of A"), *panels("norm of m~", "norm of the mask token")]
    drawn = {
        name: sweep.figure(several)
        for name, several in (("accuracy", accuracy), ("norms", norms))
        if several
    }
    if planned.name == "tie":
        runs = [Run(path) for path, t in planned.runs.items() if t.answers() is not None]
        drawn["collapse"] = theory.collapse(runs)
    return drawn
