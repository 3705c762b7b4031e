"""Attention and GELU: torch's own, or ours on a GPU in half precision."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HAVE_TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if HAVE_TRITON:
    from stopmim.gpu.kernels.attention import short_attention
    from stopmim.gpu.kernels.gelu import gelu as short_gelu

LONGEST = 128  # tokens; beyond this, torch's own kernels are faster
# Elements of a tile, and the bytes of shared memory that its backward pass needs: up to 64, 80 and
# 160 KiB, compiled for three generations. An H100 has 227 KiB, an A100 163, most others 99.
SMALL, LARGE, LARGEST = 64 * 64, 128 * 64, 128 * 128
MUCH, MORE = 80 * 1024, 160 * 1024


def is_short(tokens: int, channels: int, device: torch.device) -> bool:
    """Whether a head with this many `channels` fits one tile, whose edges are powers of two."""
    edges = (16, 32, 64, LONGEST)
    tiles = [edge * _power_of_2(channels) for edge in edges if tokens <= edge]
    if not tiles or tiles[0] <= SMALL or device.type != "cuda":
        return bool(tiles) and tiles[0] <= LARGEST
    has: Any = torch.cuda.get_device_properties(device)  # a constant of compiled code
    shared = has.shared_memory_per_block_optin
    return tiles[0] <= (LARGEST if shared >= MORE else LARGE if shared >= MUCH else SMALL)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def attend(qkv: Tensor, heads: int, first: int = 0) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V of all heads: packed `qkv` (B, N, 3 * D) -> (B, N - first, D).

    Tokens before `first` are keys and values only, not queries.
    """
    half = HAVE_TRITON and qkv.is_cuda and qkv.element_size() == 2
    if half and is_short(qkv.shape[1], qkv.shape[2] // (3 * heads), qkv.device):
        return short_attention(qkv, heads, first)
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, N, d)
    return F.scaled_dot_product_attention(q[:, :, first:], k, v).transpose(1, 2).flatten(2)


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), with the exact Phi, not its tanh."""
    if HAVE_TRITON and x.is_cuda and x.element_size() == 2:
        return short_gelu(x)
    return F.gelu(x)
