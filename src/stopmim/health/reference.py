"""Reference runs: measurements of our runs, to compare with other runs of the same kind.

Each file of references/ is one run. Its first line names it and the kind of runs it compares with;
the others are lines of its metrics.jsonl, at most a hundred, with the share of the training in
place of the step. `write_reference` makes one from a finished run, which should be measured more
often than usual (runtime.health_every).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stopmim.base.files import write_whole
from stopmim.config.schema import Config, resolve
from stopmim.health.log import Logged
from stopmim.method.build import build_positions, build_sampler, build_target
from stopmim.runs.run import Run

FILES = Path(__file__).parent / "references"
LINES, HEALTH = 100, 60  # at most, and how many of them with measurements of health
KEYS = (
    *("loss", "target_std", "predicted_std", "grad_norm", "norm_A", "norm_mask_token"),
    *("target_rank", "target_spread", "target_image_share", "predicted_mean_share"),
    *("predicted_image_share", "skill", "noise_to_signal", "neighbours"),
)


class Reference(NamedTuple):
    name: str
    rows: list[dict[str, Any]]  # each with "share", from 0 to 1

    def at(self, share: float) -> dict[str, Any]:
        """All numbers, each as measured nearest to this share of the training."""
        near = sorted(self.rows, key=lambda row: -abs(row["share"] - share))
        return {key: value for row in near for key, value in row.items()}

    def stretched(self, updates: float) -> list[dict[str, Any]]:
        """Lines as in metrics.jsonl, stretched to a run of this many updates."""
        return [row | {"step": row["share"] * updates} for row in self.rows]


def comparable(config: Config, data: Mapping[str, Any]) -> dict[str, Any]:
    """The traits that two runs must share to be worth comparing: network, masks, kind of images.

    `data` is that of run.json. All rendered scenes are of one kind; the kind of other images is
    unknown, and only the same ones compare.
    """
    config = resolve(config)
    with torch.device("meta"):  # only its name is needed
        target = build_target(config)
        method = target.name + build_positions(config).method
    rendered = str(data.get("source")).split(":")[0] == "scenes"
    return {
        "arch": config.arch,
        "image_size": config.image_size,
        "class_token": config.class_token,
        "predictor": [config.predictor.width, config.predictor.depth],
        "method": method,
        "masks": build_sampler(config).describe(),
        "images": "scenes" if rendered else data.get("fingerprint"),
        **({"target": text} if (text := target.describe()) else {}),
    }


def find_reference(config: Config, data: object) -> Reference | None:
    """The reference that compares with runs of `config` on `data`, if there is one."""
    traits = comparable(config, data if isinstance(data, dict) else {})
    for path in sorted(FILES.glob("*.jsonl")):
        about, *rows = map(json.loads, path.read_text(encoding="ascii").splitlines())
        if about["kind"] == traits:
            return Reference(about["name"], rows)
    return None


def training_share(config: Config, line: Logged) -> float:
    """The share of its training that a run had completed when it logged `line`."""
    return min(1.0, line.get("epoch", 0) / config.optim.epochs)


def write_reference(run: Run, path: Path, name: str) -> None:
    """Writes a finished run as a reference."""
    config, metrics = run.config, run.metrics
    rows = [
        {"share": round(training_share(config, line), 4)} | rounded(line, KEYS)
        for line in thinned(metrics, LINES - 2)
    ]
    start = {"share": 0.0} | rounded(metrics[0].get("random_init", {}), KEYS)
    lines = [{"name": name, "kind": comparable(config, run.about["data"])}, start, *rows]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def thinned(metrics: Sequence[Logged], lines: int) -> list[Logged]:
    """At most `lines` of metrics.jsonl: the last, up to `HEALTH` measurements, some of the rest."""

    def few(index: list[int], most: int) -> list[int]:
        return index[:: max(1, -(-len(index) // most))]

    measured = few([i for i, line in enumerate(metrics) if "skill" in line], HEALTH)
    others = [i for i, line in enumerate(metrics) if "skill" not in line]
    last = range(len(metrics))[-1:]
    kept = {*measured, *few(others, lines - len(measured) - 1), *last}
    return [metrics[i] for i in sorted(kept)]


def rounded(line: Logged, keys: Sequence[str]) -> dict[str, Any]:
    """The values of `keys` that `line` has; floats with four digits."""
    known = {key: line[key] for key in keys if key in line}
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in known.items()}
