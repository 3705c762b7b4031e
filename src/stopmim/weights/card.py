"""The README.md of an export: what it is, how to load it, how it was trained, how good it is."""

import shlex
from pathlib import Path
from typing import Any

from stopmim._version import __version__
from stopmim.base import tables
from stopmim.method.encoder import VisionTransformer
from stopmim.runs.run import Run
from stopmim.weights.format import Contents, Format
from stopmim.weights.vit import Branch

ENCODERS = {
    "target": "the target (EMA) encoder, which the papers evaluate",
    "context": "the context encoder, the trained one",
}
CHOSEN = {"none": "-", "held-out": "train", "paper": "test"}  # as in the tables of evals


def card(target: Format, contents: Contents, encoder: VisionTransformer, branch: Branch) -> str:
    """The text for an export to `target`, in Markdown with the front matter the hub expects."""
    size = encoder.side * encoder.patch
    which = ENCODERS[branch] if contents.branches else "its encoder"
    if target.whole_model:
        which = "all that is in it"
    kept = [item for item in contents.facts().items() if not item[0].startswith(("file", "load_"))]
    rows = "\n".join(f"| {label} | {value} |" for label, value in kept)
    code, note = target.card(encoder)
    pooled = "its class token" if encoder.prefix else "the mean of its tokens"
    return f"""---
license: other
library_name: {target.library}
tags: [vision, self-supervised-learning, masked-image-modeling]
---

# {contents.path.name or "encoder"}, exported for {target.used_by}

A Vision Transformer trained by masked image modeling. Exported by stopmim {__version__} from
`{contents.path}`: {which}.

| | |
|---|---|
{rows}

## Load it

```python
{code}
```

{note}

Images are RGB, {size}x{size} pixels, normalised with mean (0.485, 0.456, 0.406) and standard
deviation (0.229, 0.224, 0.225). The published evaluations resize the shorter side to
{round(size * 256 / 224)} (bicubic) and cut out the middle {size}.
The feature of an image is {pooled} after the final norm.
{_training(contents)}{_results(contents, branch)}
## Licence

stopmim is MIT. Weights have the licence of whoever trained them, which depends on the data: say it
here and in the first lines of this file.
"""


def _run(path: Path) -> Run | None:
    """The run that `path` is, or is a checkpoint of."""
    for folder in (path, path.resolve().parent.parent):
        if (folder / "run.json").is_file():
            return Run(folder)
    return None


def _training(contents: Contents) -> str:
    c, model, run = contents.config, contents.model, _run(contents.path)
    if c is None or model is None:
        return ""
    what = model.target.describe()
    predicted = f"{what} predicted" if what else model.target.name
    if model.target.follows:
        predicted = f"EMA {c.optim.ema[0]:g} to {c.optim.ema[1]:g}"
    data = run.about.get("data", {}) if run else {}
    images = f" Data: {data['images']} images from `{data['source']}`." if "source" in data else ""
    return f"""
## Training

{c.arch}, images of {c.image_size} pixels, {c.positions.kind} positions, {c.masking.kind} masks;
step {contents.step} of {c.optim.epochs} epochs with batch {c.optim.batch_size}, learning rate
{c.optim.lr:g}, {predicted}, seed {c.seed}.{images}
"""


def _results(contents: Contents, branch: Branch) -> str:
    """The lines of results.jsonl about exactly these weights, or the command that adds some."""
    run = _run(contents.path)
    if run is None or contents.step is None:
        return ""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    final = _is_final(run, contents)
    for line in run.results:
        if _is_about(line, contents, branch, final):
            cells = _cells(line)
            # The newest of those that would read the same.
            rows[tuple(cells.values())] = cells | _values(line)
    if not rows:
        words = ["stopmim", "eval", "suite", str(contents.path)]
        words += ["--branch", branch] if branch == "context" and contents.branches else []
        words += [] if contents.path == run.path else ["--out", str(run.path)]
        return (
            "\n## Results\n\nThese weights have not been evaluated yet. Do it, and export again:\n"
            f"\n```sh\n{shlex.join(words)}\n```\n"
        )
    which = f"the {branch} encoder" if contents.branches else "the encoder"
    return f"""
## Results

Results of {which} at step {contents.step}. *Labels*: number of labelled images to fit to. *Chosen
on*: the part of the data that settings were chosen on; a number chosen on test is too high. *Random
init*: the same network before training.

{_table(list(rows.values()))}
"""


def _is_final(run: Run, contents: Contents) -> bool:
    """Whether it is the last checkpoint of a finished run, so that no other can be newer."""
    metrics, config = run.metrics, contents.config
    if not metrics or config is None or metrics[-1].get("step") != contents.step:
        return False
    return metrics[-1].get("epoch", 0) >= config.optim.epochs


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
    """Everything that tells one evaluation from another."""
    chosen = line.get("selection")
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
    }
    return {name: "" if value is None else str(value) for name, value in cells.items()}


def _values(line: dict[str, Any]) -> dict[str, str]:
    found = {"value": line["value"], "random init": line.get("random_init")}
    return {name: f"{x:.4f}" if isinstance(x, float) else "" for name, x in found.items()}


def _table(rows: list[dict[str, str]]) -> str:
    """A Markdown table without empty columns; training data and seed only where they differ."""
    values = {name: {row[name] for row in rows} for name in rows[0]}
    idle = {name for name, found in values.items() if found == {""}}
    idle |= {name for name in ("fitted on", "seed") if len(values[name] - {""}) == 1}
    return tables.markdown([{k: v for k, v in row.items() if k not in idle} for row in rows])
