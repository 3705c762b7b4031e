"""Checks the kernels on a machine without a GPU: in Triton's interpreter, and by compiling them.

    pip install --target FOLDER --no-deps triton==3.6.0
    PYTHONPATH=FOLDER TRITON_INTERPRET=1 python tests/gpu/offline.py  # errors against float64
    PYTHONPATH=FOLDER python tests/gpu/offline.py  # registers, spills, shared memory

Compiled is for Hopper (sm_90). The interpreter multiplies no matrices of bfloat16, hence float16.
Not a test: torch with CUDA brings the Triton that it needs, and no other can be pinned beside it.
"""

import copy
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from stopmim.gpu.blocks import USUAL, fused, through
from stopmim.gpu.kernels import adamw, attention, blockwise, gelu, norm
from stopmim.method.encoder import Block
from stopmim.train.optimizer import step_at
from stopmim.train.rates import Rates

# Tokens and channels of a head: predictors of B, L and H, contexts of H and B.
HEADS = ((85, 32), (85, 24), (116, 24), (73, 80), (52, 64))
WIDTHS = (384, 768, 1024, 1280)
# Of weights: full pieces, a last one that is not full, and sizes that are no multiple of 4.
SIZES = ((256, 64), (3, 2732), (3, 2731), (8192,), (1,), ())
FOLLOWED = (0, 2, 3, 5)  # those with a target


def relative(found: Tensor, expected: Tensor) -> str:
    return f"{_error(found, expected):.1e}"


