"""AdamW with its weight decay, and the EMA that follows it, in one pass over memory.

    m' = m + (1 - b) (g - m)        v' = c v + (1 - c) g^2
    p' = (1 - lr * decay) p - lr / (1 - b^t) * m' / (sqrt(v' / (1 - c^t)) + eps)
    q' = q + (1 - momentum) (p' - q)

p is a weight, g its gradient, m and v its moments, t its steps; q is the same weight of the target
encoder, if that has it. An update to be skipped changes q alone, as does one of a weight without
gradient. Bytes per weight: 36 of 20 read and 16 written, where three passes move 48; without q 28.

All stay in tensors of their own. A table holds their addresses, and each program takes a piece of
one weight. Gradients are elsewhere at every update: their addresses reach the table as arguments of
a kernel. CUDA graphs keep those, and so need no memory of the host to stay as it was.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 8192  # weights of a program
BLOCK = 1024  # of them at a time: 4 to a thread, in one load of 16 bytes
WARPS = 8

# Addresses, or 0 for what a weight lacks; its size, whether it decays, its first piece; the last
# bits of all of these together, which are 0 if loads of 16 bytes are possible.
P, M, V, Q, T, SIZE, DECAYS, FIRST, LAST_BITS = map(tl.constexpr, range(9))
COLUMNS = tl.constexpr(9)
# Of a weight in this update: what decay leaves of it, its rate, the scale of sqrt(v), that of EMA.
NUMBERS = tl.constexpr(4)


@triton.jit  # type: ignore[untyped-decorator]
def _floats(address, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.float32)), ALIGN)


@triton.jit
def _moves(gradient, skip):  # type: ignore[no-untyped-def]
    return (tl.load(gradient) != 0) & (tl.load(skip) == 0)


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_prepare(  # type: ignore[no-untyped-def]
    table, gradients, numbers, lr, weight_decay, momentum, skip,
    LOG2_B: tl.constexpr, LOG2_C: tl.constexpr,
):  # fmt: skip
    """Counts a step of one weight; computes its numbers, in float64 as AdamW does."""
    row = table + tl.program_id(0) * COLUMNS
    numbers += tl.program_id(0) * NUMBERS
    moves = _moves(gradients + tl.program_id(0), skip)
    steps = _floats(row + T, 4)
    t = tl.load(steps, mask=moves, other=0.0) + 1
    tl.store(steps, t, mask=moves)
    rate, t = tl.load(lr), t.to(tl.float64)
    tl.store(numbers, 1 - rate * tl.load(weight_decay) * tl.load(row + DECAYS))
    tl.store(numbers + 1, rate / (1 - tl.exp2(t * LOG2_B)))
    tl.store(numbers + 2, 1 / tl.sqrt(1 - tl.exp2(t * LOG2_C)))
    tl.store(numbers + 3, 1 - tl.load(momentum))


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_piece(  # type: ignore[no-untyped-def]
    row, gradient, numbers, skip, start, B: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    p, m, v = _floats(row + P, ALIGN), _floats(row + M, ALIGN), _floats(row + V, ALIGN)
    q, g = _floats(row + Q, ALIGN), _floats(gradient, ALIGN)
    size = tl.minimum(tl.load(row + SIZE) - start, PIECE).to(tl.int32)
    size = size // (ALIGN // 4) * (ALIGN // 4)  # a multiple of it already; the compiler sees it now
    moves, follows = _moves(gradient, skip), tl.load(row + Q) != 0
    kept, rate = tl.load(numbers), tl.load(numbers + 1)
    scale, near = tl.load(numbers + 2), tl.load(numbers + 3)
    for begin in tl.range(0, size, BLOCK):
        inside = begin + tl.arange(0, BLOCK) < size
        places = start + begin + tl.arange(0, BLOCK)
        weight = tl.load(p + places, mask=inside, other=0.0)
        slope = tl.load(g + places, mask=inside & moves, other=0.0)
        mean = tl.load(m + places, mask=inside & moves, other=0.0)
        square = tl.load(v + places, mask=inside & moves, other=0.0)
        target = tl.load(q + places, mask=inside & follows, other=0.0)
        mean += (1 - B) * (slope - mean)
        square = C * square + (1 - C) * slope * slope
        moved = weight * kept - rate * mean / (tl.sqrt(square) * scale + EPS)
        weight = tl.where(moves, moved, weight)
        tl.store(p + places, weight, mask=inside & moves)
        tl.store(m + places, mean, mask=inside & moves)
        tl.store(v + places, square, mask=inside & moves)
        tl.store(q + places, target + near * (weight - target), mask=inside & follows)


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_update(  # type: ignore[no-untyped-def]
    table, gradients, numbers, skip, owners, B: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner = tl.load(owners + tl.program_id(0))
    row, gradient = table + owner * COLUMNS, gradients + owner
    numbers += owner * NUMBERS
    start = (tl.program_id(0) - tl.load(row + FIRST)) * PIECE
    if (tl.load(row + LAST_BITS) | tl.load(gradient)) % 16 == 0:
        _adamw_piece(row, gradient, numbers, skip, start, B, C, EPS, PIECE, BLOCK, 16)
    else:  # weights of odd sizes, gradients that are parts of a larger tensor
        _adamw_piece(row, gradient, numbers, skip, start, B, C, EPS, PIECE, BLOCK, 4)


class Table(NamedTuple):
    """Addresses and sizes of the weights, which stay where they are."""

    rows: Tensor  # (W, 9), int64
    gradients: Tensor  # (W,), addresses
    places: tuple[Tensor, ...]  # each of these
    numbers: Tensor  # (W, 4)
    owners: Tensor  # the weight of every piece


class OnePass:
    """Updates the weights of `optimizer`, an AdamW, and then the targets that follow some of them.

    Args:
        targets: target by weight, which need not be one of the optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, targets: dict[Tensor, Tensor]) -> None:
        self.optimizer, self.targets = optimizer, targets
        (self.b, self.c), self.eps = (optimizer.defaults[key] for key in ("betas", "eps"))
        groups = optimizer.param_groups
        # A target also follows weights that are not trained.
        self.decays = dict.fromkeys(targets, False)
        self.decays |= {p: group["decays"] for group in groups for p in group["params"]}
        self.known: list[tuple[int, ...]] = []
        self.table: Table | None = None

    def __call__(
        self,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        momentum: float | Tensor,
        skip: Tensor,
    ) -> bool:
        """Makes an update, or returns False: the first one of a weight is left to AdamW."""
        weights = list(self.decays)
        if any(p.grad is not None and not self._takes(p, p.grad) for p in weights):
            return False
        known = [self._addresses(p) for p in weights]
        if self.table is None or known != self.known:  # the first time, and not while recorded
            self.known, self.table = known, self._table(known)
        table = self.table
        table.gradients.zero_()
        torch._foreach_add_(table.places, [_address(p.grad) for p in weights])
        rates = [  # `full` is a kernel: nothing waits for a copy from the host
            x.double()
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=torch.float64, device=skip.device)
            for x in (lr, weight_decay, momentum)
        ]
        given = table.rows, table.gradients, table.numbers
        logs = (math.log2(max(x, 1e-300)) for x in (self.b, self.c))
        _adamw_prepare[(len(weights),)](*given, *rates, skip, *logs, num_warps=1)
        _adamw_update[(len(table.owners),)](
            *(*given, skip, table.owners, self.b, self.c, self.eps, PIECE, BLOCK), num_warps=WARPS
        )
        return True

    def _takes(self, p: Tensor, gradient: Tensor) -> bool:
        return bool(self.optimizer.state.get(p)) and gradient.is_contiguous()

    def _addresses(self, p: Tensor) -> tuple[int, ...]:
        state = self.optimizer.state.get(p, {})
        moments = [state.get(key) for key in ("exp_avg", "exp_avg_sq")]
        return tuple(map(_address, [p, *moments, self.targets.get(p), state.get("step")]))

    def _table(self, known: list[tuple[int, ...]]) -> Table:
        device = next(iter(self.decays)).device
        rows, owners = [], list[int]()
        for i, ((p, decays), addresses) in enumerate(zip(self.decays.items(), known, strict=True)):
            bits = 4 * p.numel()
            for address in addresses[:4]:
                bits |= address
            rows.append([*addresses, p.numel(), decays, len(owners), bits % 16])
            owners += [i] * triton.cdiv(p.numel(), PIECE)
        gradients = torch.zeros(len(rows), dtype=torch.int64, device=device)
        return Table(
            rows=torch.tensor(rows, dtype=torch.int64, device=device),
            gradients=gradients,
            places=gradients.unbind(),
            numbers=torch.empty(len(rows), NUMBERS.value, device=device),
            owners=torch.tensor(owners, dtype=torch.int32, device=device),
        )


def _address(x: Tensor | None) -> int:
    if x is None:
        return 0
    assert x.dtype == torch.float32, x.dtype
    assert x.is_contiguous(), x.stride()
    return x.data_ptr()
