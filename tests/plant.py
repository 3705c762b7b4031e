"""Runs that are healthy or unhealthy on purpose, and their logs, for the doctor to tell apart.

``python tests/plant.py [NAME ...]`` trains the runs and records their measurements under
tests/golden/health/, minutes each. The recipe is that of `tiny_cpu` with larger patches.
"""

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stopmim.data.images import Images
from stopmim.data.sources.scenes import Scenes
from stopmim.health.rules import Verdict
from stopmim.train.loop import pretrain

FOLDER = Path(__file__).parent / "golden" / "health"
RECIPE = {
    "arch": "vit_micro8",
    "masking": {"targets": 2, "target_scale": [0.06, 0.12], "context_length": 14},
}
OPTIM = {"epochs": 6, "batch_size": 16, "warmup_epochs": 0.5}


class Static:
    """Patches of unrelated colours: nothing hidden can be predicted."""

    labels: dict[str, np.ndarray] = {}  # noqa: RUF012 - as the protocol has it
    fingerprint = "static"

    def __len__(self) -> int:
        return 2048

    def read(self, i: int) -> np.ndarray:
        colours = np.random.default_rng(i).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        return np.kron(colours, np.ones((8, 8, 1), np.uint8))

    def name(self, i: int) -> str:
        return f"static {i}"


class Same(Static):
    """The same grey image again and again."""

    fingerprint = "same"

    def read(self, i: int) -> np.ndarray:
        return np.full((48, 48, 3), 128, np.uint8)


@dataclass(frozen=True)
class Plant:
    verdict: Verdict
    optim: dict[str, Any] = field(default_factory=dict)
    images: Images | None = None  # None: 2,048 scenes
    seed: int = 0
    steps: int | None = None  # None: all of them
    every: int = 64
    whole: bool = False  # images are not cropped

    def grow(self, path: Path) -> list[dict[str, Any]]:
        """Trains, and returns the lines with a measurement."""
        run = pretrain(
            self.images or Scenes(2048, size=48, seed=0),
            path,
            "tiny_cpu",
            stop_at=self.steps,
            **RECIPE,
            seed=self.seed,
            optim=OPTIM | self.optim,
            runtime={"health_every": self.every, "log_every": self.every, "save_every": 10**6},
            **({"data.crop_scale": [1.0, 1.0]} if self.whole else {}),
        )
        return [row for row in run.metrics if "target_rank" in row or "random_init" in row]


TOO_FAST = {"lr": 1.5e-2, "final_lr": 1e-3, "start_lr": 1e-3}  # 50 times the rate of the recipe
NO_AVERAGE = {"ema": [0.0, 0.0]}  # the target encoder is the encoder
QUICK_AVERAGE = {"lr": 6e-4, "final_lr": 6e-4, "epochs": 16, "ema": [0.999, 0.95]}
TOO_LONG = {
    "epochs": 128,
    "lr": 1e-3,
    "final_lr": 1e-3,
    "start_lr": 1e-4,
    "warmup_epochs": 8,
    "ema": [0.999, 0.99],
}
FIXED = {"ema": [1.0, 1.0]}  # the target encoder stays untrained: it cannot collapse

PLANTS = {
    "healthy-0": Plant("not collapsed"),
    "healthy-1": Plant("not collapsed", seed=1),
    "healthy-2": Plant("not collapsed", seed=2),
    "early-0": Plant("too early to say", steps=16, every=8),
    "early-1": Plant("too early to say", seed=1, steps=64, every=16),
    "same-images": Plant("collapse", images=Same(), steps=32, every=16),
    "too-fast-0": Plant("collapse", TOO_FAST, steps=320, every=32),
    "too-fast-1": Plant("collapse", TOO_FAST, seed=1, steps=320, every=32),
    "no-average": Plant("partial collapse", NO_AVERAGE, steps=192, every=32),
    "quick-average": Plant("partial collapse", QUICK_AVERAGE, steps=320),
    "too-long-0": Plant("over-training", TOO_LONG, Scenes(256, size=48, seed=0), steps=704),
    "too-long-1": Plant("over-training", TOO_LONG, Scenes(256, size=48, seed=0), 1, steps=704),
    "nothing-to-tell-0": Plant("shortcut", FIXED, Static(), steps=256, every=32, whole=True),
    "nothing-to-tell-1": Plant(
        "shortcut", FIXED, Static(), seed=1, steps=256, every=32, whole=True
    ),
}


def record(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = PLANTS[name].grow(Path(folder) / "run")
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(_rounded(row)) for row in rows)
    (FOLDER / f"{name}.jsonl").write_text(f"{lines}\n", encoding="utf-8")


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _rounded(value)
        if isinstance(value, dict)
        else float(f"{value:.4g}")
        if isinstance(value, float)
        else value
        for key, value in row.items()
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or PLANTS:
        record(name)
