"""Tables of results: aligned text for a terminal, Markdown, one HTML page, JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stopmim.base.files import read_regular, write_whole
from stopmim.base.tables import aligned, markdown
from stopmim.evals.compare import Comparison
from stopmim.evals.results import Result
from stopmim.runs.verdict import LEVEL, RANDOM_INIT, difference, resolution, tallies

HERE = Path(__file__).parent
PM = "\u00b1"
RIGHT = {"chance", "random", "value", "95 % interval", "difference", "n", "A", "B", "B - A", "p"}
RIGHT |= {f"{LEVEL} % interval"}
WIDE = {"95 % interval", "n", "setting", "p"}  # columns too wide for a terminal
LEGEND = f"""\
Percent, except the effective rank (rankme). Random: the mean of untrained
networks of this architecture. Chance: one class for all images, that of the
test set which is most frequent in training. Difference: value - random, {PM} its
{LEVEL} % interval. Verdict: against {RANDOM_INIT}, by that interval."""
PAIRED = f"""\
Percent. The {LEVEL} % interval of B - A is over these test images, not over training
seeds: it tells the two encoders apart, not the methods behind them."""


def rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """One row per result."""
    table = []
    for line in (result.as_dict() for result in results):
        named = line["name"] in ("accuracy", line["protocol"])

        def text(key: str, line: Mapping[str, Any] = line) -> str:
            return f"{line[key]:.1f}" if key in line else ""

        gain = difference(line)
        shown = f" {PM} {(gain[2] - gain[1]) / 2:.1f}" if gain else ""
        row = {
            "protocol": line["protocol"] if named else f"{line['protocol']} {line['name']}",
            "of": line["label"],
            "chance": text("chance"),
            "random": text("random_init"),
            "value": text("value"),
            "95 % interval": f"{text('low')} to {text('high')}" if "low" in line else "",
            "difference": f"{line['difference']:+.1f}{shown}" if "difference" in line else "",
            "verdict": line.get("verdict", ""),
            "n": f"{line['n']:,}",
            "chosen on": line["selection"],
            "setting": line.get("setting", ""),
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
            f"{LEVEL} % interval": f"{100 * c.interval[0]:+.1f} to {100 * c.interval[1]:+.1f}",
            "verdict": f"{c.word} A",
            "p": f"{c.p:.2g}",
            "n": f"{c.n:,}",
        }
        for c in comparisons
    ]


def text(table: Sequence[Mapping[str, str]]) -> str:
    """Aligned text for a terminal, without wide and empty columns, and `chosen on` if all agree."""
    if not table:
        return "no results"
    chosen = {row["chosen on"] for row in table if "chosen on" in row} - {"none"}
    hidden = WIDE | ({"chosen on"} if len(chosen) < 2 else set())
    kept = [{k: _short(v) for k, v in row.items() if k not in hidden} for row in table]
    return aligned(kept, RIGHT)


def _short(cell: str) -> str:
    """A verdict without its reference, which the legend names."""
    return cell.removesuffix(f" {RANDOM_INIT}").removesuffix(" from")


def conclusions(results: Sequence[Result], facts: Mapping[str, Any]) -> list[str]:
    """A sentence per data set that counts the verdicts."""
    lines = [dict(facts) | result.as_dict() for result in results]
    return [*(tally.sentence for tally in tallies(lines)), *resolution(lines)]


def replaced_data(folder: Path) -> str:
    """The test images that the pages in `folder` are about; "" if there are none."""
    try:
        found = json.loads(read_regular(folder / "evaluation.json"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(found.get("test_data", "")) if isinstance(found, dict) else ""


def write_pages(
    folder: Path, results: Sequence[Result], title: str, facts: Mapping[str, Any]
) -> Path:
    """Writes evaluation.md, .json and a self-contained .html to `folder`; returns the latter."""
    table, sentences = rows(results), conclusions(results, facts)
    tree = {"title": title, **facts, "conclusions": sentences}
    tree |= {"results": [result.as_dict() for result in results]}
    write_whole(folder / "evaluation.json", json.dumps(tree, indent=1))
    parts = [f"# {title}".replace("\n", " "), *sentences, markdown(table, RIGHT), LEGEND]
    write_whole(folder / "evaluation.md", "\n\n".join(parts) + "\n")
    loader = FileSystemLoader(HERE)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    css = (HERE.parent / "base" / "page.css").read_text(encoding="utf-8")
    template, path = environment.get_template("table.html"), folder / "evaluation.html"
    short = [{name: _short(cell) for name, cell in row.items()} for row in table]
    shown = {"title": title, "facts": facts, "rows": short, "conclusions": sentences}
    write_whole(path, template.render(shown, right=RIGHT, css=css, legend=LEGEND))
    return path
