"""GELU: x * Phi(x), with the exact Phi, not its tanh.

A compiled GELU is bound by erf, which has all digits of float32, not by memory; bfloat16 has three.
The logarithm of the normal distribution's tail is nearly a parabola: a polynomial and one exp give
the tail with a relative error of 1e-5, as far out as bfloat16 can tell it from 0.

`gelu_after` also sums the gradient of the bias of the linear layer before, which would otherwise
read all of it again. Its backward programs stay on the GPU, as those of `norm.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

NUMBERS = 2048  # of one program: eight to a thread, which is what it loads at once
COLUMNS = 512  # of those that are summed: a divisor of the hidden width of every usual network
RESIDENT = 6  # programs that sum on a multiprocessor: its registers hold no more
STAGES = 2  # tiles of such a program: one that it works on, and the next on its way from memory


@triton.jit
def _tail(z):  # type: ignore[no-untyped-def]
    """1 - Phi(z) of 0 <= z <= 7; beyond it falls on, to 0. Least largest error of the logarithm,
    found by reweighted least squares."""
    log = -1.246134e-06 * z + 4.22443e-05
    log = log * z - 0.0006419339
    log = log * z + 0.00588726
    log = log * z - 0.03738613
    log = log * z - 0.3177953
    log = log * z - 0.7979832
    return tl.exp(log * z - 0.6931441)


@triton.jit
def _slope(value):  # type: ignore[no-untyped-def]
    tail = _tail(tl.abs(value))
    density = 0.3989422804 * tl.exp(-0.5 * value * value)
    return tl.where(value < 0, tail, 1.0 - tail) + value * density


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_forward(x, out, n, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(x + places, mask=places < n).to(tl.float32)
    z = tl.abs(value)
    tl.store(out + places, tl.maximum(value, 0.0) - z * _tail(z), mask=places < n)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_backward(x, grad_out, grad, n, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(x + places, mask=places < n).to(tl.float32)
    above = tl.load(grad_out + places, mask=places < n).to(tl.float32)
    tl.store(grad + places, above * _slope(value), mask=places < n)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_backward_sums(  # type: ignore[no-untyped-def]
    x, grad_out, grad, shares, tokens,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for x (tokens, D), and the share of each program in its sum over tokens."""
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < D
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(tl.program_id(0) * ROWS, tokens, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        places = rows.to(tl.int64)[:, None] * D + cols[None, :]
        known = (rows < tokens)[:, None] & inside[None, :]
        value = tl.load(x + places, mask=known, other=0.0).to(tl.float32)
        above = tl.load(grad_out + places, mask=known, other=0.0).to(tl.float32)
        found = above * _slope(value)
        tl.store(grad + places, found, mask=known)
        total += found
    tl.store(shares + tl.program_id(0) * D + cols, tl.sum(total, 0), mask=inside)


@custom_op("stopmim::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), with the exact Phi, not its tanh."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _gelu_forward[(triton.cdiv(x.numel(), NUMBERS),)](x, out, x.numel(), NUMBERS, num_warps=8)
    return out


@custom_op("stopmim::gelu_backward", mutates_args=())
def gelu_backward(x: Tensor, grad_out: Tensor) -> Tensor:
    x, grad_out = x.contiguous(), grad_out.contiguous()
    grad = torch.empty_like(x)
    programs = (triton.cdiv(x.numel(), NUMBERS),)
    _gelu_backward[programs](x, grad_out, grad, x.numel(), NUMBERS, num_warps=8)
    return grad


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@gelu_backward.register_fake
def _(x: Tensor, grad_out: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gelu(ctx: Any, grad_out: Tensor) -> Tensor:
    return gelu_backward(*ctx.saved_tensors, grad_out)


gelu.register_autograd(_differentiate_gelu, setup_context=_save_input)


# ---------------------------------------------------------------------------- after a linear layer


@custom_op("stopmim::gelu_after", mutates_args=())
def gelu_after(x: Tensor, bias: Tensor) -> Tensor:
    """`gelu` of x (..., D), which holds `bias` (D) already: that gets its gradient here."""
    return gelu(x)


@custom_op("stopmim::gelu_after_backward", mutates_args=())
def gelu_after_backward(x: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x, and its sum over tokens, (D,) in float32."""
    x, grad_out = x.contiguous(), grad_out.contiguous()
    d = x.shape[-1]
    tokens, rows, parts = x.numel() // d, NUMBERS // COLUMNS, triton.cdiv(d, COLUMNS)
    cores = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs = min(triton.cdiv(tokens, rows), triton.cdiv(cores * RESIDENT, parts))
    grad = torch.empty_like(x)
    shares = x.new_empty(programs, d, dtype=torch.float32)
    _gelu_backward_sums[(programs, parts)](
        x, grad_out, grad, shares, tokens, d, rows, COLUMNS, STAGES, num_warps=8
    )
    return grad, shares.sum(dim=0)


@gelu_after.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@gelu_after_backward.register_fake
def _(x: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)


def _save_first(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate_after(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    grad, sums = gelu_after_backward(*ctx.saved_tensors, grad_out)
    return grad, sums


gelu_after.register_autograd(_differentiate_after, setup_context=_save_first)
