"""Keyed randomness: every draw of a run is a pure function of the seed and of its use.

So a resumed run needs no saved generator state, and the numbers of workers and GPUs do not change
the draws. A key starts with its purpose, so that two uses never share a stream.
"""

import hashlib

import numpy as np
import torch


def seed_of(*key: str | int) -> int:
    """63-bit hash of the whole key, equal on every machine."""
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_generator(*key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_of(*key))


def numpy_generator(*key: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed_of(*key)))
