"""Tables of results: aligned text for a terminal, Markdown, one HTML page, JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stopmim.base.files import write_whole
from stopmim.base.tables import aligned, markdown
from stopmim.evals.compare import Comparison
from stopmim.evals.results import Result

HERE = Path(__file__).parent
RIGHT = {"random", "value", "95 % interval", "n", "A", "B", "B - A", "p"}
CHOSEN = {"none": "-", "held-out": "train", "paper": "test"}


def rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """One row per result."""
    table = []
    for r in results:
        scale = 1 if r.name == "rankme" else 100  # everything but the effective rank is a fraction
        named = r.name in ("accuracy", r.protocol)
        row = {
            "protocol": r.protocol if named else f"{r.protocol} {r.name}",
            "of": r.label,
            "random": "" if r.random_init is None else f"{scale * r.random_init:.1f}",
            "value": f"{scale * r.value:.1f}",
            "95 % interval": " to ".join(f"{scale * end:.1f}" for end in r.interval or ()),
            "n": f"{r.n:,}",
            "chosen": CHOSEN[r.selection],
            "setting": r.setting or "",
        }
        table.append(row)
    return table


def compared(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """One row per comparison."""
    return [
        {
            "protocol": c.protocol,
            "of": c.label,
            "A": f"{100 * c.a:.1f}",
            "B": f"{100 * c.b:.1f}",
            "B - A": f"{100 * c.difference:+.1f}",
            "95 % interval": f"{100 * c.interval[0]:+.1f} to {100 * c.interval[1]:+.1f}",
            "p": f"{c.p:.2g}",
            "n": f"{c.n:,}",
        }
        for c in comparisons
    ]


def text(table: Sequence[Mapping[str, str]]) -> str:
    """Aligned text; empty columns are left out."""
    return aligned(table, RIGHT) if table else "no results"


def write_pages(
    folder: Path, results: Sequence[Result], title: str, facts: Mapping[str, Any]
) -> Path:
    """Writes evaluation.md, .json and a self-contained .html to `folder`; returns the latter."""
    table = rows(results)
    tree = {"title": title, **facts, "results": [result.as_dict() for result in results]}
    write_whole(folder / "evaluation.json", json.dumps(tree, indent=1))
    heading = f"# {title.replace(chr(10), ' ')}"
    write_whole(folder / "evaluation.md", f"{heading}\n\n{markdown(table, RIGHT)}\n")
    loader = FileSystemLoader(HERE)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    css = (HERE.parent / "base" / "page.css").read_text(encoding="utf-8")
    template, path = environment.get_template("table.html"), folder / "evaluation.html"
    write_whole(path, template.render(title=title, facts=facts, rows=table, right=RIGHT, css=css))
    return path
