"""Identifies a file: its project, network, training progress, and what can be loaded."""

from pathlib import Path

from stopmim.weights.format import Contents, WeightFile
from stopmim.weights.load import format_of


def identify(path: str | Path, heads: int | None = None) -> Contents:
    """The contents of `path`, anything that `load_encoder` reads; CheckpointError otherwise."""
    file = WeightFile.at(path, heads)
    return format_of(file).contents(file)
