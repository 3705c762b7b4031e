"""How long things take, measured so that the numbers can be believed.

What is compared is timed in turn within one run, so that its ratio is free of what the machine does
to both. The rate of a large matrix product is measured in the same run: a step is judged by the
share of that rate it reaches. Every line names the machine, so that two can be compared later.
"""

import dataclasses
import datetime
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stopmim._version import __version__
from stopmim.base.errors import StorageError, UserError
from stopmim.base.random_keys import torch_generator
from stopmim.config.schema import Config
from stopmim.data.order import shares
from stopmim.gpu.cuda_graphs import WARM, stream_of
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.method import masks as masking
from stopmim.method.build import build, build_sampler, configure, draw_masks
from stopmim.method.loss import masked_loss
from stopmim.method.model import Batch
from stopmim.method.predictor import Noise
from stopmim.train.draws import draw_noise
from stopmim.train.optimizer import adamw
from stopmim.train.rates import rates
from stopmim.train.step import Part, build_step

STEPS = 10  # updates timed together, so that starting and stopping the clock costs nothing
PRODUCT = {"cuda": 8192, "cpu": 1024}  # edge of the matrices of the product

# What an H200 is given at a time, and the mean number of patches of a context and of a target that
# the released masks have at the batch size of the published runs.
BATCH = {"vit_b16": 256, "vit_l16": 128, "vit_h14": 64, "vit_s8": 1024}
PUBLISHED = {"vit_b16": (52, 33), "vit_l16": (52, 33), "vit_h14": (73, 43)}

Masks = Literal["published", "own"]


def bench_step(
    preset: str | None,
    changes: dict[str, Any],
    *,
    masks: Masks = "own",
    twin: bool = True,
    profile: bool = False,
    rounds: int = 10,
    out: Path | None = None,
) -> str:
    """Times one training step; JSON lines.

    Args:
        masks: "published" takes the token counts of the released masks, "own" the likeliest shape
            of this config's.
        twin: times the sine-cosine twin of a StoP config too, and gives the ratios.
        profile: adds what the time of a step goes to, kernel by kernel.
        rounds: how often each is measured, in turn.
        out: a folder for a dated Markdown file with the lines.
    """
    base = _usual(preset, changes)
    variants = {base.positions.kind: base}
    if twin and base.positions.kind == "stochastic":
        plain = base.positions.model_validate({"kind": "sincos"})
        variants["sincos"] = configure(base.model_copy(update={"positions": plain}))
    device = choose_device(base.runtime.device)
    steps = {name: prepare(config, masks) for name, config in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    product = [matmul_rate(device)]
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds_of(step.update, device))
    product.append(matmul_rate(device))
    ceiling = statistics.median(product)
    lines = []
    for name, config in variants.items():
        rate = steps[name].flops / statistics.median(times[name])
        lines.append(
            {
                "bench": "step",
                "positions": name,
                **facts(config),
                "masks": masks,
                **steps[name].tokens,
                **spread(times[name], config.optim.batch_size),
                "tflops": round(rate / 1e12, 3),
                "matmul_tflops": round(ceiling / 1e12, 3),
                "of_matmul": round(rate / ceiling, 3),
                "gflop_per_image": round(steps[name].flops / config.optim.batch_size / 1e9, 3),
                "peak_memory_mib": steps[name].memory,
                "compile_s": steps[name].compile_seconds,
                **circumstances(config),
            }
        )
    if len(variants) == 2:
        a, b = steps.values()
        ratios = [s / p for s, p in zip(*times.values(), strict=True)]
        lines.append(
            {
                "bench": "step ratio stop / sincos",
                "time": round(statistics.median(ratios), 4),
                "time_min": round(min(ratios), 4),
                "time_max": round(max(ratios), 4),
                "memory": round(a.memory / b.memory, 4) if a.memory and b.memory else None,
                "rounds": rounds,
            }
        )
    if profile:
        lines += kernels(steps[base.positions.kind].update, device)
    return written(lines, out, f"step_{base.arch}")


# What a kernel is for, by its name; the first that fits. Inductor's all begin with triton_.
KINDS = {
    "norms, residuals, sums": "triton_|reduce_kernel",
    "GELU": "gelu",
    "attention": "flash|fmha|attention",
    "matrix products": "gemm|nvjet|cutlass|xmma|splitK",
    "optimizer and EMA": "multi_tensor_apply|adam",
}


