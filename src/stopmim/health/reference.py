"""You are here: what a run of ours measured of itself, to set beside a run of the same kind.

Each file of references/ is one: its first line says what was trained on what, the others are those
of its metrics.jsonl, at most a hundred, with the share of the training in place of the step.
`write` makes one of a finished run; it is measured more often than others (runtime.health_every).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stopmim.base.files import write_whole
from stopmim.config.schema import Config
from stopmim.runs.run import Run

FILES = Path(__file__).parent / "references"
LINES, HEALTH = 100, 60  # at most, and of these with measurements of health
KEYS = (
    *("loss", "target_std", "predicted_std", "grad_norm", "norm_A", "norm_mask_token"),
    *("target_rank", "target_spread", "target_image_share", "predicted_mean_share"),
    *("predicted_image_share", "skill", "noise_to_signal", "neighbours"),
)

Row = Mapping[str, Any]


class Reference(NamedTuple):
    name: str
    rows: list[dict[str, Any]]  # each with "share", from 0 to 1

    def at(self, share: float) -> dict[str, Any]:
        """Each number where the reference was nearest to this share of its training."""
        near = sorted(self.rows, key=lambda row: -abs(row["share"] - share))
        return {key: value for row in near for key, value in row.items()}

    def beside(self, updates: float) -> list[dict[str, Any]]:
        """Lines as of metrics.jsonl, drawn out to the length of a run of so many updates."""
        return [row | {"step": row["share"] * updates} for row in self.rows]


def kind(config: Config) -> dict[str, Any]:
    """What two runs must have in common to be worth comparing."""
    tree = config.model_dump(mode="json")
    same = {key: tree[key] for key in ("arch", "image_size", "class_token")}
    return same | {"target": tree.get("target", "features"), "positions": tree["positions"]["kind"]}


def reference(config: Config) -> Reference | None:
    """The reference of the kind of `config`, if there is one."""
    for path in sorted(FILES.glob("*.jsonl")):
        about, *rows = map(json.loads, path.read_text(encoding="ascii").splitlines())
        if about["kind"] == kind(config):
            return Reference(about["name"], rows)
    return None


def share(config: Config, row: Row) -> float:
    """How much of its training a run had done when it logged `row`."""
    return min(1.0, row.get("epoch", 0) / config.optim.epochs)


def write(run: Run, path: Path, name: str) -> None:
    """Makes a reference of a finished run."""
    config, metrics = run.config, run.metrics
    rows = [
        {"share": round(share(config, row), 4)} | rounded(row, KEYS)
        for row in thinned(metrics, LINES - 2)
    ]
    start = {"share": 0.0} | rounded(metrics[0].get("random_init", {}), KEYS)
    lines = [{"name": name, "kind": kind(config)}, start, *rows]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def thinned(metrics: Sequence[Row], lines: int) -> list[Row]:
    """At most `lines` of metrics.jsonl: the last, up to `HEALTH` measurements, some of the rest."""
    measured = _spread([i for i, row in enumerate(metrics) if "skill" in row], HEALTH)
    others = [i for i, row in enumerate(metrics) if "skill" not in row]
    last = range(len(metrics))[-1:]
    kept = {*measured, *_spread(others, lines - len(measured) - 1), *last}
    return [metrics[i] for i in sorted(kept)]


def _spread(index: list[int], most: int) -> list[int]:
    return index[:: max(1, -(-len(index) // most))]


def rounded(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    """Those of the numbers that are there, with four digits; counts as they are."""
    known = {key: row[key] for key in keys if key in row}
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in known.items()}
