"""Benchmarks a training step, and the drawing of its masks.

Variants are timed in turn within one run, so that their ratio does not depend on the load of the
machine. The rate of a large matrix product is measured in the same run: a step is judged by the
fraction of that rate it reaches. The account of a step says what each kind of work takes at least.
"""

import itertools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.console import say
from stopmim.base.errors import UserError
from stopmim.base.random_keys import torch_generator
from stopmim.bench import accounting, timing
from stopmim.bench.accounting import Tokens
from stopmim.bench.timing import Line
from stopmim.config.schema import Config
from stopmim.config.yaml_text import parse_yaml
from stopmim.data.order import shares
from stopmim.gpu.cuda_graphs import WARM, stream_of
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.method import masks as masking
from stopmim.method.build import configure, draw_masks
from stopmim.train.cost import likeliest_step, trial_update

PRODUCT = {"cuda": 8192, "cpu": 1024}  # edge of the matrices of the product
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of a copy: more than any cache holds

# Batch sizes for one H200, and the mean number of context and target patches of the released
# masks at the batch size of the published runs.
BATCH = {"vit_b16": 256, "vit_l16": 128, "vit_h14": 64, "vit_s8": 1024}
PUBLISHED = {"vit_b16": (52, 33), "vit_l16": (52, 33), "vit_h14": (73, 43)}

MaskSource = Literal["published", "own"]


# ------------------------------------------------------------------------------ the benchmarks


def bench_step(
    preset: str | None,
    changes: dict[str, Any],
    *,
    masks: MaskSource = "own",
    twin: bool = True,
    versus: tuple[str, ...] = (),
    profile: bool = False,
    rounds: int = 10,
) -> Iterator[Line]:
    """Times one training step, and its sine-cosine `twin` if it is StoP.

    `versus`: the same step with other config keys, as "runtime.kernels=usual", each in turn.
    "published" masks have the token counts of the released ones, "own" masks the likeliest shape
    of this config. The account of the step follows. With `profile`, the time of each variant kernel
    by kernel is added; that of the first stands beside the floors of the account.
    """
    base = usual(preset, changes)
    device = choose_device(base.runtime.device)
    variants: dict[str, Config] = {base.positions.kind: base}
    if twin and base.positions.kind == "stochastic":
        plain = base.positions.model_validate({"kind": "sincos"})
        variants["sincos"] = configure(base.model_copy(update={"positions": plain}))
    variants |= {text: configure(base, _pair(text)) for text in versus}
    steps = {name: prepare(config, masks) for name, config in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    products = [matmul_rate(device)]
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timing.seconds_per_call(step.update, device))
    rates = statistics.median([*products, matmul_rate(device)]), copy_rate(device)
    for name, config in variants.items():
        line: Line = {"bench": "step", "positions": config.positions.kind, **timing.sizes(config)}
        line |= {"with": name} if name in versus else {}
        yield line | {"masks": masks} | _result(steps[name], times[name], config, rates)
    one, *others = variants
    for other in others:
        ratios = [a / b for a, b in zip(times[one], times[other], strict=True)]
        a, b = steps[one].memory, steps[other].memory
        line = {"bench": f"step ratio {'stop / sincos' if other == 'sincos' else f'to {other}'}"}
        line |= {"time": round(statistics.median(ratios), 4)}
        line |= {"time_min": round(min(ratios), 4), "time_max": round(max(ratios), 4)}
        line |= {"memory": round(a / b, 4) if a and b else None}
        yield line | {"rounds": len(ratios)}
    # Last comes the profiler, which may fail where the times are fine.
    measured = {name: kernels(step.update, device) for name, step in steps.items() if profile}
    a = (choose_precision(base.runtime.precision, device) or torch.float32).itemsize
    by_kind = measured[one][0] if profile and device.type == "cuda" else None  # names of kernels
    yield from accounting.lines(accounting.account(base, steps[one].tokens, a), rates, by_kind)
    for name, found in measured.items():
        yield from found if name == one else [line | {"with": name} for line in found]


