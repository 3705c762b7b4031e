"""Twenty updates of every family give the numbers they always gave.

`golden/updates.json` was recorded by the code before it was put into folders, and is compared to
1e-5: sums on another processor round differently. The last four families of features are younger.
`python tests/train/test_families.py` records it anew, after a change that is meant to change
numbers.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from helpers import GOLDEN
from stopmim import Config, pretrain
from tiny import NoiseImages, tiny, tiny_mae

RECORDED = GOLDEN / "updates.json"
KEYS = ("loss", "grad_norm", "target_std", "predicted_std", "norm_A", "norm_mask_token", "skill")

SINCOS: dict[str, Any] = {"positions": {"kind": "sincos"}}
LARGE: dict[str, Any] = {"masking.target_scale": [0.3, 0.35], "masking.targets": 1}
RELEASED: dict[str, Any] = {"compat": "released", "image_size": 48, "data.augmentation": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "stop": {},
    "ijepa": SINCOS,
    "learned": {"positions": {"kind": "learned"}},
    "lowres_bilinear": SINCOS | LARGE | {"lowres": "bilinear"},
    "lowres_max": SINCOS | LARGE | {"lowres": "max"},
    "jitter": {"positions": {"kind": "jitter"}},
    "conditioned": {"positions.covariance": "conditioned"},
    "fixed": {"positions.covariance": "fixed"},
    "untied": {"positions.covariance": "untied"},
    "both_tokens": {"positions.tokens": "both"},
    "ramp": {"positions.ramp": 2.0},
    "penalty": SINCOS | {"optim.penalty_l1": 1e-4, "optim.penalty_l2": 1e-4},
    "parts": {"runtime.accumulate": 2, "optim.clip_grad": 1.0},
    "released": RELEASED | {"runtime.accumulate": 2},
    "class_token": {"class_token": True, "data.augmentation": "flip"},
    "layers": {"target_layers": 2},
    "visible": SINCOS | {"visible_loss": 0.5},
    "vicreg": {"vicreg": 0.01, "runtime.accumulate": 2},
    "levels": {"positions.levels": [0.25, 1.0, 4.0], "positions.ramp": -2.0},
}
PIXELS: dict[str, dict[str, Any]] = {
    "mae": {},
    "mae_stop": {"positions": {"kind": "stochastic"}, "positions.share": 0.5},
}
USUAL = {"optim.epochs": 4, "runtime.health_every": 7}


def configs() -> dict[str, Config]:
    features = {name: tiny(**USUAL | changes) for name, changes in FAMILIES.items()}
    return features | {name: tiny_mae(**USUAL | changes) for name, changes in PIXELS.items()}


def measured(config: Config, out: Path, updates: int) -> list[dict[str, float]]:
    run = pretrain(NoiseImages(), out, config, stop_at=updates)
    return [{key: line[key] for key in KEYS if key in line} for line in run.metrics]


def compare(name: str, out: Path, updates: int) -> None:
    want = json.loads(RECORDED.read_text(encoding="ascii"))[name][:updates]
    found = measured(configs()[name], out, updates)
    assert len(found) == updates
    for step, (line, recorded) in enumerate(zip(found, want, strict=True), start=1):
        assert line == pytest.approx(recorded, rel=1e-5), step


@pytest.mark.parametrize("name", [*FAMILIES, *PIXELS])
def test_the_first_updates_of_every_family_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 7)  # health is measured after the seventh


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *PIXELS])
def test_twenty_updates_of_every_family_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 20)


if __name__ == "__main__":
    recorded = {}
    for name, config in configs().items():
        with tempfile.TemporaryDirectory() as folder:
            recorded[name] = measured(config, Path(folder), 20)
    RECORDED.write_text(json.dumps(recorded) + "\n", encoding="ascii")
