"""The cache of features and answers gives back what was stored under a key, or nothing."""

import os
from pathlib import Path

import pytest
import torch

from stopmim.evals import cache


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOPMIM_CACHE", str(tmp_path))
    cache.store("features", "a", {"x": torch.arange(3)}, "text")
    return tmp_path / "features" / "a.safetensors"


def test_what_was_stored_comes_back(stored: Path) -> None:
    tensors, text = cache.load("features", "a") or ({}, "")
    assert torch.equal(tensors["x"], torch.arange(3))
    assert text == "text"


def test_an_intact_file_under_another_key_is_nothing(stored: Path) -> None:
    """Its numbers would be those of another encoder, or of other images."""
    stored.rename(stored.with_name("b.safetensors"))
    assert cache.load("features", "b") is None


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "loop"])
def test_what_is_no_file_is_nothing(stored: Path, kind: str) -> None:
    stored.unlink()
    if kind == "pipe":
        os.mkfifo(stored)
    elif kind == "folder":
        stored.mkdir()
    else:
        stored.symlink_to("/dev/zero" if kind == "endless" else stored)
    assert cache.load("features", "a") is None
