"""Records: one JSON file per run with everything worth publishing, without its run directory.

A record has the whole config, so that the run can be repeated, but neither host nor paths.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stopmim.ablations.trial import (
    UNFINISHED,
    Outcome,
    Plan,
    Trial,
    is_number,
    norms_and_rank,
    wrong_key,
)
from stopmim.base.errors import UserError
from stopmim.base.files import own_folder, read_regular, write_whole
from stopmim.config.schema import Config
from stopmim.health.reference import KEYS, LINES, rounded, thinned
from stopmim.runs.identity import is_complete
from stopmim.runs.run import Run

CURVE = ("step", "epoch", "lr", "images_per_s", *KEYS, "feature_rank")
Record = dict[str, Any]
ENVIRONMENT = ("time", "device", "processes", "threads", "versions", "git")

KINDS: dict[str, Any] = {
    **dict.fromkeys(("row", "run", "preset", "problem", "verdict"), str),
    **dict.fromkeys(("seed", "updates"), int),
    "seconds": int | float,
    "data": dict,
    "answers": list,
    "curve": list,
}


def write_records(planned: Plan, outcomes: Sequence[Outcome]) -> None:
    """Writes OUT/TABLE/records/ROW-SEED.json for runs that ended; keeps all other records."""
    folder = own_folder(own_folder(planned.out / planned.name) / "records")
    for trial, outcome in zip(planned.trials, outcomes, strict=True):
        if outcome.problem != UNFINISHED:
            name = re.sub(r"[^A-Za-z0-9._+-]+", "-", trial.row)  # checkpoints have arbitrary names
            name += f"-{trial.seed}" if trial.config else ""
            write_whole(folder / f"{name}.json", as_text(_record(planned, trial, outcome)))


def _record(planned: Plan, trial: Trial, outcome: Outcome) -> Record:
    run = Run(trial.path)
    about: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # the run failed before it began, or trained nothing
        about = run.about
    if not (is_complete(about) and isinstance(about["starts"][-1], dict)):
        about = {"data": {"source": planned.data}, "starts": [{}]}
    metrics, start = run.metrics, about["starts"][-1]
    untrained = metrics[0].get("random_init") if metrics else None
    untrained = untrained if isinstance(untrained, dict) else {}
    return {
        "table": planned.name,
        "about": planned.table.about,
        "baseline": planned.table.baseline,
        "rows": [row.name for row in planned.table.rows],
        "row": outcome.row,
        "seed": outcome.seed,
        "run": outcome.run,
        "preset": planned.preset,
        "config": trial.config and trial.config.model_dump(mode="json"),
        "data": about["data"],
        "environment": {key: start[key] for key in ENVIRONMENT if key in start},
        "updates": outcome.updates,
        "seconds": round(outcome.seconds, 2),
        "problem": outcome.problem,
        "verdict": outcome.verdict,
        "answers": [answer | {"encoder": outcome.run} for answer in outcome.answers],
        "random_init": rounded(untrained, [*untrained]),
        "curve": [rounded(row, CURVE) for row in thinned(metrics, LINES)],
    }


def read_records(folder: Path) -> list[Record]:
    """All records in TABLE/ and TABLE/records/ below `folder`; other JSON files are ignored."""
    files = sorted([*folder.glob("*/*.json"), *folder.glob("*/records/*.json")])
    found = []
    for path in files:
        try:
            tree = json.loads(read_regular(path))
            if not (isinstance(tree, dict) and tree.keys() >= {"row", "curve"}):
                continue
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{path}: not a record of stopmim ablate") from None
        if wrong := _wrong(tree):
            raise UserError(f"{path}: {wrong}: not as stopmim ablate writes it")
        found.append(tree)
    return found


def _wrong(record: Record) -> str:
    """The first key of a record with a value that this version never writes, or ""."""
    for key, kind in KINDS.items():
        if not isinstance(record.get(key), kind) or isinstance(record[key], bool):
            return key
    if not isinstance(record["data"].get("source"), str):
        return "data.source"
    for key in ("seed", "updates", "seconds"):
        if not is_number(record[key]):  # an integer of hundreds of digits
            return key
    for answer in record["answers"]:
        if wrong := wrong_key(answer):
            return f"answers: {wrong}"
    if not all(isinstance(point, dict) for point in record["curve"]):
        return "curve"
    if "config" not in record:
        return "config"
    try:
        if record["config"] is not None:  # else a foreign checkpoint
            Config.model_validate_json(json.dumps(record["config"]))
    except ValidationError as error:
        first = error.errors()[0]
        return ".".join(["config", *map(str, first["loc"])])
    return ""


def outcome_of(record: Record) -> Outcome:
    """The outcome that the record was written from, except for rounding."""
    names = ("row", "seed", "run", "answers", "problem", "verdict", "updates", "seconds")
    own = {name: record[name] for name in names}
    if own["verdict"] == "healthy":  # the word of older versions
        own["verdict"] = "not collapsed"
    return Outcome(**own, **norms_and_rank(record["curve"]))


def as_text(tree: Mapping[str, Any]) -> str:
    """JSON with one line per key, answer and point of the curve: small, and good to diff."""
    lines = []
    for key, value in tree.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
