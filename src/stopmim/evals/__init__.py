"""Evaluation of frozen encoders: features, protocols, the suite, comparisons."""

from importlib import import_module
from typing import Any

_MODULES = (
    *("adapter", "compare", "features", "files", "finetune", "knn", "linear", "lowshot", "suite"),
    *("table", "tracking"),
)


def __getattr__(name: str) -> Any:
    """Imports a protocol's functions on first use: ``stopmim.evals.lowshot.fit_logistic``."""
    if name in _MODULES:
        return import_module(f"stopmim.evals.{name}")
    raise AttributeError(f"module 'stopmim.evals' has no attribute {name!r}")
