"""The table of an ablation: numbers over seeds beside the paper's, as Markdown, CSV and one page.

Formats only. What can differ between two equal ablations, time, is in tables of its own.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stopmim.ablations.lines import Line, lines, metrics, untrained
from stopmim.ablations.paper import printed
from stopmim.base.console import duration
from stopmim.base.files import write_whole
from stopmim.evals.statistics import Estimate, over_seeds
from stopmim.evals.table import text
from stopmim.insight.analyse import DPI
from stopmim.insight.figures import collapse, pictures, sweep
from stopmim.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stopmim.ablations.run import Outcome, Plan

HERE = Path(__file__).parent
PM = "\u00b1"
NOTE = (
    "Percent; mean over seeds with its 95 % interval over seeds (Student's t), none for one seed."
)
OF_THE_PAPER = (
    " The paper's numbers are top-1 on ImageNet-1k or what the column says, of models of other "
    "size and training: compare differences between rows, not numbers."
)
Cells = dict[str, str]


def write(planned: "Plan", outcomes: Sequence["Outcome"]) -> Path:
    """table.md, table.csv, cost.csv, results.jsonl, figures and table.html; where the page is."""
    folder = planned.out / planned.name
    folder.mkdir(parents=True, exist_ok=True)
    found, before = lines(planned.table, planned.base.arch, outcomes), untrained(outcomes)
    drawn = figures(planned, found, before)
    for name, figure in drawn.items():
        with pictures.house_style():
            figure.savefig(folder / f"{name}.png", dpi=DPI)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    tables = {
        "Results": numbers(found, before),
        f"Difference to {planned.table.baseline}, seed by seed": differences(
            planned.table.baseline, found
        ),
        "Health": health(found),
        "As published": published(planned),
        "Cost": costs(found),
    }
    tables = {title: rows for title, rows in tables.items() if rows}
    write_whole(folder / "results.jsonl", "".join(result(planned, run) for run in outcomes))
    write_whole(folder / "table.csv", as_csv(long(planned, found, before)))
    write_whole(folder / "cost.csv", as_csv(costs(found)))
    write_whole(folder / "table.md", markdown(planned, tables))
    write_whole(folder / "table.html", page(planned, tables, drawn))
    return folder / "table.html"


# ------------------------------------------------------------------------------ the tables


def shown(estimate: Estimate | None, sign: str = "", digits: int = 1) -> str:
    if estimate is None:
        return "-"
    half = "" if estimate.half is None else f" {PM} {estimate.half:.{digits}f}"
    return f"{estimate.mean:{sign}.{digits}f}{half}"


def numbers(found: Sequence[Line], before: Mapping[str, float]) -> list[Cells]:
    names, paper = metrics(found), _quoted(found)
    rows = [
        {"row": line.name}
        | {f"paper: {c}": f"{line.paper[c]:.1f}" if c in line.paper else "-" for c in paper}
        | {name: shown(line.estimate(name)) for name in names}
        for line in found
    ]
    if before:
        blank = dict.fromkeys(rows[0], "")
        rows.append(
            blank | {"row": "random init"} | {name: f"{before[name]:.1f}" for name in before}
        )
    return rows


def _quoted(found: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(column for line in found for column in line.paper))


def differences(baseline: str, found: Sequence[Line]) -> list[Cells]:
    base = next((line for line in found if line.name == baseline), None)
    if base is None:
        return []
    rows = [
        {"row": line.name}
        | {
            f"paper: {c}": f"{line.paper[c] - base.paper[c]:+.1f}"
            if c in line.paper and c in base.paper
            else "-"
            for c in _quoted(found)
        }
        | {name: shown(line.against(base, name), "+") for name in metrics(found)}
        for line in found
        if line is not base
    ]
    return rows


def health(found: Sequence[Line]) -> list[Cells]:
    return [
        {"row": line.name, "seeds": str(len(line.runs)), "verdict": line.verdict}
        | {"norm of A": shown(line.norm(0), digits=3), "norm of m~": shown(line.norm(1), digits=3)}
        | {"RankMe": shown(line.rank)}
        for line in found
    ]


def published(planned: "Plan") -> list[Cells]:
    columns = planned.table.columns
    return [
        {"method": p.method, "architecture": p.arch}
        | {c: f"{p.numbers[c]:.1f}" if c in p.numbers else "-" for c in columns}
        for p in planned.table.published
    ]


def costs(found: Sequence[Line]) -> list[Cells]:
    rows = []
    for line in found:
        timed = [run for run in line.runs if run.seconds]
        if timed:
            seconds = over_seeds([run.seconds for run in timed]).mean
            rate = over_seeds([run.updates / run.seconds for run in timed]).mean
            cells = {"row": line.name, "updates": f"{timed[0].updates:,}"}
            rows.append(cells | {"time": duration(seconds), "updates/s": f"{rate:.2f}"})
    return rows


def long(planned: "Plan", found: Sequence[Line], before: Mapping[str, float]) -> list[Cells]:
    """One line per row and metric, with all digits: for programs."""
    base = next((line for line in found if line.name == planned.table.baseline), None)
    rows = []
    for line in found:
        for name in metrics(found):
            own = line.estimate(name)
            gain = line.against(base, name) if base else None
            cells: dict[str, object] = {"table": planned.name, "row": line.name, "metric": name}
            for key, estimate in (("", own), ("difference_", gain)):
                mean, half, n = estimate or (None, None, 0)
                cells |= {f"{key}mean": mean, f"{key}half": half, f"{key}seeds": n}
            cells |= {"random_init": before.get(name), "verdict": line.verdict}
            norms = [line.norm(which) for which in (0, 1)]
            cells |= {"norm_A": norms[0] and norms[0].mean}
            cells |= {"norm_mask_token": norms[1] and norms[1].mean}
            cells |= {"paper": json.dumps(line.paper) if line.paper else None}
            rows.append({key: "" if v is None else str(v) for key, v in cells.items()})
    return rows


def result(planned: "Plan", run: "Outcome") -> str:
    """A line of results.jsonl."""
    tree = {"table": planned.name, "preset": planned.preset, "data": planned.data}
    return json.dumps(tree | asdict(run)) + "\n"


# ------------------------------------------------------------------------------ as files


def note(planned: "Plan") -> str:
    """How to read the main table; of the paper's numbers only where it has some."""
    return NOTE + (OF_THE_PAPER if planned.table.columns else "")


