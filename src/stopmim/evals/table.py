"""Results as people read them: aligned text for a terminal, Markdown, one HTML page, JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stopmim.base.files import write_whole
from stopmim.evals.compare import Comparison
from stopmim.evals.results import Result

HERE = Path(__file__).parent
COLUMNS = ("protocol", "of", "random", "value", "95 % interval", "n", "chosen", "setting")
RIGHT = {"random", "value", "95 % interval", "n", "A", "B", "B - A", "p"}
CHOSEN = {"none": "-", "held-out": "train", "paper": "test"}


def rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """One row per result, by the names of COLUMNS."""
    return [dict(zip(COLUMNS, _cells(result), strict=True)) for result in results]


def _cells(result: Result) -> tuple[str, ...]:
    def shown(x: float | None) -> str:
        # Everything but the effective rank is a share.
        return "" if x is None else f"{x:.1f}" if result.name == "rankme" else f"{100 * x:.1f}"

    name = result.protocol
    if result.name not in ("accuracy", result.protocol):
        name = f"{name} {result.name}"
    low, high = result.interval or (None, None)
    return (
        name,
        result.label,
        shown(result.random_init),
        shown(result.value),
        f"{shown(low)} to {shown(high)}" if result.interval else "",
        f"{result.n:,}",
        CHOSEN[result.selection],
        result.setting or "",
    )


def compared(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
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
    """Aligned columns, without those that are empty throughout."""
    names = [name for name in table[0] if any(row[name] for row in table)]
    wide = {name: max(len(name), *(len(row[name]) for row in table)) for name in names}
    lines = [{name: name for name in names}, *table]
    return "\n".join(
        "  ".join(
            line[name].rjust(wide[name]) if name in RIGHT else line[name].ljust(wide[name])
            for name in names
        ).rstrip()
        for line in lines
    )


def markdown(table: Sequence[Mapping[str, str]], title: str) -> str:
    names = list(table[0])
    lines = [names, ["---:" if name in RIGHT else "---" for name in names]]
    lines += [[row[name].replace("|", "\\|") for name in names] for row in table]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"# {title.replace(chr(10), ' ')}\n\n{body}\n"


def html(table: Sequence[Mapping[str, str]], title: str, facts: Mapping[str, Any]) -> str:
    """One page that needs nothing else, light or dark as the reader has it."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined
    )
    css = (HERE.parent / "base" / "page.css").read_text(encoding="utf-8")
    page = environment.get_template("table.html")
    return page.render(title=title, facts=facts, rows=table, right=RIGHT, css=css)


def write(folder: Path, results: Sequence[Result], title: str, facts: Mapping[str, Any]) -> Path:
    """evaluation.md, evaluation.html and evaluation.json in `folder`; where the page is."""
    table = rows(results)
    tree = {"title": title, **facts, "results": [result.as_dict() for result in results]}
    write_whole(folder / "evaluation.json", json.dumps(tree, indent=1))
    write_whole(folder / "evaluation.md", markdown(table, title))
    write_whole(folder / "evaluation.html", html(table, title, facts))
    return folder / "evaluation.html"
