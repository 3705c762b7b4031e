"""Computes transformer blocks one by one, or by fused kernels.

When fused, a residual addition and the norm after it are one kernel (`kernels/norm.py`), and the
backward pass of attention goes by blocks (`kernels/blockwise.py`). The numbers are the same up to
rounding. This is the only place that chooses, and that sets the precision of the residual stream.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stopmim.base.console import warn
from stopmim.config.schema import RuntimeConfig
from stopmim.gpu.attention import HAVE_TRITON, attend, is_short
from stopmim.gpu.sharding import is_sharded

WIDEST = 4096  # channels of a token that one program can hold
BY_BLOCKS = 64  # tokens; the usual kernel spills no registers up to here


class Way(NamedTuple):
    """Options for computing blocks; they change the numbers by rounding only."""

    recompute: bool = False  # stores only block inputs and recomputes the rest in backward
    fused: bool = False  # fused kernels, where they fit
    half: bool = False  # under autocast, a residual stream as precise as the layers


USUAL = Way()


def way_of(runtime: RuntimeConfig) -> Way:
    fused, half = runtime.kernels == "fused", runtime.residual == "half"
    return Way(runtime.recompute == "on", fused, half)


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """The tokens (B, K, D) of `tokens` (B, N, D) at `index` (B, K)."""
    return tokens.gather(1, index.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def through(
    blocks: Iterable[nn.Module],
    x: Tensor,
    norm: nn.Module,
    way: Way = USUAL,
    first: int = 0,
    asked: Tensor | None = None,
) -> Tensor:
    """`norm` of `x` (B, N, D) after all `blocks`: (B, N - first, D), or (B, Q, D).

    The last block skips tokens that are not read: those before `first`, or not in `asked` (B, Q).
    """
    *before, last = blocks
    recompute = way.recompute and torch.is_grad_enabled()
    if way.half and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if way.fused and not recompute and _fits(x, norm):
        return fused([*before, last], x, norm, first, asked)
    for block in before:
        x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    again = recompute and not first and asked is None
    x = checkpoint(last, x, use_reentrant=False) if again else last(x, first, asked)
    return norm(x.float() if way.half else x)  # on a GPU, autocast does the same


def fused(
    blocks: list[Any], x: Tensor, norm: Any, first: int, asked: Tensor | None = None
) -> Tensor:
    """`through` by fused kernels, under autocast. Blocks have the names of `method.encoder.Block`.

    x is the residual stream; h is its norm, in half precision for the next layer.
    """
    half = torch.get_autocast_dtype(x.device.type)
    h = blocks[0].norm1(x)
    for i, block in enumerate(blocks):
        last = i + 1 == len(blocks)
        skipped = first if last else 0
        attn, mlp, after = block.attn, block.mlp, norm if last else blocks[i + 1].norm1
        mixed = _attend(attn.qkv(h), attn.heads, skipped)
        x = x[:, skipped:]
        if last and asked is not None:
            x, mixed = take(x, asked), take(mixed, asked)
        x, h = _add_norm(x, mixed, attn.proj, block.norm2, half)
        dtype = torch.float32 if last else half  # what `norm` returns under autocast
        x, h = _add_norm(x, _hidden(h, mlp.fc1), mlp.fc2, after, dtype)
    return h


def _hidden(h: Tensor, layer: nn.Linear) -> Tensor:
    """GELU of layer(h). Its bias is added here, and its gradient summed by the kernel."""
    from stopmim.gpu.kernels.gelu import gelu_after  # needs triton

    return gelu_after(F.linear(h, layer.weight, layer.bias.detach()), layer.bias)


def _add_norm(
    x: Tensor, mixed: Tensor, layer: nn.Linear, norm: nn.LayerNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + layer(mixed), and the norm of that."""
    from stopmim.gpu.kernels.norm import add_norm  # needs triton

    delta = F.linear(mixed, layer.weight)  # its bias is added, and its gradient summed, below
    y, h, *_ = add_norm(x, delta, layer.bias, norm.weight, norm.bias, norm.eps, dtype)
    return y, h


def _attend(qkv: Tensor, heads: int, first: int) -> Tensor:
    from stopmim.gpu.kernels.blockwise import block_attention  # needs triton

    n, width = qkv.shape[1:]
    if n > BY_BLOCKS and is_short(n, width // (3 * heads), qkv.device):
        return block_attention(qkv, heads, first)[0]
    return attend(qkv, heads, first)


def _fits(x: Tensor, norm: nn.Module) -> bool:
    """Whether fused kernels can be used; otherwise the usual ones give the same numbers."""
    half = x.is_cuda and torch.is_autocast_enabled("cuda")
    sharded = any(is_sharded(p) for p in norm.parameters())
    fits = isinstance(norm, nn.LayerNorm) and x.shape[-1] <= WIDEST
    return HAVE_TRITON and half and fits and not sharded


@cache  # once per process
def warn_unless_fused(
    device: torch.device, amp: torch.dtype | None, width: int, recompute: bool, sharded: bool
) -> None:
    """Warns if `runtime.kernels: fused` has no effect, with the reason."""
    reasons = {
        "a GPU": device.type != "cuda",
        "triton": device.type == "cuda" and not HAVE_TRITON,
        "bf16 or fp16": amp is None,
        f"at most {WIDEST} channels": width > WIDEST,
        "runtime.recompute: off": recompute,
        "runtime.parallel: ddp": sharded,
    }
    if missing := [needed for needed, lacks in reasons.items() if lacks]:
        warn(f"runtime.kernels: fused needs {missing[0]}; continuing with the usual kernels")