def facts(planned: "Plan") -> Cells:
    seeds = sorted({entry.seed for entry in planned.entries if entry.trial.config})
    return {
        "in the paper": planned.table.source,
        "preset": planned.preset,
        "network": f"{printed(planned.base.arch)}, {planned.base.image_size} px",
        "pretrained on": planned.data,
        "seeds" if len(seeds) != 1 else "seed": ", ".join(map(str, seeds)) or "-",
        "asked": "; ".join(
            f"{', '.join(q.protocols)} on {q.on or _source(q.request)}"
            for q in planned.entries[0].trial.questions
        ),
    }


def _source(request: Mapping[str, object]) -> str:
    known = [request.get(key) for key in ("data", "videos", "train", "test")]
    return " and ".join(str(one) for one in known if one)


def as_csv(rows: Sequence[Cells]) -> str:
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file.getvalue()


def as_markdown(rows: Sequence[Cells]) -> str:
    cells = [list(rows[0]), ["---"] * len(rows[0])]
    cells += [[cell.replace("|", "\\|") for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def markdown(planned: "Plan", tables: Mapping[str, Sequence[Cells]]) -> str:
    parts = [f"# {planned.name}: {planned.table.about}"]
    parts += ["\n".join(f"- {name}: {value}" for name, value in facts(planned).items())]
    for title, rows in tables.items():
        parts += [f"## {title}", as_markdown(rows)]
        if title == "Results":
            parts += [" ".join(filter(None, [note(planned), planned.table.note]))]
    return "\n\n".join(parts) + "\n"


def terminal(planned: "Plan", outcomes: Sequence["Outcome"]) -> str:
    """The main table, aligned, and the health of the runs."""
    found = lines(planned.table, planned.base.arch, outcomes)
    return f"{text(numbers(found, untrained(outcomes)))}\n\n{text(health(found))}"


def page(
    planned: "Plan", tables: Mapping[str, Sequence[Cells]], drawn: Mapping[str, "Figure"]
) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("ablation.html").render(
        name=planned.name,
        table=planned.table,
        facts=facts(planned),
        tables=tables,
        note=note(planned),
        figures={name: Markup(pictures.svg(figure, name)) for name, figure in drawn.items()},
        css=Markup((HERE.parent / "insight" / "report" / "report.css").read_text(encoding="utf-8")),
    )


# ------------------------------------------------------------------------------ the figures


def figures(
    planned: "Plan", found: Sequence[Line], before: Mapping[str, float]
) -> dict[str, "Figure"]:
    """By name: what rows along an axis have; and, where A is untied, what becomes of it."""
    rows = {row.name: row for row in planned.table.rows if row.x is not None}

    def panel(title: str, values: Mapping[str, list[float]], level: float | None) -> sweep.Panel:
        points = [
            (row.line, sweep.Point(row.x or 0.0, values[name]))
            for name, row in rows.items()
            if name in values
        ]
        return sweep.Panel(title, sweep.along(points), level)

    panels = {
        "accuracy": [
            panel(
                what,
                {n.name: list(n.values.get(what, {}).values()) for n in found},
                before.get(what),
            )
            for what in metrics(found)
        ],
        "norms": [
            panel(title, {n.name: [r.norms[i] for r in n.runs if r.norms] for n in found}, None)
            for i, title in enumerate(("norm of A", "norm of the mask token"))
        ],
    }
    drawn = {
        name: sweep.figure(some, planned.table.axis)
        for name, some in panels.items()
        if any(one.lines for one in some)
    }
    if planned.name == "tie":
        runs = [Run(path) for path, e in planned.trials.items() if e.trial.answers() is not None]
        toys = [collapse.toy(tied=tied) for tied in (True, False)]
        drawn["collapse"] = collapse.figure(toys, [collapse.of_run(run) for run in runs])
    return drawn
