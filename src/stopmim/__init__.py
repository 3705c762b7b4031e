"""Masked image modeling with location uncertainty: StoP, I-JEPA and their evaluation.

Names are imported when they are first used, so that ``stopmim --help`` does not wait for torch.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stopmim._version import __version__

if TYPE_CHECKING:
    from stopmim.base import schedules as schedules
    from stopmim.config import presets as presets
    from stopmim.config.schema import Config
    from stopmim.evals.adapter import Adapter
    from stopmim.method import masks
    from stopmim.method import positions as positions
    from stopmim.method.encoder import Encoder, VisionTransformer
    from stopmim.method.model import Batch, MaskedImageModel
    from stopmim.method.positions import Positions, StochasticPositions
    from stopmim.method.predictor import Noise, Predictor
    from stopmim.runs.run import Run
    from stopmim.train.loop import pretrain
    from stopmim.weights.load import load_encoder, load_model

    masking = masks

_HOME = {
    "Adapter": "evals.adapter",
    "Batch": "method.model",
    "Config": "config.schema",
    "Encoder": "method.encoder",
    "MaskedImageModel": "method.model",
    "Noise": "method.predictor",
    "Positions": "method.positions",
    "Predictor": "method.predictor",
    "Run": "runs.run",
    "StochasticPositions": "method.positions",
    "VisionTransformer": "method.encoder",
    "load_encoder": "weights.load",
    "load_model": "weights.load",
    "pretrain": "train.loop",
}

# Modules that are public under a shorter name than their place in the tree.
_ALIASES = {
    "stopmim.ablate": "stopmim.ablations.run",
    "stopmim.analysis": "stopmim.insight.analyse",
    "stopmim.data.scenes": "stopmim.data.sources.scenes",
    "stopmim.evals.files": "stopmim.evals.feature_files",
    "stopmim.export": "stopmim.weights.export",
    "stopmim.identify": "stopmim.weights.inspect",
    "stopmim.masking": "stopmim.method.masks",
    "stopmim.plan": "stopmim.method.build",
    "stopmim.positions": "stopmim.method.positions",
    "stopmim.presets": "stopmim.config.presets",
    "stopmim.schedules": "stopmim.base.schedules",
}

__all__ = [
    "Adapter",
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


class _Aliases:
    """Imports a public alias as the very module it stands for: ``import stopmim.masking``.

    A finder and loader without the base classes of importlib.abc, which take long to import.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _ALIASES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_ALIASES[spec.name])
        spec.loader_state = module.__spec__  # the import system is about to overwrite it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Aliases())


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"stopmim.{_HOME[name]}"), name)
    if f"stopmim.{name}" in _ALIASES or name in ("data", "evals"):
        return import_module(f"stopmim.{name}")
    raise AttributeError(f"module 'stopmim' has no attribute {name!r}")


def __dir__() -> list[str]:
    short = [alias.removeprefix("stopmim.") for alias in _ALIASES]
    return [*__all__, "data", "evals", *(name for name in short if "." not in name)]
