"""What a frozen encoder knows: features, one file per protocol, the suite, comparisons."""

from importlib import import_module
from typing import Any

_PROTOCOLS = ("finetune", "knn", "linear", "lowshot", "tracking")


def __getattr__(name: str) -> Any:
    if name in _PROTOCOLS:
        return import_module(f"stopmim.evals.protocols.{name}")
    raise AttributeError(f"module 'stopmim.evals' has no attribute {name!r}")
