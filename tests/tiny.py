"""A run of a second, for tests that need a real one."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from stopmim.config.presets import tiny_cpu
from stopmim.config.schema import Config, override
from stopmim.data.decode import BadImageError
from stopmim.runs.run import Run

TIMINGS = {"images_per_s"}  # what two equal runs may differ in


class NoiseImages:
    """`n` small pictures in memory; those numbered in `broken` cannot be read."""

    def __init__(self, n: int = 40, broken: tuple[int, ...] = ()) -> None:
        rng = np.random.default_rng(7)
        self.images = rng.integers(0, 256, (n, 28, 32, 3), dtype=np.uint8)
        self.broken = broken
        self.labels: dict[str, np.ndarray] = {}
        self.fingerprint = f"noise-{n}"

    def __len__(self) -> int:
        return len(self.images)

    def read(self, i: int) -> np.ndarray:
        if i in self.broken:
            raise BadImageError("broken on purpose")
        return self.images[i]

    def name(self, i: int) -> str:
        return f"noise {i}"


def writing_threads() -> list[str]:
    """Threads of this process that write to a run directory."""
    return [t.name for t in threading.enumerate() if t.name in ("save", "heartbeat")]


def tiny(**changes: Any) -> Config:
    """A 6x6 grid, batches of 8; 5 updates per epoch of 40 images, 2 epochs."""
    small = {
        "arch": "vit_micro4",
        "image_size": 24,
        "masking": {"targets": 4, "target_scale": [0.15, 0.2], "context_length": None},
        "predictor": {"width": 24, "depth": 1},
        "optim": {"epochs": 2, "batch_size": 8, "warmup_epochs": 1.0},
        "runtime": {
            "threads": 1,
            "log_every": 1,
            "health_every": 0,
            "save_every": 3,
            "device": "cpu",
            "workers": 0,
        },
    }
    return override(override(tiny_cpu(), small), changes)


def tiny_mae(**changes: Any) -> Config:
    """`tiny` with pixels as targets, a class token and 75 % of its 36 patches hidden."""
    masks = {"kind": "random", "targets": 4, "target_scale": [0.15, 0.2], "context_length": None}
    usual = {"target": "pixels", "class_token": True, "masking": masks}
    return tiny(**usual | {"optim.ema": [0.996, 1.0], "positions": {"kind": "sincos"}} | changes)


def write_folder(root: Path, n: int = 40) -> Path:
    """The same pictures as PNG files, in nested folders."""
    for i, image in enumerate(NoiseImages(n).images):
        folder = root / f"part{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i:03}.png")
    return root


def write_parts(root: Path) -> Path:
    """train/ with 20 and val/ with 8 files of each of two classes, called alike in both.

    train/part0/003.png and val/part1/001.png are broken; files of these names in the other part
    are not.
    """
    rng = np.random.default_rng(7)
    for part, n in (("train", 20), ("val", 8)):
        for folder in (root / part / "part0", root / part / "part1"):
            folder.mkdir(parents=True)
            for i, image in enumerate(rng.integers(0, 256, (n, 28, 32, 3), dtype=np.uint8)):
                Image.fromarray(image).save(folder / f"{i:03}.png")
    (root / "train" / "part0" / "003.png").write_bytes(b"junk")
    (root / "val" / "part1" / "001.png").write_bytes(b"")
    return root


def weights(run: Run) -> dict[str, torch.Tensor]:
    return dict(run.model().state_dict())


def curve(run: Run) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in run.metrics]


def assert_same_run(a: Run, b: Run) -> None:
    """Bit for bit: the logged curve, the weights, and the moments of the optimizer."""
    assert curve(a) == curve(b)
    files = ("model.safetensors", "optimizer.safetensors")
    for name in files:
        assert (a.checkpoint / name).read_bytes() == (b.checkpoint / name).read_bytes(), name
