"""Masked image modeling with location uncertainty: StoP, I-JEPA and their evaluation.

Names are imported when they are first used, so that ``stopmim --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stopmim._version import __version__

if TYPE_CHECKING:
    from stopmim.config import Config
    from stopmim.interop import load_encoder, load_model
    from stopmim.mim import Batch, MaskedImageModel
    from stopmim.positions import Positions, StochasticPositions
    from stopmim.predictor import Noise, Predictor
    from stopmim.run import Run
    from stopmim.train import pretrain
    from stopmim.vit import Encoder, VisionTransformer

_HOME = {
    "Batch": "mim",
    "Config": "config",
    "Encoder": "vit",
    "MaskedImageModel": "mim",
    "Noise": "predictor",
    "Positions": "positions",
    "Predictor": "predictor",
    "Run": "run",
    "StochasticPositions": "positions",
    "VisionTransformer": "vit",
    "load_encoder": "interop",
    "load_model": "interop",
    "pretrain": "train",
}
_MODULES = ("ablate", "data", "evals", "masking", "positions", "presets", "schedules")

__all__ = [
    "Batch",
    "Config",
    "Encoder",
    "MaskedImageModel",
    "Noise",
    "Positions",
    "Predictor",
    "Run",
    "StochasticPositions",
    "VisionTransformer",
    "__version__",
    "load_encoder",
    "load_model",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"stopmim.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"stopmim.{name}")
    raise AttributeError(f"module 'stopmim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
