"""The README.md of an export: what it is, how to load it, how it was trained, how good it is.

card.md is its template, and formats/WORD.md the part that a format has of its own.
"""

import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stopmim._version import __version__
from stopmim.base import tables
from stopmim.method.encoder import VisionTransformer
from stopmim.runs.run import Run
from stopmim.weights.format import Contents, Format
from stopmim.weights.vit import Branch, Shape

ENCODERS = {
    "target": "the target (EMA) encoder, which the papers evaluate",
    "context": "the context encoder, the trained one",
}
CHOSEN = {"none": "-", "held-out": "train", "paper": "test"}  # as in the tables of evals


def card(target: Format, contents: Contents, encoder: VisionTransformer, branch: Branch) -> str:
    """The text for an export to `target`, in Markdown with the front matter the hub expects."""
    files = FileSystemLoader(Path(__file__).parent, encoding="utf-8")
    environment = Environment(loader=files, undefined=StrictUndefined, trim_blocks=True)
    own = environment.from_string(target.card) if target.card else f"formats/{target.word}.md"
    which = ENCODERS[branch] if contents.branches else "its encoder"
    path = contents.path
    folders = (path, path.resolve().parent.parent)  # a run, or one of its checkpoints
    run = next((Run(folder) for folder in folders if (folder / "run.json").is_file()), None)
    data, results, words = {}, "", list[str]()
    if run and contents.config:
        data, results = run.about.get("data", {}), _results(run, contents, branch)
        words = ["stopmim", "eval", "suite", str(path)]
        words += ["--branch", branch] if branch == "context" and contents.branches else []
        words += [] if path == run.path else ["--out", str(run.path)]
    text = environment.get_template("card.md").render(
        target=target,
        contents=contents,
        encoder=encoder,
        branch=branch,
        version=__version__,
        which="all that is in it" if target.whole_model else which,
        how_to_load=own,
        size=encoder.side * encoder.patch,
        hidden=Shape.of(encoder).hidden,
        data=data,
        results=results,
        evaluate=shlex.join(words),
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
    # The newest of those that would read the same.
    rows = [*{tuple(cells.values())[:-2]: cells for cells in about}.values()]
    if not rows:
        return ""
    values = {name: {row[name] for row in rows} for name in rows[0]}
    idle = {name for name, found in values.items() if found == {""}}
    idle |= {name for name in ("fitted on", "seed") if len(values[name] - {""}) == 1}
    return tables.markdown([{k: v for k, v in row.items() if k not in idle} for row in rows])


def _is_about(line: dict[str, Any], contents: Contents, branch: Branch, final: bool) -> bool:
    """Whether the result `line` was measured on the exported weights."""
    if not {"protocol", "name", "value"} <= line.keys() or not isinstance(line["value"], float):
        return False
    if "A" in line:  # ``eval compare`` measures two encoders
        return False
    if contents.branches and line.get("branch", "target") != branch:
        return False
    # Older lines have no step: they are about the newest checkpoint. Null is no run of ours.
    return line["step"] == contents.step if "step" in line else final


def _cells(line: dict[str, Any]) -> dict[str, str]:
    """Everything that tells one evaluation from another, then its two values."""
    chosen, before = line.get("selection"), line.get("random_init")
    cells = {
        "protocol": f"{line['protocol']} {line.get('label', '')}".strip(),
        "quantity": line["name"],
        "data": line.get("videos" if line["protocol"] == "tracking" else "test_data"),
        "fitted on": line.get("train_data"),
        "labels": line.get("train"),
        "chosen on": CHOSEN.get(str(chosen), chosen),
        "setting": line.get("setting"),
        "size": line.get("size"),
        "seed": line.get("seed"),
        "value": f"{line['value']:.4f}",
        "random init": f"{before:.4f}" if isinstance(before, float) else "",
    }
    return {name: "" if value is None else str(value) for name, value in cells.items()}
