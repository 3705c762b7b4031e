"""The README.md of an export: what it is, how to load it, how it was trained, how good it is.

card.md is its template, and formats/WORD.md the part for one format.
"""

import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stopmim._version import __version__
from stopmim.base import tables
from stopmim.base.files import number
from stopmim.data.crops import FLAT
from stopmim.data.transform import Transform
from stopmim.method.build import build_sampler
from stopmim.method.encoder import VisionTransformer
from stopmim.runs.run import Run
from stopmim.runs.verdict import verdict
from stopmim.weights.format import Contents, Format
from stopmim.weights.vit import Branch

FOUND = 3  # last cells of a row, with the result


def card(target: Format, contents: Contents, encoder: VisionTransformer, branch: Branch) -> str:
    """The text for an export to `target`, in Markdown with the front matter the hub expects."""
    files = FileSystemLoader(Path(__file__).parent, encoding="utf-8")
    environment = Environment(loader=files, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["quote"] = lambda path: shlex.quote(str(path))
    own = environment.from_string(target.card) if target.card else f"formats/{target.word}.md"
    # The path is a run, or a checkpoint of one.
    folders = (contents.path, contents.path.resolve().parent.parent)
    run = next((Run(folder) for folder in folders if (folder / "run.json").is_file()), None)
    text = environment.get_template("card.md").render(
        target=target,
        contents=contents,
        encoder=encoder,
        transform=Transform(encoder.side * encoder.patch),
        stats=contents.stats,
        flat=FLAT,
        branch=branch,
        version=__version__,
        masks=build_sampler(contents.config).describe() if contents.config else "",
        how_to_load=own,
        run=run if contents.config else None,
        results=_results(run, contents, branch) if run and contents.config else "",
    )
    return f"{text}\n"


def _results(run: Run, contents: Contents, branch: Branch) -> str:
    """A table of the lines of results.jsonl about exactly these weights; "" if there are none.

    It has no empty columns, and training data and seed only where they differ.
    """
    last, config = (run.metrics or [{}])[-1], contents.config
    # The last checkpoint of a finished run: no other can be newer.
    final = config is not None and last.get("epoch", 0) >= config.optim.epochs
    final = final and last.get("step") == contents.step
    about = [_cells(line) for line in run.results if _is_about(line, contents, branch, final)]
    # Of rows that would read the same, only the newest.
    rows = [*{tuple(cells.values())[:-FOUND]: cells for cells in about}.values()]
    if not rows:
        return ""
    values = {name: {row[name] for row in rows} for name in rows[0]}
    idle = {name for name, found in values.items() if found == {""}}
    idle |= {name for name in ("fitted on", "seed") if len(values[name] - {""}) == 1}
    return tables.markdown([{k: v for k, v in row.items() if k not in idle} for row in rows])


def _is_about(line: dict[str, Any], contents: Contents, branch: Branch, final: bool) -> bool:
    """Whether the result `line` was measured on the exported weights."""
    usable = {"protocol", "name"} <= line.keys() and number(line.get("value")) is not None
    one = "A" not in line  # ``eval compare`` measures two encoders, A and B
    same_branch = not contents.branches or line.get("branch", "target") == branch
    # Older lines have no step: they are about the newest checkpoint. Null means a foreign file.
    same_step = line["step"] == contents.step if "step" in line else final
    return usable and one and same_branch and same_step


def _cells(line: dict[str, Any]) -> dict[str, str]:
    """Cells that identify an evaluation, then the FOUND cells with its result."""
    chosen, before = line.get("selection"), number(line.get("random_init"))
    unit = " %" if line["unit"] == "percent" else ""
    cells = {
        "protocol": f"{line['protocol']} {line.get('label', '')}".strip(),
        "quantity": line["name"],
        "data": line.get("videos" if line["protocol"] == "tracking" else "test_data"),
        "fitted on": line.get("train_data"),
        "labels": line.get("train"),
        "chosen on": chosen,
        "setting": line.get("setting"),
        "size": line.get("size"),
        "seed": line.get("seed"),
        "value": f"{line['value']:.1f}{unit}",
        "random init": "" if before is None else f"{before:.1f}{unit}",
        "verdict": verdict(line),
    }
    return {name: "" if value is None else str(value) for name, value in cells.items()}