def kernels(update: Callable[[], None], device: torch.device, n: int = 3) -> list[dict[str, Any]]:
    """Milliseconds per update of every kind of kernel, and of the longest ones by name."""
    from torch.profiler import ProfilerActivity, profile

    _wait(device)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        for _ in range(n):
            update()
        _wait(device)
    spent: dict[str, tuple[float, float]] = {}  # name -> ms and calls per update
    for event in seen.key_averages():
        ms = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if ms:
            spent[event.key] = (ms / 1e3 / n, event.count / n)
    kinds: dict[str, float] = {}
    for name, (ms, _) in spent.items():
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, name)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + ms
    longest = sorted(spent.items(), key=lambda item: -item[1][0])[:30]
    return [
        {"bench": "step kernels"} | {kind: round(ms, 3) for kind, ms in sorted(kinds.items())},
        *(
            {"bench": "step kernel", "name": name[:100], "ms": round(ms, 3), "calls": round(calls)}
            for name, (ms, calls) in longest
        ),
    ]


def bench_masks(
    preset: str | None, changes: dict[str, Any], *, rounds: int = 10, out: Path | None = None
) -> str:
    """Times the drawing of the masks of one batch, on the device; a JSON line."""
    config = _usual(preset, changes)
    device = choose_device(config.runtime.device)
    whole = [slice(0, config.optim.batch_size)]
    steps = iter(range(10**9))

    def draw() -> None:
        draw_masks(config, next(steps), whole, device)

    seconds_of(draw, device)
    times = [seconds_of(draw, device) for _ in range(rounds)]
    line = {
        "bench": "masks",
        **facts(config),
        **spread(times, config.optim.batch_size),
        **circumstances(config),
    }
    return written([line], out, f"masks_{config.arch}")


