"""Attention for short sequences, by blocks of keys in backward: no registers are spilled.

    S = Q K^T / sqrt(D)      l = log sum_j exp S_ij      P = exp(S - l)      O = P V

Forward keeps l, so backward needs no sums over keys: with G the gradient of O and
e_i = sum_d G_id O_id, which equals sum_j P_ij (G V^T)_ij,

    grad V = P^T G    R = P * (G V^T - e) / sqrt(D)    grad Q = R K    grad K = R^T Q

A program has a whole head of one image. It holds all its queries and goes through the keys PART at
a time, whose gradients are complete at once; only that of the queries is kept meanwhile. Tiles are
powers of two. A head of 80 channels is one of 64 and one of 16, not one of 128.

Shapes: B images, N tokens, H heads of D channels. Queries are the tokens from `first` on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is what GPUs have; l is in its units too


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    base, rows, known, stride, D: tl.constexpr, FIRST: tl.constexpr, DIMS: tl.constexpr
):
    """Channels from FIRST on of a head, at `rows`; zeros elsewhere."""
    dims = FIRST + tl.arange(0, DIMS)
    inside = known[:, None] & (dims < D)[None, :]
    return tl.load(base + rows[:, None] * stride + dims[None, :], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    base, rows, known, stride, x, D: tl.constexpr, FIRST: tl.constexpr, DIMS: tl.constexpr
):
    dims = FIRST + tl.arange(0, DIMS)
    inside = known[:, None] & (dims < D)[None, :]
    there = base + rows[:, None] * stride + dims[None, :]
    tl.store(there, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _along(a, b):  # type: ignore[no-untyped-def]
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _block_attention_forward(  # type: ignore[no-untyped-def]
    qkv, out, logs, scale, n, first, heads, D: tl.constexpr, DIMS: tl.constexpr,
    REST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * D
    qkv += image * n * 3 * width + head * D
    out += (image * (n - first) - first) * width + head * D
    logs += (image * heads + head) * (n - first) - first
    rows, cols = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    wanted, known = rows < n, cols < n
    q = _load(qkv, rows, wanted, 3 * width, D, 0, DIMS)
    k = _load(qkv + width, cols, known, 3 * width, D, 0, DIMS)
    v = _load(qkv + 2 * width, cols, known, 3 * width, D, 0, DIMS)
    scores = tl.dot(q, tl.trans(k))
    if REST:
        q2 = _load(qkv, rows, wanted, 3 * width, D, DIMS, REST)
        k2 = _load(qkv + width, cols, known, 3 * width, D, DIMS, REST)
        scores = tl.dot(q2, tl.trans(k2), scores)
    scores = tl.where(known[None, :], scores * (scale * LOG2_E), float("-inf"))
    most = tl.max(scores, 1)
    weights = tl.exp2(scores - most[:, None])
    total = tl.sum(weights, 1)
    tl.store(logs + rows, most + tl.log2(total), mask=wanted)
    weights = (weights / total[:, None]).to(v.dtype)
    _store(out, rows, wanted, width, tl.dot(weights, v), D, 0, DIMS)
    if REST:
        v2 = _load(qkv + 2 * width, cols, known, 3 * width, D, DIMS, REST)
        _store(out, rows, wanted, width, tl.dot(weights, v2), D, DIMS, REST)


@triton.jit  # type: ignore[untyped-decorator]
def _block_attention_backward(  # type: ignore[no-untyped-def]
    qkv, out, logs, grad_out, grad, scale, n, first, heads, D: tl.constexpr, DIMS: tl.constexpr,
    REST: tl.constexpr, QUERIES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * D
    qkv += image * n * 3 * width + head * D
    grad += image * n * 3 * width + head * D
    out += (image * (n - first) - first) * width + head * D
    grad_out += (image * (n - first) - first) * width + head * D
    rows = first + tl.arange(0, QUERIES)
    wanted = rows < n
    # Queries beyond the last have gradient 0, and with it everything they would add below.
    q = _load(qkv, rows, wanted, 3 * width, D, 0, DIMS)
    g = _load(grad_out, rows, wanted, width, D, 0, DIMS)
    even = _along(g, _load(out, rows, wanted, width, D, 0, DIMS))
    grad_q = tl.zeros([QUERIES, DIMS], tl.float32)
    if REST:
        q2 = _load(qkv, rows, wanted, 3 * width, D, DIMS, REST)
        g2 = _load(grad_out, rows, wanted, width, D, DIMS, REST)
        even += _along(g2, _load(out, rows, wanted, width, D, DIMS, REST))
        grad_q2 = tl.zeros([QUERIES, REST], tl.float32)
    log = tl.load(
        logs + (image * heads + head) * (n - first) - first + rows, mask=wanted, other=0.0
    )
    for start in tl.range(0, n, PART):
        cols = start + tl.arange(0, PART)
        known = cols < n
        k = _load(qkv + width, cols, known, 3 * width, D, 0, DIMS)
        v = _load(qkv + 2 * width, cols, known, 3 * width, D, 0, DIMS)
        scores, inner = tl.dot(q, tl.trans(k)), tl.dot(g, tl.trans(v))
        if REST:
            k2 = _load(qkv + width, cols, known, 3 * width, D, DIMS, REST)
            v2 = _load(qkv + 2 * width, cols, known, 3 * width, D, DIMS, REST)
            scores = tl.dot(q2, tl.trans(k2), scores)
            inner = tl.dot(g2, tl.trans(v2), inner)
        weights = tl.exp2(scores * (scale * LOG2_E) - log[:, None])
        weights = tl.where(known[None, :], weights, 0.0)
        slopes = (weights * (inner - even[:, None])).to(g.dtype)
        weights = tl.trans(weights.to(g.dtype))
        turned = tl.trans(slopes)
        _store(grad + 2 * width, cols, known, 3 * width, tl.dot(weights, g), D, 0, DIMS)
        _store(grad + width, cols, known, 3 * width, tl.dot(turned, q) * scale, D, 0, DIMS)
        grad_q = tl.dot(slopes, k, grad_q)
        none = tl.zeros([PART, DIMS], tl.float32)  # tokens that are keys and values only
        _store(grad, cols, cols < first, 3 * width, none, D, 0, DIMS)
        if REST:
            _store(grad + 2 * width, cols, known, 3 * width, tl.dot(weights, g2), D, DIMS, REST)
            _store(grad + width, cols, known, 3 * width, tl.dot(turned, q2) * scale, D, DIMS, REST)
            grad_q2 = tl.dot(slopes, k2, grad_q2)
            none = tl.zeros([PART, REST], tl.float32)
            _store(grad, cols, cols < first, 3 * width, none, D, DIMS, REST)
    _store(grad, rows, wanted, 3 * width, grad_q * scale, D, 0, DIMS)
    if REST:
        _store(grad, rows, wanted, 3 * width, grad_q2 * scale, D, DIMS, REST)


PART = 32  # keys at a time


def _tiles(n: int, first: int, d: int) -> dict[str, int]:
    """Powers of two that hold queries and channels, and warps that have registers for them."""
    queries = max(16, triton.next_power_of_2(n - first))
    dims, rest = (64, 16) if 64 < d <= 80 else (max(16, triton.next_power_of_2(d)), 0)
    warps = 2 if queries <= 32 else 8 if queries > 64 and dims + rest > 64 else 4
    return {"D": d, "DIMS": dims, "REST": rest, "QUERIES": queries, "num_warps": warps}


@custom_op("stopmim::block_attention", mutates_args=())
def block_attention(qkv: Tensor, heads: int, first: int) -> tuple[Tensor, Tensor]:
    """O, (B, N - first, H * D), of the packed `qkv` (B, N, 3 * H * D), and l, (B, H, N - first)."""
    batch, n, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    out = qkv.new_empty(batch, n - first, heads * d)
    logs = qkv.new_empty(batch, heads, n - first, dtype=torch.float32)
    keys, qkv = max(16, triton.next_power_of_2(n)), qkv.contiguous()
    where = (qkv, out, logs, d**-0.5, n, first, heads)
    _block_attention_forward[(batch * heads,)](*where, KEYS=keys, **_tiles(n, first, d))
    return out, logs


@custom_op("stopmim::block_attention_backward", mutates_args=())
def block_attention_backward(
    qkv: Tensor, out: Tensor, logs: Tensor, grad_out: Tensor, heads: int, first: int
) -> Tensor:
    """Gradient with respect to `qkv`, (B, N, 3 * H * D)."""
    qkv, grad_out = qkv.contiguous(), grad_out.contiguous()
    batch, n, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    grad = torch.empty_like(qkv)
    where = (qkv, out, logs, grad_out, grad, d**-0.5, n, first, heads)
    _block_attention_backward[(batch * heads,)](
        *where, PART=PART, **_tiles(n, first, d), num_stages=1
    )
    return grad


@block_attention.register_fake
def _(qkv: Tensor, heads: int, first: int) -> tuple[Tensor, Tensor]:
    batch, n, width = qkv.shape
    logs = qkv.new_empty(batch, heads, n - first, dtype=torch.float32)
    return qkv.new_empty(batch, n - first, width // 3), logs


@block_attention_backward.register_fake
def _(qkv: Tensor, out: Tensor, logs: Tensor, grad_out: Tensor, heads: int, first: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Tensor, int, int], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.heads, ctx.first = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, *output)


def _differentiate(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor, None, None]:
    saved = ctx.saved_tensors
    return block_attention_backward(*saved, grad_out, ctx.heads, ctx.first), None, None


block_attention.register_autograd(_differentiate, setup_context=_save)
