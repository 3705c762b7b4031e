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


def test_damage_to_any_piece_is_noticed_and_so_are_pieces_in_another_order(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "PIECE", 64)
    x = torch.arange(100, dtype=torch.int32)
    cache.store("features", "a", {"x": x, "y": x[:0]})
    whole = stored.read_bytes()
    start = whole.index(x.numpy().tobytes())
    for place in range(start, start + 400, 16):
        data = bytearray(whole)
        data[place] ^= 1
        stored.write_bytes(data)
        assert cache.load("features", "a") is None, place - start
    one, other, rest = start, start + 64, start + 128
    stored.write_bytes(whole[:one] + whole[other:rest] + whole[one:other] + whole[rest:])
    assert cache.load("features", "a") is None
    stored.write_bytes(whole)
    assert torch.equal((cache.load("features", "a") or ({}, ""))[0]["x"], x)


def test_a_weight_in_any_piece_makes_another_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PIECE", 64)
    encoder = torch.nn.Linear(10, 10)
    found = {cache.of_encoder(encoder)}
    for i in range(10):
        with torch.no_grad():
            encoder.weight[i, i] += 1
        found.add(cache.of_encoder(encoder))
    assert len(found) == 11


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