# ------------------------------------------------------------------------------ one step


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step that is compiled, warm and ready to be timed."""

    update: Callable[[], None]
    flops: float  # of the whole batch, forward and backward
    memory: float | None  # peak, MiB, with weights and optimizer; None on a CPU
    compile_seconds: float  # of the first update
    tokens: dict[str, int]


def prepare(config: Config, masks: Masks) -> Step:
    if config.lowres:
        raise UserError(f"bench: does not know lowres {config.lowres}; leave it out")
    device = choose_device(config.runtime.device)
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    kept = _cublas_memory(device) if device.type == "cuda" else 0
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    update, shapes = _update(config, masks, device)
    begin = time.perf_counter()
    update()
    _wait(device)
    compile_seconds = time.perf_counter() - begin
    memory = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # With AdamW's moments there, until it is recorded; what is played back allocates nothing.
    for _ in range(WARM):
        update()
    if device.type == "cuda":
        memory = round((torch.cuda.max_memory_allocated() - before + kept) / 2**20, 1)
    return Step(
        update,
        count_flops(config, shapes),
        memory,
        round(compile_seconds, 1),
        {"context": shapes.context.shape[1], "target": shapes.targets.shape[2]},
    )


@cache
def _cublas_memory(device: torch.device) -> int:
    """Bytes that cuBLAS keeps for an update: once in a process, whoever is the first to need it."""
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


def _update(
    config: Config, kind: Masks, device: torch.device
) -> tuple[Callable[[], None], masking.Masks]:
    """A function that makes one update, always of the same masks and images, and those masks."""
    amp = choose_precision(config.runtime.precision, device)
    model = build(config).to(device).train()
    optimizer = adamw(model, config.optim)
    now = rates(config.optim, 0, 1000)
    parts = shares(config.optim.batch_size, config.runtime.accumulate)
    make = build_step(model, optimizer, config, device, n_parts=len(parts))
    step = likeliest_step(config)
    generator = torch_generator("bench", device=device)
    shape = (parts[0].stop, 3, config.image_size, config.image_size)
    images = torch.randn(shape, generator=generator, device=device)
    if kind == "published":
        masks = [published_masks(config, parts[0].stop, generator)] * len(parts)
    else:
        masks = draw_masks(config, step, parts, device)

    def prepared() -> Iterator[Part]:
        for m, part in zip(masks, parts, strict=True):
            noise = draw_noise(model.predictor, m, part, config, step, amp or torch.float32)
            yield Batch(images, *m), noise

    def update() -> None:
        make(prepared(), now)

    return update, masks[0]


def published_masks(config: Config, batch: int, generator: torch.Generator) -> masking.Masks:
    """Patches at random, as many as a released mask has on average: 33 are no rectangle."""
    if config.arch not in PUBLISHED:
        raise UserError(f"bench: no published masks for {config.arch}, only {', '.join(PUBLISHED)}")
    context, target = PUBLISHED[config.arch]
    m, n, device = config.masking.targets, config.side**2, generator.device

    def some(count: int, *shape: int) -> Tensor:
        order = torch.rand(*shape, n, generator=generator, device=device).argsort(dim=-1)
        return order[..., :count].sort(dim=-1).values

    return masking.Masks(some(context, batch), some(target, m, batch))


def count_flops(config: Config, masks: masking.Masks) -> float:
    """Operations of the matrix products of one update, as torch counts them, without doing any.

    Once each: what `runtime.recompute` does twice is no use, only its cost.
    """
    config = configure(config, {"runtime.recompute": "off"})
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):  # its products are seen, others' not
        model = build(config).train()
        images = torch.empty(1, 3, config.image_size, config.image_size)
        context = torch.empty_like(masks.context[:1], device="meta")
        targets = torch.empty_like(masks.targets[:, :1], device="meta")
        noise: Noise = model.predictor.draw(context, targets)
        with FlopCounterMode(display=False) as counter:
            batch = Batch(images, context, targets)
            masked_loss(model, model.target, batch, noise).loss.backward()
    return counter.get_total_flops() * config.optim.batch_size


def likeliest_step(config: Config) -> int:
    """A step whose target blocks have the likeliest size, so that one shape is compiled."""
    sampler = build_sampler(config)
    blocks = sampler.blocks()
    likeliest = max(blocks, key=lambda block: blocks[block], default=None)
    for step in range(10_000):
        sizes = sampler.sizes(config.seed, step)
        if sizes is None or sizes.target == likeliest:
            return step
    raise ValueError(f"no step draws blocks of {likeliest}")


def matmul_rate(device: torch.device) -> float:
    """Operations per second of a large square product, bfloat16 on a GPU: the practical ceiling."""
    n = PRODUCT[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(n, n, device=device, dtype=dtype)
    seconds = min(seconds_of(lambda: torch.mm(a, a), device) for _ in range(5))
    return 2 * n**3 / seconds


# ------------------------------------------------------------------------------ lines and files


def _usual(preset: str | None, changes: dict[str, Any]) -> Config:
    """The config to measure: on a GPU, unless told otherwise, with the usual batch of one GPU."""
    on_gpu = torch.cuda.is_available() and changes.get("runtime.device") != "cpu"
    config = configure(preset or ("vit_b16_stop" if on_gpu else "tiny_cpu"), changes)
    if on_gpu and config.arch in BATCH and "optim.batch_size" not in changes:
        config = configure(config, {"optim.batch_size": BATCH[config.arch]})
    return config


def seconds_of(update: Callable[[], Any], device: torch.device) -> float:
    """Seconds per call, GPU work included."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        update()
    _wait(device)
    return (time.perf_counter() - begin) / STEPS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def spread(times: list[float], batch_size: int) -> dict[str, float]:
    median = statistics.median(times)
    return {
        "images_per_s": round(batch_size / median, 1),
        "ms": round(1e3 * median, 3),
        "ms_min": round(1e3 * min(times), 3),
        "ms_max": round(1e3 * max(times), 3),
    }


def facts(config: Config) -> dict[str, Any]:
    return {
        "arch": config.arch,
        "image_size": config.image_size,
        "batch_size": config.optim.batch_size,
    }


def circumstances(config: Config) -> dict[str, Any]:
    device = choose_device(config.runtime.device)
    return {
        "precision": str(choose_precision(config.runtime.precision, device) or torch.float32),
        "compile": config.runtime.compile,
        **machine(device),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What a line says about where and with what it was measured."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "stopmim": __version__,
        "date": datetime.date.today().isoformat(),
    }


def check_folder(folder: Path) -> None:
    """Whether figures can be written there: to be asked before minutes of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(f"{folder}: cannot write here: {error.strerror}") from None


def written(lines: list[dict[str, Any]], folder: Path | None, what: str) -> str:
    """The lines as JSON, and at the end of `what`_MACHINE_DATE.md if there is a `folder`."""
    text = "\n".join(json.dumps(line) for line in lines)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        first = lines[0]
        slug = re.sub(r"[^A-Za-z0-9]+", "-", first["device"]).strip("-").lower()
        command = f"stopmim bench {str(first['bench']).split()[0]}"
        path = folder / f"{what}_{slug}_{first['date']}.md"
        title = f"# `{command}` on {first['device']}, {first['date']}"
        end = "```\n"
        before = path.read_text("utf-8") if path.exists() else f"{title}\n\n```json\n{end}"
        path.write_text(f"{before.removesuffix(end)}{text}\n{end}", encoding="utf-8")
    return text
