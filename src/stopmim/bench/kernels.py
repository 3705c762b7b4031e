"""Benchmarks the speed and precision of the fused kernels.

Each is compared with the usual way, at the sizes that a training step has: LayerNorm after a
residual addition as torch compiles it, attention as `gpu/attention.py` has it, the optimizer as
recorded updates run it. Both are recorded as CUDA graphs, so that launches cost nothing, and timed
in turn. Errors are against float64, for fresh random inputs. The fewest bytes that must be moved,
at the rate of a large copy, are the floor.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.errors import UserError
from stopmim.bench.step import BATCH, PUBLISHED, MaskSource, copy_rate, masks_of, tokens_of, usual
from stopmim.bench.timing import Line, machine
from stopmim.config.architectures import parse_arch
from stopmim.gpu.attention import HAVE_TRITON, attend
from stopmim.gpu.blocks import BY_BLOCKS
from stopmim.gpu.devices import compiled
from stopmim.method.build import build
from stopmim.method.model import MaskedImageModel
from stopmim.train.optimizer import adamw, advance, one_pass
from stopmim.train.rates import Rates

PRESETS = ("vit_b16_stop", "vit_l16_stop", "vit_h14_stop", "small_images")
EPS = 1e-6
MS = 20  # of one measurement
# Values for `norm.RESIDENT` and `norm.STAGES`: only a GPU shows which is fastest.
CHOICES = [(resident, stages) for resident in (16, 24, 32, 48) for stages in (1, 2, 3)]
# Values for `adamw.PIECE`, `adamw.BLOCK` and `adamw.WARPS`.
PIECES = [(2048, 1024, 8), (8192, 512, 4), (8192, 1024, 4), (8192, 2048, 8), (32768, 1024, 8)]


class Input(NamedTuple):
    """The input of a block: `n` tokens for each of `batch` images, of heads * channels."""

    where: str
    batch: int
    n: int
    heads: int
    channels: int  # of a head


class Case(NamedTuple):
    """One operation two ways, with its inputs and the gradients of its outputs."""

    ours: Callable[..., tuple[Tensor, ...]]
    usual: Callable[..., tuple[Tensor, ...]]
    plain: Callable[..., tuple[Tensor, ...]]  # for float64
    inputs: list[Tensor]
    above: list[Tensor]
    bytes: tuple[int, int]  # that must be moved, forward and backward


def bench_kernels(*, rounds: int = 10) -> Iterator[Line]:
    """Times every fused kernel at every size of the presets."""
    if not HAVE_TRITON:
        raise UserError("bench kernels: needs a GPU with triton; run it where there is one")
    device = torch.device("cuda")
    rate = copy_rate(device)
    yield {"bench": "kernels, copy", "gb_per_s": round(rate / 1e9), **machine(device)}
    for preset in PRESETS:
        for tokens in _sizes(preset):
            about = {"preset": preset} | tokens._asdict()
            for stream in (torch.float32, torch.bfloat16):
                line: Line = {"bench": "kernels, add and norm"} | about | {"stream": str(stream)}
                yield line | _measure(_norm(tokens, stream, device), rate, rounds)
            if tokens.n > BY_BLOCKS:
                line = {"bench": "kernels, attention"} | about
                yield line | _measure(_attention(tokens, device), rate, rounds)
        yield _optimizer(preset, rate, rounds, device)
    for tokens in _sizes(PRESETS[0]):
        yield from _choices(tokens, device)
    yield from _pieces(device)


def _sizes(preset: str) -> list[Input]:
    """Context and predictor of a step with the published masks, or the likeliest own ones."""
    config = usual(preset, {"runtime.device": "cuda"})
    batch, width = BATCH[config.arch], config.predictor.width
    kind: MaskSource = "published" if config.arch in PUBLISHED else "own"
    (masks,) = masks_of(config, kind, [slice(0, 1)], torch.device("cpu"))
    seen, targets, asked = tokens_of(masks)
    size, heads = parse_arch(config.arch)[0], config.predictor.heads or 1
    return [
        Input("context", batch, seen, size.heads, size.width // size.heads),
        Input("predictor", targets * batch, seen + asked, heads, width // heads),
    ]


# ------------------------------------------------------------------------------ the operations


def _add_norm(
    x: Tensor, delta: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, ...]:
    y = x + (delta + bias.to(delta.dtype)).to(x.dtype)
    return y, F.layer_norm(y.to(gamma.dtype), y.shape[-1:], gamma, beta, EPS).to(delta.dtype)


def _norm(tokens: Input, stream: torch.dtype, device: torch.device) -> Case:
    from stopmim.gpu.kernels.norm import add_norm

    def ours(*inputs: Tensor) -> tuple[Tensor, ...]:
        return add_norm(*inputs, EPS, torch.bfloat16)[:2]

    width = tokens.heads * tokens.channels
    shape = (tokens.batch, tokens.n, width)
    make = partial(torch.randn, device=device)
    x, above_y = (make(shape).to(stream) for _ in range(2))
    delta, above_h = (make(shape).bfloat16() for _ in range(2))
    features, wide = x.numel(), x.element_size()
    moved = features * (2 * wide + 4), features * (3 * wide + 4)
    inputs = [x, delta, *(make(width) for _ in range(3))]
    return Case(ours, compiled(_add_norm), _add_norm, inputs, [above_y, above_h], moved)


def _attention(tokens: Input, device: torch.device) -> Case:
    from stopmim.gpu.kernels.blockwise import block_attention

    heads, width = tokens.heads, tokens.heads * tokens.channels

    def plain(qkv: Tensor) -> tuple[Tensor]:
        q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return (F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),)

    shape = (tokens.batch, tokens.n, width)
    qkv = torch.randn(*shape[:2], 3 * width, device=device).bfloat16()
    above = torch.randn(shape, device=device).bfloat16()
    return Case(
        ours=lambda qkv: block_attention(qkv, heads, 0)[:1],
        usual=lambda qkv: (attend(qkv, heads),),
        plain=plain,
        inputs=[qkv],
        above=[above],
        bytes=(8 * above.numel(), 16 * above.numel()),
    )


# ------------------------------------------------------------------------------ the optimizer


class Update:
    """AdamW and the target encoder of a preset: random weights, gradients and moments."""

    def __init__(self, preset: str, device: torch.device) -> None:
        config = usual(preset, {"runtime.device": "cuda"})
        with torch.device("meta"):  # initial weights would take longer than the measurement
            model = build(config)
        self.model: MaskedImageModel = model.to_empty(device=device)
        for p in self.model.parameters():
            p.data.normal_()
            p.grad = torch.randn_like(p) if p.requires_grad else None
        self.optimizer = adamw(self.model, config.optim)
        rates = (torch.tensor(x, dtype=torch.float64, device=device) for x in (1e-3, 0.04, 0.996))
        self.rates, self.skip = Rates(*rates), torch.zeros((), device=device)
        self.at_once = one_pass(self.model, self.optimizer, torch.bfloat16)
        self.usual()  # makes the moments

    def usual(self) -> None:
        advance(self.model, self.optimizer, self.rates, self.skip)

    def ours(self) -> None:
        advance(self.model, self.optimizer, self.rates, self.skip, self.at_once)

    def bytes(self) -> tuple[int, int]:
        """Bytes that one pass moves, and three: of AdamW, decay and the target encoder."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        decays = [p for group in self.optimizer.param_groups[:2] for p in group["params"]]
        sizes = sum(p.numel() for p in trained), sum(p.numel() for p in decays)
        target = self.model.target_encoder
        follow = sum(p.numel() for p in target.parameters()) if target else 0
        return 28 * sizes[0] + 8 * follow, 28 * sizes[0] + 8 * sizes[1] + 12 * follow

    @torch.no_grad()
    def error(self) -> list[float]:
        """Relative errors of the change of one matrix and of its target, against float64."""
        assert self.model.target_encoder is not None
        name = "blocks.0.mlp.fc1.weight"
        p, q = (m.get_parameter(name) for m in (self.model.encoder, self.model.target_encoder))
        state, (lr, decay, momentum) = self.optimizer.state[p], (float(x) for x in self.rates)
        keys = ("step", "exp_avg", "exp_avg_sq")
        t, m, v, before, follower = (x.double() for x in (*(state[key] for key in keys), p, q))
        assert p.grad is not None
        g = p.grad.double()
        m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square(), t + 1
        step = lr / (1 - 0.9**t) * m / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        weight = (1 - lr * decay) * before - step
        wanted = weight - before, (1 - momentum) * (weight - follower)
        self.ours()
        found = p.double() - before, q.double() - follower
        pairs = zip(found, wanted, strict=True)
        return [float(f"{float((a - b).norm() / b.norm()):.2g}") for a, b in pairs]


