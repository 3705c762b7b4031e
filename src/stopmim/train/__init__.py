"""Training: the loop, one update, schedules, several GPUs, clusters."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "pretrain":
        return import_module("stopmim.train.loop").pretrain
    raise AttributeError(f"module 'stopmim.train' has no attribute {name!r}")