def _pair(text: str) -> dict[str, Any]:
    """The config key of "KEY=VALUE"; several are separated by commas."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise UserError(f"--versus {text}: expected KEY=VALUE, such as runtime.kernels=usual")
    return {key: parse_yaml(value, f"--versus {key}") for key, _, value in pairs}


def _result(
    step: "WarmStep", times: list[float], config: Config, rates: tuple[float, float]
) -> Line:
    rate, batch_size = step.flops / statistics.median(times), config.optim.batch_size
    ceiling, copied = rates
    return {
        "context": step.tokens.context,
        "target": step.tokens.target,
        **timing.speed(times, batch_size),
        "tflops": round(rate / 1e12, 3),
        "matmul_tflops": round(ceiling / 1e12, 3),
        "of_matmul": round(rate / ceiling, 3),
        "copy_gb_per_s": round(copied / 1e9, 1),
        "gflop_per_image": round(step.flops / batch_size / 1e9, 3),
        "peak_memory_mib": step.memory,
        "compile_s": step.compile_seconds,
        **timing.circumstances(config),
    }


def bench_account(
    preset: str | None, changes: dict[str, Any], *, masks: MaskSource = "own"
) -> Iterator[Line]:
    """Operations and bytes of a step on a GPU, by shapes alone."""
    config = usual(preset, changes, on_gpu=True)
    device = torch.device("cpu")
    (shapes,) = masks_of(config, masks, [slice(0, 1)], device)
    tokens, half = tokens_of(shapes), config.runtime.precision != "fp32"
    found = accounting.account(config, tokens, 2 if half else accounting.FULL)
    about: Line = {"bench": "step account", **timing.sizes(config), "masks": masks}
    about |= tokens._asdict() | {"precision": "half" if half else "float32"}
    yield about | timing.machine(device)
    yield from accounting.lines(found)


def bench_masks(preset: str | None, changes: dict[str, Any], *, rounds: int = 10) -> Iterator[Line]:
    """Times drawing the masks of one batch on the device."""
    config = usual(preset, changes)
    device, batch_size = choose_device(config.runtime.device), config.optim.batch_size
    steps = itertools.count()

    def draw() -> None:
        draw_masks(config, next(steps), [slice(0, batch_size)], device)

    _, *times = [timing.seconds_per_call(draw, device) for _ in range(1 + rounds)]  # warmup first
    line: Line = {"bench": "masks", **timing.sizes(config)}
    yield line | timing.speed(times, batch_size) | timing.circumstances(config)


def usual(preset: str | None, changes: dict[str, Any], *, on_gpu: bool = False) -> Config:
    """The config to measure; on a GPU with its usual batch size, unless `changes` set one."""
    on_gpu |= torch.cuda.is_available() and changes.get("runtime.device") != "cpu"
    config = configure(preset or ("vit_b16_stop" if on_gpu else "tiny_cpu"), changes)
    if on_gpu and config.arch in BATCH and "optim.batch_size" not in changes:
        config = configure(config, {"optim.batch_size": BATCH[config.arch]})
    return config


# Purpose of a kernel by its name; the first match counts. Inductor's names begin with triton_.
KERNELS = {
    accounting.NORMS: "triton_|reduce_kernel|add_norm",
    accounting.GELU: "gelu",
    accounting.ATTENTION: "flash|fmha|attention",
    accounting.PRODUCTS: "gemm|nvjet|cutlass|xmma|splitK",
    accounting.OPTIMIZER: "multi_tensor_apply|adam",
}


def kernels(update: Callable[[], None], device: torch.device, n: int = 3) -> list[Line]:
    """Milliseconds per update of every kind of kernel, and of the 30 longest by name."""
    from torch.profiler import ProfilerActivity, profile

    timing.wait(device)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        for _ in range(n):
            update()
        timing.wait(device)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    kinds: Counter[str] = Counter()  # microseconds of all n updates
    lines = []
    for event in sorted(seen.key_averages(), key=lambda event: -getattr(event, key)):
        if us := getattr(event, key):
            found = (kind for kind, pattern in KERNELS.items() if re.search(pattern, event.key))
            kinds[next(found, "other")] += us
            line: Line = {"bench": "step kernel", "name": event.key[:100]}
            lines.append(line | {"ms": round(us / 1e3 / n, 3), "calls": round(event.count / n)})
    spent = {kind: round(us / 1e3 / n, 3) for kind, us in sorted(kinds.items())}
    return [{"bench": "step kernels"} | spent, *lines[:30]]


# ------------------------------------------------------------------------------ one step


@dataclass(frozen=True)
class WarmStep:
    """A training step, compiled and warmed up, ready to be timed."""

    update: Callable[[], None]
    flops: float  # of the whole batch, forward and backward
    memory: float | None  # peak, MiB, with weights and optimizer; None on a CPU
    compile_seconds: float  # of the first update
    tokens: Tokens


def prepare(config: Config, masks: MaskSource) -> WarmStep:
    """Builds the step of a config and runs it until it is compiled and recorded."""
    device, memory = choose_device(config.runtime.device), None
    on_gpu = device.type == "cuda"
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    kept = _cublas_memory(device) if on_gpu else 0
    before = torch.cuda.memory_allocated() if on_gpu else 0
    parts = shares(config.optim.batch_size, config.runtime.accumulate)
    drawn = masks_of(config, masks, parts, device)
    tokens = tokens_of(drawn[0])
    flops = accounting.operations(accounting.account(config, tokens, accounting.FULL))
    update = trial_update(config, parts, drawn, device)  # always with the same masks and images
    begin = time.perf_counter()
    update()
    timing.wait(device)
    seconds = round(time.perf_counter() - begin, 1)
    say(f"{config.arch}: first update after {seconds} s")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    # AdamW's moments exist by now. A replayed graph allocates nothing, so the peak is seen here.
    for _ in range(WARM):
        update()
    if on_gpu:
        memory = round((torch.cuda.max_memory_allocated() - before + kept) / 2**20, 1)
    return WarmStep(update, flops, memory, seconds, tokens)


@cache
def _cublas_memory(device: torch.device) -> int:
    """Bytes that cuBLAS keeps for an update; allocated once per process, by its first user."""
    before = torch.cuda.memory_allocated(device)
    x = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.cuda.device(device):
        for stream in (torch.cuda.current_stream(), stream_of(device)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # with a bias it is cuBLASLt's
                torch.autograd.grad((F.linear(x, x, x[0]) @ x).sum(), x)
    torch.cuda.synchronize(device)
    del x
    return torch.cuda.memory_allocated(device) - before


def masks_of(
    config: Config, kind: MaskSource, parts: list[slice], device: torch.device
) -> list[masking.Masks]:
    """The masks of every part of a batch."""
    if kind == "published":
        generator = torch_generator("bench", device=device)
        return [published_masks(config, parts[0].stop, generator)] * len(parts)
    return draw_masks(config, likeliest_step(config), parts, device)


def published_masks(config: Config, batch: int, generator: torch.Generator) -> masking.Masks:
    """Random patches, as many as a released mask has on average: 33 form no rectangle."""
    if config.arch not in PUBLISHED:
        raise UserError(f"bench: no published masks for {config.arch}, only {', '.join(PUBLISHED)}")
    context, target = PUBLISHED[config.arch]
    m, n, device = config.masking.targets, config.side**2, generator.device

    def choose(count: int, *shape: int) -> Tensor:
        order = torch.rand(*shape, n, generator=generator, device=device).argsort(dim=-1)
        return order[..., :count].sort(dim=-1).values

    return masking.Masks(choose(context, batch), choose(target, m, batch))


def tokens_of(masks: masking.Masks) -> Tokens:
    blocks, _, target = masks.targets.shape
    return Tokens(masks.context.shape[1], blocks, target)


def matmul_rate(device: torch.device) -> float:
    """Operations per second of a large square product, bfloat16 on a GPU: the practical ceiling."""
    n = PRODUCT[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(n, n, device=device, dtype=dtype)
    seconds = min(timing.seconds_per_call(lambda: torch.mm(a, a), device) for _ in range(5))
    return 2 * n**3 / seconds


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy on the device: the ceiling of memory."""
    a = torch.empty(COPIED[device.type], device=device, dtype=torch.uint8)
    b = torch.zeros_like(a)
    seconds = min(timing.seconds_per_call(lambda: a.copy_(b), device) for _ in range(5))
    return 2 * a.nbytes / seconds