def _optimizer(preset: str, rate: float, rounds: int, device: torch.device) -> Line:
    update = Update(preset, device)
    line: Line = {"bench": "kernels, optimizer", "preset": preset, "error": update.error()}
    spent = [(_time(update.ours), _time(update.usual)) for _ in range(rounds)]
    both = zip(("", "usual_"), zip(*spent, strict=True), update.bytes(), strict=True)
    for name, times, moved in both:
        ms = statistics.median(times)
        line[f"{name}us"] = round(1e3 * ms, 1)
        line[f"{name}of_copy"] = round(moved / rate / (1e-3 * ms), 3)
        line[f"{name}bytes"] = moved
    return line


def _pieces(device: torch.device) -> Iterator[Line]:
    """Times of the optimizer with other pieces, blocks and numbers of warps."""
    from stopmim.gpu.kernels import adamw as kernel

    update = Update(PRESETS[0], device)
    for piece, block, warps in PIECES:
        with mock.patch.multiple(kernel, PIECE=piece, BLOCK=block, WARPS=warps):
            update.at_once = one_pass(update.model, update.optimizer, torch.bfloat16)
            ms = statistics.median(_time(update.ours) for _ in range(3))
        line: Line = {"bench": "kernels, optimizer, choice", "piece": piece, "block": block}
        yield line | {"warps": warps, "us": round(1e3 * ms, 1)}


