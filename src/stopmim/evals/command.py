"""The ``stopmim eval`` commands: open, measure, record every number, show a table."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stopmim.base.errors import StorageError
from stopmim.base.files import append_jsonl
from stopmim.evals import table
from stopmim.evals.compare import compare
from stopmim.evals.inputs import open_at
from stopmim.evals.protocols.protocol import Protocol
from stopmim.evals.request import Request
from stopmim.evals.suite import open_inputs, suite


def report(name: str, protocols: Sequence[Protocol], request: Request) -> str:
    """Measures the encoder called `name` and returns a table; several protocols also make pages."""
    inputs, facts = open_inputs(name, protocols, request)
    lines = destination(name, request.out)
    results = suite(inputs, protocols)
    record(lines, [result.as_dict() for result in results], facts)
    text = table.text(table.rows(results))
    if len(protocols) > 1 and lines is not None:
        title = f"What {Path(name).name or name} knows"
        text += f"\n\n{table.write_pages(lines.parent, results, title, facts)}"
    return text


def contrast(a: str, b: str, protocols: Sequence[Protocol], request: Request) -> str:
    """Compares two encoders on the same images by a paired test and returns a table."""
    inputs, facts = open_inputs(a, protocols, request)
    encoder, step = open_at(b, request.branch)
    found = compare(inputs, dataclasses.replace(inputs, encoder=encoder), protocols)
    facts = {"A": a, "B": b} | facts | {"encoder": b, "step": step}
    record(destination(None, request.out), [c.as_dict() for c in found], facts)
    return table.text(table.compared(found))


def destination(name: str | None, out: Path | None) -> Path | None:
    """File for results: `out`, or results.jsonl in the folder `out` or in the run `name`."""
    if out is None:
        run = name is not None and (Path(name) / "run.json").exists()
        return Path(str(name)) / "results.jsonl" if run else None
    path = out if out.suffix and not out.is_dir() else out / "results.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out}: cannot write here: {error.strerror}") from None
    return path


def record(path: Path | None, lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Appends `lines`, each with the facts, to the file of results."""
    if path is None:
        return
    try:
        for line in lines:
            append_jsonl(path, dict(facts) | dict(line))
    except OSError as error:
        raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
