"""Attention and GELU: torch's own, or ours on a GPU in half precision."""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

HAVE_TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if HAVE_TRITON:
    from stopmim.gpu.kernels.attention import short_attention
    from stopmim.gpu.kernels.gelu import gelu as short_gelu

LONGEST = 128  # tokens; beyond this, torch's own kernels are faster
# Elements of a tile: twice as many need 256 KB of shared memory in backward; an H100 has 227 KB.
LARGEST = 128 * 128


def is_short(tokens: int, channels: int) -> bool:
    """Whether a head with this many `channels` fits one tile, whose edges are powers of two."""
    edges = (16, 32, 64, LONGEST)
    return any(tokens <= edge and channels <= LARGEST // edge for edge in edges)


def attend(qkv: Tensor, heads: int, first: int = 0) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V of all heads: packed `qkv` (B, N, 3 * D) -> (B, N - first, D).

    Tokens before `first` are keys and values only, not queries.
    """
    half = HAVE_TRITON and qkv.is_cuda and qkv.element_size() == 2
    if half and is_short(qkv.shape[1], qkv.shape[2] // (3 * heads)):
        return short_attention(qkv, heads, first)
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, N, d)
    return F.scaled_dot_product_attention(q[:, :, first:], k, v).transpose(1, 2).flatten(2)


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), with the exact Phi, not its tanh."""
    if HAVE_TRITON and x.is_cuda and x.element_size() == 2:
        return short_gelu(x)
    return F.gelu(x)