def _time(function: Callable[[], object]) -> float:
    """Median milliseconds of a call."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(function, MS, return_mode="median"))


# ------------------------------------------------------------------------------ measuring


def _measure(case: Case, rate: float, rounds: int) -> Line:
    """Errors of our results, and times of both ways in microseconds, forward and backward."""
    line: Line = {"error": _error(case)}
    times = _times({"": case.ours, "usual_": case.usual}, case, rounds)
    for name, (forward, both) in times.items():
        spent = {"forward": forward, "backward": both - forward}
        for way, moved in zip(spent, case.bytes, strict=True):
            line[f"{name}{way}_us"] = round(1e3 * spent[way], 1)
            line[f"{name}{way}_of_copy"] = round(moved / rate / (1e-3 * spent[way]), 3)
    line["bytes"] = case.bytes
    return line


def _error(case: Case) -> list[float]:
    """Relative errors of outputs and gradients."""
    found, expected = (
        _both(f, [x.to(t).requires_grad_() for x, t in zip(case.inputs, types, strict=True)], above)
        for f, types, above in (
            (case.ours, [x.dtype for x in case.inputs], case.above),
            (case.plain, [torch.float64] * len(case.inputs), [g.double() for g in case.above]),
        )
    )
    pairs = zip(found, expected, strict=True)
    return [float(f"{float((a.double() - b).norm() / b.norm()):.2g}") for a, b in pairs]


def _both(
    function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], above: list[Tensor]
) -> list[Tensor]:
    results = function(*inputs)
    gradients = torch.autograd.grad(results, inputs, above)
    return [x.detach() for x in (*results, *gradients)]


def _times(
    functions: dict[str, Callable[..., tuple[Tensor, ...]]], case: Case, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median milliseconds of forward alone, and of both ways, of each function."""
    kept: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    inputs = [x.detach().requires_grad_() for x in case.inputs]
    for _ in range(rounds):
        for name, function in functions.items():
            with torch.no_grad():
                forward = _time(partial(function, *inputs))
            kept[name].append((forward, _time(partial(_both, function, inputs, case.above))))
    return {
        name: (statistics.median(a for a, _ in times), statistics.median(b for _, b in times))
        for name, times in kept.items()
    }


def _choices(tokens: Input, device: torch.device) -> Iterator[Line]:
    """Times of the norm with other numbers of programs and stages."""
    from stopmim.gpu.kernels import norm

    case = _norm(tokens, torch.float32, device)
    for resident, stages in CHOICES:
        with mock.patch.multiple(norm, RESIDENT=resident, STAGES=stages):
            ((forward, both),) = _times({"": case.ours}, case, 3).values()
        line: Line = {"bench": "kernels, choice", "where": tokens.where, "resident": resident}
        spent = {"forward_us": 1e3 * forward, "backward_us": 1e3 * (both - forward)}
        yield line | {"stages": stages} | {name: round(us, 1) for name, us in spent.items()}
