"""All that is worth keeping of a run of an ablation without its directory, as one file of JSON.

It has the whole config, so that the run can be had again, but neither the host nor where it was.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stopmim.base.errors import UserError
from stopmim.base.files import write_whole
from stopmim.health.reference import KEYS, LINES, rounded, thinned
from stopmim.runs.run import Run

if TYPE_CHECKING:
    from stopmim.ablations.jobs import Entry
    from stopmim.ablations.run import Outcome, Plan

CURVE = ("step", "epoch", "lr", "images_per_s", *KEYS, "feature_rank")
ENVIRONMENT = ("time", "device", "processes", "threads", "versions", "git")


def write(planned: "Plan", outcomes: Sequence["Outcome"]) -> None:
    """OUT/TABLE/records/ROW-SEED.json of runs that ended; those that were not planned stay."""
    folder = planned.out / planned.name / "records"
    folder.mkdir(parents=True, exist_ok=True)
    for entry, outcome in zip(planned.entries, outcomes, strict=True):
        if not outcome.ended:
            continue
        tree = record(planned, entry, outcome)
        name = re.sub(r"[^A-Za-z0-9._+-]+", "-", entry.row)  # an encoder of others has any name
        name += f"-{entry.seed}" if entry.trial.config else ""
        write_whole(folder / f"{name}.json", as_text(tree))


def record(planned: "Plan", entry: "Entry", outcome: "Outcome") -> dict[str, Any]:
    run, config = Run(entry.trial.path), entry.trial.config
    try:
        about = run.about
    except UserError:  # it did not get so far, or nothing was trained
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
        "config": config and config.model_dump(mode="json"),
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


def as_text(tree: Mapping[str, Any]) -> str:
    """JSON with a line for every key, answer and line of the curve: small, and fit for a diff."""
    lines = [f"{json.dumps(key)}: {_value(value)}" for key, value in tree.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"
    return json.dumps(value)
