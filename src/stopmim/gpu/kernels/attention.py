"""Attention for the short sequences of masked images: softmax(Q K^T / sqrt(D)) V.

torch's attention kernels are made for long sequences. The 20 to 128 tokens of a context and a block
fit one tile: a program loads a whole head of one image, and backward recomputes the softmax instead
of storing it. Queries, keys and values come packed, as one linear layer returns them, and so does
their gradient.

Shapes: B images, N tokens, H heads of D channels. Queries are the tokens from `first` on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is what GPUs have


@triton.jit
def _exponentials(q, k, columns, n, scale):  # type: ignore[no-untyped-def]
    """exp of the scores of every query, less their maximum, and one over their sum."""
    scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
    scores = tl.where(columns[None, :] < n, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights, 1.0 / tl.sum(weights, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_forward(  # type: ignore[no-untyped-def]
    qkv, out, scale, n, first, heads, D: tl.constexpr, DIMS: tl.constexpr, TOKENS: tl.constexpr
):
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    tokens, dims = tl.arange(0, TOKENS), tl.arange(0, DIMS)
    width = heads * D
    qkv += image * n * 3 * width + head * D
    out += image * (n - first) * width + head * D
    places = tokens[:, None] * 3 * width + dims[None, :]
    known = (tokens < n)[:, None] & (dims < D)[None, :]
    wanted = (tokens >= first)[:, None] & known
    q = tl.load(qkv + places, mask=wanted, other=0.0)
    k = tl.load(qkv + width + places, mask=known, other=0.0)
    v = tl.load(qkv + 2 * width + places, mask=known, other=0.0)
    weights, share = _exponentials(q, k, tokens, n, scale)
    answer = tl.dot(weights.to(v.dtype), v) * share[:, None]
    there = out + (tokens - first)[:, None] * width + dims[None, :]
    tl.store(there, answer.to(v.dtype), mask=wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_backward(  # type: ignore[no-untyped-def]
    qkv, grad_out, grad, scale, n, first, heads,
    D: tl.constexpr, DIMS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    tokens, dims = tl.arange(0, TOKENS), tl.arange(0, DIMS)
    width = heads * D
    qkv += image * n * 3 * width + head * D
    grad += image * n * 3 * width + head * D
    grad_out += image * (n - first) * width + head * D
    places = tokens[:, None] * 3 * width + dims[None, :]
    known = (tokens < n)[:, None] & (dims < D)[None, :]
    wanted = (tokens >= first)[:, None] & known
    q = tl.load(qkv + places, mask=wanted, other=0.0)
    k = tl.load(qkv + width + places, mask=known, other=0.0)
    v = tl.load(qkv + 2 * width + places, mask=known, other=0.0)
    # Tokens that are no queries get gradient 0, and with it everything they would add below.
    above = grad_out + (tokens - first)[:, None] * width + dims[None, :]
    g = tl.load(above, mask=wanted, other=0.0)
    weights, share = _exponentials(q, k, tokens, n, scale)
    weights *= share[:, None]
    grad_v = tl.dot(tl.trans(weights.to(g.dtype)), g)
    tl.store(grad + 2 * width + places, grad_v.to(g.dtype), mask=known)
    inner = tl.dot(g, tl.trans(v))
    scores = (weights * (inner - tl.sum(weights * inner, 1)[:, None])).to(g.dtype)
    tl.store(grad + places, (tl.dot(scores, k) * scale).to(g.dtype), mask=known)
    grad_k = tl.dot(tl.trans(scores), q) * scale
    tl.store(grad + width + places, grad_k.to(g.dtype), mask=known)


def _tiles(n: int, d: int) -> dict[str, int]:
    """Powers of two that hold n x d, and the number of warps that was fastest on an H200."""
    tokens, dims = max(16, triton.next_power_of_2(n)), max(16, triton.next_power_of_2(d))
    warps = 1 if tokens <= 32 else 8 if tokens * dims > 128 * 64 else 4
    return {"DIMS": dims, "TOKENS": tokens, "num_warps": warps}


@custom_op("stopmim::short_attention", mutates_args=())
def short_attention(qkv: Tensor, heads: int, first: int) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V of the packed `qkv` (B, N, 3 * H * D): (B, N - first, H * D)."""
    batch, n, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    out = qkv.new_empty(batch, n - first, heads * d)
    grid = (batch * heads,)
    _attention_forward[grid](qkv.contiguous(), out, d**-0.5, n, first, heads, d, **_tiles(n, d))
    return out


@custom_op("stopmim::short_attention_backward", mutates_args=())
def short_attention_backward(qkv: Tensor, grad_out: Tensor, heads: int, first: int) -> Tensor:
    """Gradient with respect to `qkv`, (B, N, 3 * H * D)."""
    qkv, grad_out = qkv.contiguous(), grad_out.contiguous()
    batch, n, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    grad = torch.empty_like(qkv)
    grid = (batch * heads,)
    _attention_backward[grid](qkv, grad_out, grad, d**-0.5, n, first, heads, d, **_tiles(n, d))
    return grad


@short_attention.register_fake
def _(qkv: Tensor, heads: int, first: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - first, qkv.shape[2] // 3)


@short_attention_backward.register_fake
def _(qkv: Tensor, grad_out: Tensor, heads: int, first: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
    qkv, ctx.heads, ctx.first = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
    (qkv,) = ctx.saved_tensors
    return short_attention_backward(qkv, grad_out, ctx.heads, ctx.first), None, None


short_attention.register_autograd(_differentiate, setup_context=_save)
