"""Sources of images, and their way to batches: decoding, crops, order, worker processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stopmim.data.images import Images
    from stopmim.data.loading import loader
    from stopmim.data.sources.open import open_images

_HOME = {"Images": "images", "loader": "loading", "open_images": "sources.open"}

__all__ = ["Images", "loader", "open_images"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"stopmim.data.{_HOME[name]}"), name)
    if name == "scenes":
        return import_module("stopmim.data.scenes")
    raise AttributeError(f"module 'stopmim.data' has no attribute {name!r}")
