"""Records: one JSON file per run with everything worth publishing, without its run directory.

A record has the whole config, so that the run can be repeated, but neither host nor paths.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stopmim.ablations.trial import UNFINISHED, Outcome, Plan, Trial, norms_and_rank
from stopmim.base.errors import UserError
from stopmim.base.files import own_folder, read_regular, write_whole
from stopmim.health.reference import KEYS, LINES, rounded, thinned
from stopmim.runs.run import Run

CURVE = ("step", "epoch", "lr", "images_per_s", *KEYS, "feature_rank")
Record = dict[str, Any]
ENVIRONMENT = ("time", "device", "processes", "threads", "versions", "git")


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
    try:
        about = run.about
    except UserError:  # it failed before it began, or nothing was trained
        about = {"data": {"source": planned.data}, "starts": [{}]}
    metrics, start = run.metrics, about["starts"][-1]
    untrained = metrics[0].get("random_init", {}) if metrics else {}
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
            if isinstance(tree, dict) and tree.keys() >= {"row", "curve"}:
                outcome_of(tree)  # proves that it has what a record has
                found.append(tree)
        except (OSError, LookupError, TypeError, AttributeError, ValueError, RecursionError):
            raise UserError(f"{path}: not a record of stopmim ablate") from None
    return found


def outcome_of(record: Record) -> Outcome:
    """What the record was written from, except for rounding."""
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