def interpret() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # NumPy 2.4 makes no number of an array of one
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    for width in WIDTHS:
        given = [torch.randn(2, 3, width), torch.randn(2, 3, width).half()]
        given += [torch.randn(width) for _ in range(3)]
        exact = [x.double().requires_grad_() for x in given]
        inputs = [x.requires_grad_() for x in given]
        y = exact[0] + exact[1] + exact[2]
        expected = (y, F.layer_norm(y, (width,), exact[3], exact[4], 1e-6))
        found = norm.add_norm(*inputs, 1e-6, torch.float16)[:2]
        above = [torch.randn(2, 3, width), torch.randn(2, 3, width).half()]
        grads = torch.autograd.grad(found, inputs, above)
        wanted = torch.autograd.grad(expected, exact, [g.double() for g in above])
        pairs = zip((*found, *grads), (*expected, *wanted), strict=True)
        print(f"add_norm {width}:", *(relative(a.detach(), b.detach()) for a, b in pairs))
        x, over = (torch.randn(7, 4 * width + 96).half() for _ in range(2))
        (slope,) = torch.autograd.grad(F.gelu(z := x.double().requires_grad_()), z, over.double())
        grad, sums = gelu.gelu_after_backward(x, over)
        print(f"gelu_after {width}:", relative(grad, slope), relative(sums, slope.sum(dim=0)))
    for n, d in HEADS:
        for first in (0, n // 2):
            qkv = torch.randn(1, n, 3 * d).half().requires_grad_()
            q, k, v = qkv.double().unflatten(2, (3, 1, d)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q[:, :, first:], k, v)[:, 0]
            slope = torch.randn_like(out).half()
            (exactly,) = torch.autograd.grad(out, qkv, slope.double())
            for name, answer in (
                ("block", blockwise.block_attention(qkv, 1, first)[0]),
                ("short", attention.short_attention(qkv, 1, first)),
            ):
                (grad,) = torch.autograd.grad(answer, qkv, slope)
                errors = relative(answer.detach(), out.detach()), relative(grad, exactly.double())
                print(f"{name}_attention {n} x {d} from {first}:", *errors)


class Trained(NamedTuple):
    """Weights with all that an update changes."""

    weights: list[Tensor]
    optimizer: torch.optim.Optimizer
    targets: dict[Tensor, Tensor]

    def three_passes(self, now: Rates, skip: Tensor) -> None:
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        step_at(self.optimizer, now, skip)
        for p, q in self.targets.items():
            q.lerp_(p.detach(), 1 - now.momentum)

    def state(self) -> dict[str, Tensor]:
        """Of every kind, all numbers in one."""
        found = {"weight": self.weights, "target": list(self.targets.values())}
        states = [self.optimizer.state[p] for p in self.weights]
        found |= {key: [x[key] for x in states] for key in ("exp_avg", "exp_avg_sq", "step")}
        return {key: torch.cat([x.detach().flatten() for x in xs]) for key, xs in found.items()}


def trained(given: list[Tensor], dtype: torch.dtype) -> Trained:
    weights = [x.to(dtype, copy=True).requires_grad_() for x in given]
    groups = [
        {"params": [p for p in weights if (p.ndim > 1) == decays], "decays": decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    return Trained(weights, optimizer, {weights[i]: 0.9 * weights[i].detach() for i in FOLLOWED})


def optimize(device: str = "cpu") -> Iterator[tuple[str, dict[str, float]]]:
    """Relative errors of six updates in one pass, and in three, against float64."""
    given = [torch.randn(size, device=device) for size in SIZES]
    for case in ("aligned", "unaligned", "skipped"):
        ours, usual = (trained(given, torch.float32) for _ in range(2))
        exact = trained(given, torch.float64)
        at_once, made = adamw.OnePass(ours.optimizer, ours.targets), 0
        for step in range(6):
            now = Rates(1e-2 / (step + 1), 0.1 * step, 0.9 + 0.01 * step)
            skip = torch.tensor(float(case == "skipped" and step in (2, 3)), device=device)
            for i, size in enumerate(SIZES):
                room = torch.randn(given[i].numel() + 1, device=device)
                slope = (room[1:] if case == "unaligned" else room[:-1]).view(size)
                if skip:
                    slope = slope * torch.nan
                for some in (ours, usual, exact):
                    p = some.weights[i]
                    p.grad = None if (i, step) == (3, 4) else slope.to(p.dtype)
            if at_once(*now, skip):
                made += 1
            else:
                ours.three_passes(now, skip)
            usual.three_passes(now, skip)
            exact.three_passes(now, skip)
        assert made == 5  # the first makes the moments
        wanted = exact.state()
        for name, some in (("one pass", ours), ("three", usual)):
            yield f"{case}, {name}", {k: _error(x, wanted[k]) for k, x in some.state().items()}


def walk() -> None:
    """Output and gradients of two blocks and a norm: fused, and usual, against float64."""
    blocks = [Block(48, 2), Block(48, 2)]
    last = nn.LayerNorm(48, eps=1e-6)
    exact = copy.deepcopy(nn.ModuleList([*blocks, last])).double()
    for first in (0, 30):
        x = torch.randn(2, 85, 48)
        wanted = through(exact[:2], x.double(), exact[2], USUAL, first)
        slope = torch.randn_like(wanted)
        (wanted * slope).sum().backward()
        for name in ("fused", "usual"):
            with torch.autocast("cpu", torch.float16):
                if name == "fused":
                    found = fused(blocks, x, last, first)
                else:
                    found = through(blocks, x, last, USUAL, first)
            (found.float() * slope.float()).sum().backward()
            both = nn.ModuleList([*blocks, last]).parameters()
            errors = [_error(p.grad, q.grad) for p, q in zip(both, exact.parameters(), strict=True)]
            out = relative(found.detach(), wanted.detach())
            print(f"walk from {first}, {name}: {out}, gradients up to {max(errors):.1e}")
            nn.ModuleList([*blocks, last]).zero_grad()
        exact.zero_grad()


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.double() - expected).norm() / expected.norm())


def compile_all() -> None:
    for width in WIDTHS:
        for stream in ("*fp32", "*bf16"):
            tiles = norm._launch(torch.empty(1, width))[1]
            types = {"x": stream, "y": stream, "grad_y": stream, "grad_x": stream}
            types |= {"delta": "*bf16", "h": "*bf16", "grad_h": "*bf16", "grad_delta": "*bf16"}
            for kernel in (norm._add_norm_forward, norm._add_norm_backward):
                report(f"{width} {stream}", kernel, types, tiles | {"ALONE": False})
    half = dict.fromkeys(("x", "qkv", "out", "grad_out", "grad"), "*bf16")
    for width in WIDTHS:
        tiles = {"D": 4 * width, "COLUMNS": gelu.COLUMNS, "STAGES": gelu.STAGES, "num_warps": 8}
        tiles |= {"ROWS": gelu.NUMBERS // gelu.COLUMNS}
        report(f"{4 * width}", gelu._gelu_backward_sums, half, tiles)
    for n, d in HEADS:
        tiles = blockwise._tiles(n, 0, d) | {"PART": blockwise.PART, "num_stages": 1}
        keys = {"KEYS": max(16, triton.next_power_of_2(n))}
        report(f"{n} x {d}", blockwise._block_attention_forward, half, tiles | keys)
        report(f"{n} x {d}", blockwise._block_attention_backward, half, tiles)
        report(
            f"{n} x {d}", attention._attention_backward, half, {"D": d, **attention._tiles(n, d)}
        )
    rates = dict.fromkeys(("lr", "weight_decay", "momentum"), "*fp64")
    table = rates | {"table": "*i64", "gradients": "*i64", "owners": "*i32"}
    logs = {"LOG2_B": math.log2(0.9), "LOG2_C": math.log2(0.999), "num_warps": 1}
    report("", adamw._adamw_prepare, table, logs)
    given = {"B": 0.9, "C": 0.999, "EPS": 1e-8, "PIECE": adamw.PIECE, "BLOCK": adamw.BLOCK}
    report("", adamw._adamw_update, table, given | {"num_warps": adamw.WARPS})


def report(what: str, kernel: Any, types: dict[str, str], tiles: dict[str, Any]) -> None:
    """Prints what a kernel needs; arguments that `types` does not name are usual for theirs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    usual = dict.fromkeys(("tokens", "n", "first", "heads"), "i32") | {
        "scale": "fp32",
        "eps": "fp32",
    }
    names = kernel.arg_names
    signature = {
        x: "constexpr" if x in tiles else types.get(x, usual.get(x, "*fp32")) for x in names
    }
    constants = {(i,): tiles[x] for i, x in enumerate(names) if x in tiles}
    pointers = [i for i, x in enumerate(names) if signature[x].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {key: tiles[key] for key in ("num_warps", "num_stages") if key in tiles}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    used = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert used, said
    registers, spilled = map(int, used.groups())
    warps, shared = options["num_warps"], made.metadata.shared
    widths = Counter(re.findall(r"(?:ld|st)\.global[\w.]*\.(?:v[248]\.)?b\d+", made.asm["ptx"]))
    programs = min(65536 // (registers * warps * 32), 233472 // (shared + 1024), 64 // warps)
    print(
        f"{kernel.__name__} {what}: {warps} warps, {registers} registers, {spilled} bytes spilled, "
        f"{shared / 1024:.1f} KiB shared, {programs} programs per multiprocessor, "
        + ", ".join(f"{n} {access}" for access, n in sorted(widths.items())),
        flush=True,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    if os.environ.get("TRITON_INTERPRET"):
        interpret()
        for name, errors in optimize():
            print(f"adamw {name}:", *(f"{key} {error:.1e}" for key, error in errors.items()))
        walk()
    else:
        compile_all()
