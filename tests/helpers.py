"""What several test files need: recordings of the released code, and seeded generators."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> dict[str, Tensor]:
    """The tensors of a recording; golden/README.md says what there is."""
    return load_file(GOLDEN / f"{name}.safetensors")


def golden_about(name: str) -> dict[str, Any]:
    """What was recorded beside the tensors: configuration, scalars."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries that begin with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
