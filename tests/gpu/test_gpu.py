"""What only a GPU can show. `make test-gpu` runs these; a machine without one leaves them out."""

import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.bench.saving import bench_saving
from stopmim.data.loading import loader
from stopmim.data.order import shares
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.scenes import Scenes
from stopmim.evals.features import extract
from stopmim.evals.heads import Split, grid, train_heads
from stopmim.evals.recipes import OWN, TASKS, Recipe
from stopmim.evals.showing import Kept, Showing
from stopmim.evals.views import middle
from stopmim.gpu import blocks, copies
from stopmim.gpu.attention import attend
from stopmim.gpu.blocks import take
from stopmim.gpu.cuda_graphs import CudaGraphs
from stopmim.gpu.devices import choose_precision
from stopmim.method.build import build, build_sampler, configure, draw_masks
from stopmim.method.encoder import VisionTransformer
from stopmim.runs import checkpoint
from stopmim.runs.run import Run
from stopmim.train.draws import draw_noise
from stopmim.train.loop import pretrain
from stopmim.train.optimizer import adamw, advance, one_pass
from stopmim.train.rates import Rates, rates
from stopmim.train.step import Part, build_step, is_recorded, recorded

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "arch": "vit_micro8",
    "image_size": 64,
    "predictor.width": 96,
    "predictor.depth": 2,
    "optim.batch_size": 128,
    "optim.epochs": 2,
    "optim.warmup_epochs": 0,
    # 3x3 patches, always: one graph, which takes half a minute to compile
    "masking.target_scale": (0.14, 0.14),
    "masking.target_aspect": (1.0, 1.0),
}
# 3x4 and 3x3 patches: three of each in the first ten steps, and so both are recorded by then
SEVERAL: dict[str, Any] = {
    "masking.target_scale": (0.15, 0.2),
    "masking.target_aspect": (0.75, 1.5),
}


PARTS: dict[str, Any] = {"runtime.accumulate": 4}


@pytest.mark.parametrize(
    ("batch", "n", "heads", "d", "first"),
    [
        (4, 52, 12, 64, 0),
        (4, 85, 12, 32, 52),
        (3, 116, 16, 24, 73),
        (2, 73, 16, 80, 0),
        (5, 18, 6, 64, 0),
        (2, 128, 2, 64, 100),
        (2, 13, 3, 16, 0),
    ],
)
def test_short_attention_is_attention(batch: int, n: int, heads: int, d: int, first: int) -> None:
    from stopmim.gpu.kernels.attention import short_attention

    shape = (batch, n, 3 * heads * d)
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = qkv.double().unflatten(2, (3, heads, d)).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q[:, :, first:], k, v).transpose(1, 2).flatten(2)
    grad = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, qkv, grad)
    found = short_attention(qkv, heads, first)
    (found_grad,) = torch.autograd.grad(found, qkv, grad.bfloat16())
    # bfloat16 has 8 bits: 2 ** -8 of the largest value is what rounding alone may do.
    for a, b in ((found, expected), (found_grad, expected_grad.double())):
        assert (a.double() - b).abs().max() < 2**-7 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(("n", "heads"), [(85, 1), (128, 2), (40, 1)])
def test_wide_heads_are_left_to_torch_and_not_too_large_for_a_gpu(n: int, heads: int) -> None:
    """Predictors of 384 channels with --predictor.heads 1 and 2."""
    qkv = torch.randn((2, n, 3 * 384), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    attend(qkv, heads).sum().backward()
    assert qkv.grad is not None


def test_a_tile_that_this_gpu_cannot_hold_is_left_to_torch_in_compiled_code_too() -> None:
    """The context of a ViT-H/14: on GPUs with 99 KiB of shared memory our kernel does not start."""
    qkv = torch.randn((2, 73, 3 * 1280), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)  # asks the device, as a whole
    found, expected = compiled(qkv, 16), attend(qkv, 16)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert qkv.grad is not None


def test_our_gelu_is_gelu_and_not_its_tanh() -> None:
    from stopmim.gpu.kernels.gelu import gelu

    x = torch.linspace(-8, 8, 65537, device="cuda").bfloat16().requires_grad_()
    expected = F.gelu(x.double())
    found = gelu(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    (found_slope,) = torch.autograd.grad(found.sum(), x)
    # Half of the last bit is what rounding may do; far out, the tanh is off by more than it all.
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(found_slope, slope, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(("tokens", "width"), [(1, 48), (333, 1536), (4097, 3072), (70, 5120)])
def test_a_gelu_after_a_layer_sums_the_gradient_of_its_bias(tokens: int, width: int) -> None:
    from stopmim.gpu.kernels.gelu import gelu_after

    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    bias = torch.randn(width, device="cuda", requires_grad=True)
    above = torch.randn(tokens, width, device="cuda").bfloat16()
    exact = x.detach().double().requires_grad_()
    expected = F.gelu(exact)
    (slope,) = torch.autograd.grad(expected, exact, above.double())
    found = gelu_after(x, bias)
    grad, sums = torch.autograd.grad(found, (x, bias), above)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grad.double(), slope, rtol=2**-7, atol=1e-5)
    slope = slope.sum(dim=0)
    # The sum is of gradients that were not rounded.
    assert float((sums.double() - slope).norm() / slope.norm()) < 1e-4


@cache
def twelve(compile_: str) -> list[float]:
    return updates(compile_, 12)


class Trained:
    """A model that makes updates of masks and noise of a run, and of images that stay the same."""

    def __init__(self, compile_: str, **more: Any) -> None:
        fixed = SMALL if "masking" not in more else {k: SMALL[k] for k in SMALL if "mask" not in k}
        self.config = configure("vit_b16_stop", fixed | {"runtime.compile": compile_} | more)
        device = torch.device("cuda")
        self.model = build(self.config).to(device).train()
        self.optimizer = adamw(self.model, self.config.optim)
        size = self.config.optim.batch_size
        self.parts = shares(size, self.config.runtime.accumulate)
        self.make = build_step(
            self.model, self.optimizer, self.config, device, n_parts=len(self.parts)
        )
        is_asked_for = is_recorded(self.config, device)
        self.recorder = recorded(self.make, device) if is_asked_for else None
        self.dtype = choose_precision(self.config.runtime.precision, device) or torch.float32
        generator = torch.Generator(device).manual_seed(0)
        shape = (size, 3, 64, 64)
        self.images = torch.randn(shape, generator=generator, device=device)

    def update(self, step: int, now: Rates | None = None) -> dict[str, Tensor]:
        now = now or rates(self.config.optim, step, 100)
        return self.make(self.prepared(step), now, self.recorder)

    def prepared(self, step: int) -> Iterator[Part]:
        every = draw_masks(self.config, step, self.parts, self.images.device)
        sizes = build_sampler(self.config).sizes(self.config.seed, step)
        for part, masks in zip(self.parts, every, strict=True):
            of_part = (self.model.predictor, masks, part, self.config, step, self.dtype)
            images = self.images[part].clone()
            batch = self.model.target.batch(images, masks, sizes)
            yield batch, draw_noise(*of_part)

    @property
    def graphs(self) -> CudaGraphs:
        assert self.recorder is not None
        return self.recorder

    @property
    def broken(self) -> Tensor:
        return self.make.broken

    def state(self) -> dict[str, Tensor]:
        """Copies of all that an update changes, the target encoder aside."""
        weights, slots = checkpoint.gathered(self.model, self.optimizer)
        slots |= {k: v for k, v in weights.items() if not k.startswith("target_encoder")}
        return {name: x.clone() for name, x in slots.items()}


def updates(compile_: str, n: int, strict_from: int | None = None, **more: Any) -> list[float]:
    """The losses of `n` updates; from `strict_from` on, waiting for the device is an error."""
    trained = Trained(compile_, **more)
    losses = []
    try:
        for step in range(n):
            if step == strict_from:
                torch.cuda.set_sync_debug_mode("error")
            losses.append(trained.update(step)["loss"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(x) for x in losses]


def test_compiled_and_plain_training_give_the_same_losses() -> None:
    torch.testing.assert_close(twelve("on"), twelve("off"), rtol=5e-3, atol=0)


def test_recorded_and_compiled_training_give_the_same_losses() -> None:
    torch.testing.assert_close(twelve("auto"), twelve("on"), rtol=5e-3, atol=0)


def test_recordings_of_two_sizes_share_memory_and_do_not_disturb_each_other() -> None:
    """The sizes take turns: one has been played back when the other is still made as usual."""
    recorded, usual = updates("auto", 12, **SEVERAL), updates("on", 12, **SEVERAL)
    torch.testing.assert_close(recorded, usual, rtol=5e-3, atol=0)
    assert recorded[0] > 1.5 * recorded[-1]  # or standing still would look the same


KERNELS = pytest.mark.parametrize("kernels", ["usual", "fused"])


@KERNELS
def test_a_recorded_update_is_one_launch_of_what_was_made_as_usual_before(kernels: str) -> None:
    """Bit for bit: played back or not is not to be seen, or a resumed run would be another."""
    played, usual = (Trained("auto", **{"runtime.kernels": kernels}) for _ in range(2))
    for step in range(6):
        usual.graphs.calls.clear()
        a, b = played.update(step), usual.update(step)
        assert {k: float(v) for k, v in a.items()} == {k: float(v) for k, v in b.items()}, step
    assert len(played.graphs.recordings) == 1
    assert not usual.graphs.recordings
    ours, theirs = played.state(), usual.state()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


@KERNELS
def test_a_recorded_update_takes_the_rates_of_its_step(kernels: str) -> None:
    trained = Trained("auto", **{"runtime.kernels": kernels})
    for step in range(4):
        trained.update(step)
    name = "blocks.0.mlp.fc1.weight"
    weight = trained.model.encoder.get_parameter(name)
    follower = trained.model.branch().get_parameter(name)
    before = weight.detach().clone(), follower.clone()
    trained.update(4, Rates(lr=0.0, weight_decay=0.4, momentum=1.0))
    assert torch.equal(weight, before[0])
    assert torch.equal(follower, before[1])
    trained.update(5, Rates(lr=1e-4, weight_decay=5e3, momentum=1.0))  # halves them
    torch.testing.assert_close(weight, before[0] / 2, rtol=0, atol=1e-3)
    assert torch.equal(follower, before[1])
    trained.update(6, Rates(lr=0.0, weight_decay=0.4, momentum=0.0))
    torch.testing.assert_close(follower, weight, rtol=0, atol=1e-6)
    assert weight.abs().max() > 0.01  # or all of this would say little
    assert trained.graphs.recordings


def test_recorded_parts_of_a_batch_give_the_losses_of_plain_ones_and_of_the_whole() -> None:
    """Three recordings would be too many: of a part, and of the update from all of them."""
    trained = Trained("auto", **PARTS)
    losses = [float(trained.update(step)["loss"]) for step in range(8)]
    torch.testing.assert_close(losses, updates("off", 8, **PARTS), rtol=5e-3, atol=0)
    torch.testing.assert_close(losses, twelve("off")[:8], rtol=5e-3, atol=0)
    assert len(trained.graphs.recordings) == 2


def test_recorded_parts_and_updates_are_bit_for_bit_those_made_as_usual() -> None:
    played, usual = Trained("auto", **PARTS), Trained("auto", **PARTS)
    usual.graphs.room = False
    for step in range(6):
        a, b = played.update(step), usual.update(step)
        assert {k: float(v) for k, v in a.items()} == {k: float(v) for k, v in b.items()}, step
    assert played.graphs.recordings
    assert not usual.graphs.recordings
    ours, theirs = played.state(), usual.state()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


def test_recorded_parts_are_not_in_memory_together() -> None:
    """Of 8 parts of 25 MB each, one is being copied while the next is drawn."""
    trained = Trained("auto", **{"optim.batch_size": 4096, "runtime.accumulate": 8})
    for step in range(4):
        trained.update(step)
    assert len(trained.graphs.recordings) == 2
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained.update(4)
    assert torch.cuda.max_memory_allocated() - before < trained.images.nbytes / 2


def test_recordings_of_larger_parts_give_way_to_those_of_smaller_ones() -> None:
    trained = Trained("auto")
    losses = [float(trained.update(step)["loss"]) for step in range(4)]
    trained.recorder = None
    trained.parts = shares(trained.config.optim.batch_size, 4)
    trained.make.cut(4)
    trained.recorder = recorded(trained.make, torch.device("cuda"))
    losses += [float(trained.update(step)["loss"]) for step in range(4, 10)]
    assert len(trained.graphs.recordings) == 2
    torch.testing.assert_close(losses, twelve("off")[:10], rtol=5e-3, atol=0)


RANK = """
import json, sys
from pathlib import Path
from stopmim import pretrain
from stopmim.gpu.cuda_graphs import CudaGraphs

made, record = [], CudaGraphs._record

def noted(self, *given):
    made.append(record(self, *given))
    return made[-1]

CudaGraphs._record = noted
options, stop = json.loads(sys.argv[2]), int(sys.argv[3]) or None
pretrain("scenes:512:64", sys.argv[1], "vit_b16_stop", stop_at=stop, **options)
assert len(made) >= 2 and all(made), made
"""


def as_rank(out: Path, options: dict[str, Any], stop: int = 0) -> Run:
    """A run as the only rank of a world, whose collectives are those of NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", RANK, str(out), json.dumps(options), str(stop)]
    ended = subprocess.run(
        command, env=os.environ | env, timeout=400, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return Run(out)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [{}, PARTS], ids=["whole", "in parts"])
def test_a_rank_of_nccl_records_and_resumes_what_one_process_does_plainly(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    options = SMALL | more | {"optim.epochs": 3, "runtime.log_every": 1}  # 12 updates
    plain = options | {"runtime.compile": "off"}
    alone = pretrain("scenes:512:64", tmp_path / "alone", "vit_b16_stop", **plain)
    whole = as_rank(tmp_path / "whole", options)
    as_rank(tmp_path / "cut", options, stop=7)
    cut = as_rank(tmp_path / "cut", options)
    losses = [[line["loss"] for line in run.metrics] for run in (alone, whole, cut)]
    assert len(losses[0]) == 12
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-3, atol=0)
    assert losses[2] == losses[1]  # bit for bit


@pytest.mark.parametrize("asked", [33, 7])
@pytest.mark.parametrize("kernels", ["usual", "fused"])
def test_features_asked_for_are_those_of_all_patches(asked: int, kernels: str) -> None:
    changes = {"runtime.kernels": kernels, "optim.batch_size": 4}
    teacher = build(configure("vit_b16_stop", SMALL | changes)).cuda().branch()
    images = torch.randn(4, 3, 64, 64, device="cuda")
    index = torch.randint(64, (4, asked), device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        found, every = teacher(images, asked=index), teacher(images)
    assert relative(found, take(every, index).double()) < 1e-2


@pytest.mark.parametrize("recipe", [OWN, TASKS["imagenet_lars"].recipe], ids=["sgd", "lars"])
def test_heads_trained_by_recordings_are_those_trained_by_a_processor(recipe: Recipe) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(600) % 5
    x = torch.randn(600, 16, generator=generator) + torch.randn(5, 16, generator=generator)[y]
    short = dataclasses.replace(recipe, epochs=3, batch_size=64)  # and a last batch of 16
    heads = grid(short, [1, 2])
    split = Split([x[:400]], y[:400], x[400:], y[400:], 8)
    found = [
        train_heads(heads, short, split, device=device, tf32=False) for device in ("cuda", "cpu")
    ]
    right = [one.correct.double() / 200 for one in found]
    assert (right[0] - right[1]).abs().max() < 0.03
    assert right[1][-1].max() > 0.3  # of 0.2 by chance; LARS begins slowly


@KERNELS
@pytest.mark.parametrize("more", [{}, PARTS], ids=["whole", "in parts"])
def test_a_loss_that_is_not_finite_ends_recorded_updates(
    more: dict[str, Any], kernels: str
) -> None:
    trained = Trained("auto", **more | {"runtime.kernels": kernels})
    for step in range(5):
        trained.update(step)
    before, images = trained.state(), trained.images
    trained.images = images * math.nan
    assert math.isnan(trained.update(5)["loss"])
    trained.images = images
    for step in (6, 7):
        assert math.isfinite(trained.update(step)["loss"])
    after = trained.state()
    assert [k for k in before if not torch.equal(before[k], after[k])] == []
    assert int(trained.broken) == 3  # counted from the first on


def total(x: Tensor) -> dict[str, Tensor]:
    """In 512 MiB."""
    many = x[:1].repeat(2**26)
    return {"sum": (many + many).sum()}


def test_a_call_of_a_new_shape_has_the_memory_of_the_recordings() -> None:
    recorded = CudaGraphs(total, torch.device("cuda"))
    half, quarter = torch.full((3,), 0.5).cuda(), torch.full((4,), 0.25).cuda()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    sums = [recorded(x)["sum"] for x in 4 * [half] + 4 * [quarter] + [half]]
    assert len(recorded.recordings) == 2
    assert torch.cuda.max_memory_reserved() - before < 1.2 * 2**29
    assert [float(x) for x in sums] == 4 * [2.0**26] + 4 * [2.0**25] + [2.0**26]


def test_updates_go_on_where_there_is_no_memory_for_recordings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stopmim.gpu.cuda_graphs.SPARE", 2.0)  # more than any GPU has
    recorded = CudaGraphs(total, torch.device("cuda"))
    half = torch.full((3,), 0.5).cuda()
    sums = [recorded(half)["sum"] for _ in range(5)]
    assert not recorded.recordings
    assert capsys.readouterr().err.count("no memory for CUDA graphs") == 1
    assert [float(x) for x in sums] == 5 * [2.0**26]


def test_what_is_made_beside_a_call_waits_until_its_inputs_are_copied() -> None:
    """Inputs are made in memory that those before have just left: too early, and they are mixed."""
    size = 2**24

    def slow(x: Tensor) -> dict[str, Tensor]:
        y = x
        for _ in range(40):
            y = y * 1.0
        return {"least": y.min(), "most": y.max()}

    recorded = CudaGraphs(slow, torch.device("cuda"))
    found, places = [], set()
    for i in range(30):
        with recorded.beside():
            x = torch.full((size,), float(i), device="cuda")
        places.add(x.data_ptr())
        found.append(recorded(x))
        del x
    assert [(float(v["least"]), float(v["most"])) for v in found] == [(i, i) for i in range(30)]
    assert len(places) == 1  # or nothing could have gone wrong


def test_what_is_made_beside_a_call_does_not_wait_for_one_that_has_no_tensors() -> None:
    """Or the next images would wait for all parts of a batch, and for the other ranks."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def slow(y: Tensor | None, rate: Tensor | None) -> dict[str, Tensor]:
        for _ in range(0 if y is None else 100):  # a tenth of a second
            x @ x
        return {} if rate is None else {"rate": rate + 0}

    recorded = CudaGraphs(slow, torch.device("cuda"))
    for _ in range(4):
        recorded(x[0], None)
        recorded(None, 0.5)
    torch.cuda.synchronize()
    recorded(x[0], None)
    recorded(None, 0.5)
    with recorded.beside():
        made = torch.zeros(1, device="cuda")
        done = torch.cuda.current_stream().record_event()
    done.synchronize()
    assert not torch.cuda.current_stream().query()
    assert float(made) == 0


def test_noise_drawn_in_bfloat16_is_that_of_float32_rounded() -> None:
    predictor = Trained("off").model.predictor
    context, targets = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (7, 9))
    shapes = context.expand(3, 7), targets.expand(2, 3, 9)

    def drawn(dtype: torch.dtype) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(5)
        noise = predictor.draw(*shapes, generator, dtype).masked
        assert noise is not None
        return noise

    assert drawn(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(drawn(torch.bfloat16), drawn(torch.float32).bfloat16())


VARIANTS: dict[str, dict[str, Any]] = {
    "jitter": {"positions.kind": "jitter", "positions.sigma": 1.0},
    "conditioned": {"positions.covariance": "conditioned"},
    "untied": {"positions.covariance": "untied"},
    "both": {"positions.tokens": "both"},
    "lowres": {"positions": {"kind": "sincos"}, "lowres": "bilinear"},
    "pixels": {"target": "pixels", "class_token": True, "masking": {"kind": "random"}},
    "clipped": {"optim.clip_grad": 0.1, "optim.penalty_l1": 1e-4, "optim.penalty_l2": 1e-4},
    "recomputed": {"runtime.recompute": "on"},
    "fp32": {"runtime.precision": "fp32"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_compiled_and_recorded_as_what_it_is(name: str) -> None:
    recorded, plain = (updates(how, 4, **VARIANTS[name]) for how in ("auto", "off"))
    torch.testing.assert_close(recorded, plain, rtol=5e-3, atol=0)


def test_nothing_waits_for_the_device_between_log_points() -> None:
    assert len(updates("auto", 40, strict_from=20, **SEVERAL)) == 40


def test_nothing_waits_for_the_device_between_parts() -> None:
    assert len(updates("auto", 10, strict_from=5, **PARTS)) == 10


def test_waiting_for_the_device_would_be_noticed() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.zeros((), device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("more", [{}, PARTS], ids=["whole", "in parts"])
def test_a_run_stopped_and_resumed_on_a_gpu_ends_where_the_other_does(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    options = SMALL | more | {"runtime.log_every": 1, "runtime.save_every": 7}
    whole = pretrain("scenes:512:64", tmp_path / "whole", "vit_b16_stop", **options)
    pretrain("scenes:512:64", tmp_path / "cut", "vit_b16_stop", stop_at=3, **options)
    cut = pretrain("scenes:512:64", tmp_path / "cut", "vit_b16_stop", **options)
    losses = [[line["loss"] for line in run.metrics] for run in (whole, cut)]
    assert losses[0] == losses[1]  # bit for bit


@pytest.mark.parametrize(("first", "then"), [("auto", "off"), ("off", "auto")])
def test_a_checkpoint_of_recorded_updates_goes_on_without_and_the_other_way_round(
    tmp_path: Path, first: str, then: str
) -> None:
    begun, ended = (
        SMALL | {"runtime.log_every": 1, "runtime.compile": kind} for kind in (first, then)
    )
    whole = pretrain("scenes:1024:64", tmp_path / "whole", "vit_b16_stop", **begun)
    pretrain("scenes:1024:64", tmp_path / "cut", "vit_b16_stop", stop_at=8, **begun)
    cut = pretrain("scenes:1024:64", tmp_path / "cut", "vit_b16_stop", **ended)
    losses = [[line["loss"] for line in run.metrics] for run in (whole, cut)]
    assert len(losses[0]) == 16
    torch.testing.assert_close(losses[0], losses[1], rtol=5e-3, atol=0)


def test_images_in_memory_live_on_the_gpu_and_are_cropped_as_on_the_cpu() -> None:
    config = configure("vit_b16_stop", SMALL | {"runtime.workers": 2})
    images = Scenes(256, 64)
    on_gpu, on_cpu = (
        loader(images, config, 1, device=torch.device(name)) for name in ("cuda", "cpu")
    )
    for _ in range(2):
        a, b = next(on_gpu), next(on_cpu)
        assert a.images.is_cuda
        assert (a.images.cpu() - b.images.float()).abs().mean() < 0.5
        assert torch.equal(a.augmentation, b.augmentation)


def test_features_of_a_gpu_are_those_of_a_cpu_for_every_image_and_every_encoder() -> None:
    """Copies to and from the GPU overlap: a batch that came too early would be another's."""
    pixels = np.random.default_rng(0).integers(0, 256, (5000, 32, 32, 3), dtype=np.uint8)
    images, kept = Arrays(pixels, {}, [], "noise"), Kept()
    for seed in range(2):
        torch.manual_seed(seed)
        model = VisionTransformer(32, 8, width=32, depth=2, heads=2)
        expected = extract(model, images, size=32, layers=2)
        found = extract(model.cuda(), images, size=32, layers=2, device="cuda", batch_size=300)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        showing = Showing(images, middle(model, images, 32))
        for _ in range(2):  # made, and kept
            shown = kept.batches("key", showing, torch.device("cuda"))
            found = extract(model, images, size=shown, layers=2, device="cuda")
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------ saving


def test_a_copy_reaches_the_host_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any shape and type, larger than the pinned buffer or not, while the GPU is busy."""
    monkeypatch.setattr(copies, "STAGE", 1000)
    x = torch.randn(513, 129, device="cuda")
    tensors = {
        "large": x,
        "turned": x.t(),
        "half": x.bfloat16(),
        "yes or no": x > 0,
        "one": x[0, 0].clone(),
        "none": x[:0],
    }
    for _ in range(50):
        x @ x.t()
    state = copies.cloned(tensors)
    assert state is not None
    ready = torch.cuda.current_stream().record_event()
    expected = {name: y.cpu() for name, y in tensors.items()}
    x.zero_()
    found = copies.on_host(state, ready)
    assert found.keys() == expected.keys()
    for name, y in found.items():
        assert y.is_contiguous()
        assert torch.equal(y, expected[name]), name


def test_copies_have_a_stream_that_no_recording_has() -> None:
    device = torch.device("cuda", 0)
    others = {torch.cuda.Stream(device).cuda_stream for _ in range(64)}
    assert len(others) < 64  # or torch makes a new one each time
    assert copies._stream(device).cuda_stream not in others


def test_a_save_goes_on_while_an_update_is_recorded(tmp_path: Path) -> None:
    """After every update: copies to the host fall into the recording of the third."""
    options = SMALL | {"runtime.save_every": 1, "runtime.keep": 9, "optim.epochs": 1}
    often = pretrain("scenes:1024:64", tmp_path / "often", "vit_b16_stop", **options)
    rarely = options | {"runtime.save_every": 8}
    once = pretrain("scenes:1024:64", tmp_path / "once", "vit_b16_stop", **rarely)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (often.checkpoint / name).read_bytes() == (once.checkpoint / name).read_bytes()


def test_a_checkpoint_written_beside_later_updates_is_that_of_its_step(tmp_path: Path) -> None:
    options = SMALL | {"runtime.save_every": 3, "runtime.keep": 9}
    whole = pretrain("scenes:512:64", tmp_path / "whole", "vit_b16_stop", **options)
    short = pretrain("scenes:512:64", tmp_path / "short", "vit_b16_stop", stop_at=3, **options)
    path = whole.path / "checkpoints" / "step-00000003"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (path / name).read_bytes() == (short.checkpoint / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saving_a_vit_b_pauses_training_for_a_fifth_of_a_second_at_most() -> None:
    waits, beside = bench_saving(None, {})
    assert beside["longest_pause_ms"] <= 200 < waits["longest_pause_ms"]


# ------------------------------------------------------------------------------ fused kernels


FUSED: dict[str, Any] = {"runtime.kernels": "fused"}


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).norm() / expected.double().norm()).detach())


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [384, 768, 1024, 1280, 24])
@pytest.mark.parametrize("last", [True, False])
def test_adding_and_norming_at_once_is_both_and_so_are_all_gradients(
    width: int, stream: torch.dtype, last: bool
) -> None:
    """More tokens than programs, and not a multiple; of a `last` block nobody reads the sum."""
    from stopmim.gpu.kernels.norm import add_norm

    shape = (7, 301, width)
    x, above = (torch.randn(shape, device="cuda").to(stream) for _ in range(2))
    delta, above_h = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    given = [x, delta, *(torch.randn(width, device="cuda") for _ in range(3))]
    inputs = [v.requires_grad_() for v in given]
    exact = [v.detach().double().requires_grad_() for v in given]
    ours = add_norm(*inputs, 1e-6, torch.bfloat16)[:2]
    y = exact[0] + exact[1] + exact[2]
    theirs = y, F.layer_norm(y, y.shape[-1:], exact[3], exact[4], 1e-6)
    grads = [above_h] if last else [above, above_h]
    found = torch.autograd.grad(ours[last:], inputs, grads)
    wanted = torch.autograd.grad(theirs[last:], exact, [g.double() for g in grads])
    assert [v.dtype for v in (*ours, *found[:2])] == [stream, torch.bfloat16] * 2
    for a, b in zip((*ours, *found), (*theirs, *wanted), strict=True):
        exactly = a.dtype == stream == torch.float32
        assert relative(a, b) < (1e-5 if exactly else 5e-3)


@pytest.mark.parametrize(
    ("n", "heads", "d", "first"),
    [(85, 12, 32, 0), (85, 12, 32, 52), (116, 16, 24, 73), (73, 16, 80, 0), (128, 2, 64, 100)],
)
def test_attention_by_blocks_is_attention(n: int, heads: int, d: int, first: int) -> None:
    from stopmim.gpu.kernels.blockwise import block_attention

    shape = (4, n, 3 * heads * d)
    # Scores far from 0 too: keys beyond the last must not count, however small the others are.
    qkv = 3 * torch.randn(shape, device="cuda") - 2
    qkv = qkv.bfloat16().requires_grad_()
    q, k, v = qkv.double().unflatten(2, (3, heads, d)).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q[:, :, first:], k, v).transpose(1, 2).flatten(2)
    above = torch.randn_like(expected).bfloat16()
    found = block_attention(qkv, heads, first)[0]
    assert relative(found, expected) < 1e-2
    (found_grad,) = torch.autograd.grad(found, qkv, above)
    (expected_grad,) = torch.autograd.grad(expected, qkv, above.double())
    assert relative(found_grad, expected_grad) < 2e-2
    width = heads * d
    assert not found_grad[:, :first, :width].any()  # no queries


def test_fused_kernels_give_the_losses_of_the_usual_ones_compiled_recorded_and_plain() -> None:
    fused = {how: updates(how, 6, **FUSED) for how in ("off", "on", "auto")}
    for losses in fused.values():
        torch.testing.assert_close(losses, twelve("off")[:6], rtol=5e-3, atol=0)


def test_fused_kernels_are_what_fused_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would compare the usual ones with themselves."""
    seen, fused = [], blocks.fused

    def noted(some: list[Any], x: Tensor, norm: Any, first: int, asked: Tensor | None) -> Tensor:
        seen.append(first)
        return fused(some, x, norm, first, asked)

    monkeypatch.setattr(blocks, "fused", noted)
    updates("off", 1, **FUSED)
    assert len(seen) == 3  # target encoder, encoder, predictor
    updates("off", 1, **FUSED, **VARIANTS["recomputed"])
    assert len(seen) == 4  # the target encoder alone, which keeps nothing


class Updated:
    """A model that is updated by given gradients, which are in new memory every time."""

    def __init__(self, is_fused: bool) -> None:
        config = configure("vit_b16_stop", SMALL)
        self.model = build(config).cuda()
        self.optimizer = adamw(self.model, config.optim)
        self.at_once = one_pass(self.model, self.optimizer, torch.bfloat16) if is_fused else None
        self.graphs = CudaGraphs(self.update, torch.device("cuda"))

    def update(self, x: Tensor, skip: Tensor, now: Rates) -> dict[str, Tensor]:
        for i, p in enumerate(p for p in self.model.parameters() if p.requires_grad):
            places = torch.arange(p.numel(), device="cuda").view(p.shape)
            p.grad = torch.sin(x.sum() * (i + 1) + places)
        skip = skip.float()
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        advance(self.model, self.optimizer, now, skip, self.at_once)
        self.optimizer.zero_grad(set_to_none=True)
        return {"skip": skip}

    def state(self) -> dict[str, Tensor]:
        weights, slots = checkpoint.live(self.model, self.optimizer)
        return weights | slots


def test_one_pass_over_memory_is_adamw_with_decay_and_then_the_target_encoder() -> None:
    """Plain, recorded, with plain updates between recordings, and skipped in each of these."""
    ours, usual = Updated(is_fused=True), Updated(is_fused=False)
    assert ours.at_once is not None
    skipped, sizes = (1, 3, 8), [1] * 5 + [2, 2] + [1] * 5
    for step, size in enumerate(sizes):
        skip = step in skipped
        x = torch.full((size,), math.nan if skip else step + 1.0, device="cuda")
        now = Rates(1e-2 / (step + 1), 0.1 * step, 0.9 + 0.005 * step)
        before = {name: v.clone() for name, v in ours.state().items()}
        for one in (ours, usual):
            one.graphs(x, float(skip), now)
        wanted = usual.state()
        for name, found in ours.state().items():
            distance = (found.double() - wanted[name].double()).norm()
            assert distance <= 3e-6 * wanted[name].double().norm(), (step, name)
            if skip and not name.startswith("target_encoder"):
                assert torch.equal(found, before[name]), (step, name)
    assert ours.at_once.table is not None  # or it was never used
    assert len(ours.graphs.recordings) == 1
    p = ours.model.predictor.predictor_proj.weight
    assert int(ours.optimizer.state[p]["step"]) == len(sizes) - len(skipped)


def test_one_pass_takes_weights_and_gradients_of_any_size_and_place() -> None:
    """Sizes that are no multiple of 4, gradients that begin anywhere, and some that are missing."""
    from offline import optimize

    for name, errors in optimize("cuda"):
        assert errors.pop("step") == 0, name
        assert max(errors.values()) < 1e-6, (name, errors)


@pytest.mark.parametrize(
    ("precision", "is_used"), [("bf16", True), ("fp16", False), ("fp32", False)]
)
def test_the_optimizer_goes_through_memory_once_if_kernels_are_fused(
    precision: str, is_used: bool
) -> None:
    trained = Trained("off", **FUSED, **{"runtime.precision": precision})
    for step in range(2):
        trained.update(step)
    used = trained.make.one_pass
    assert (used is not None and used.table is not None) == is_used


@pytest.mark.parametrize(("first", "then"), [("usual", "fused"), ("fused", "usual")])
def test_a_run_goes_on_with_other_kernels(tmp_path: Path, first: str, then: str) -> None:
    options = SMALL | {"runtime.log_every": 1, "runtime.kernels": first}
    whole = pretrain("scenes:512:64", tmp_path / "whole", "vit_b16_stop", **options)
    pretrain("scenes:512:64", tmp_path / "cut", "vit_b16_stop", stop_at=3, **options)
    options |= {"runtime.kernels": then}
    cut = pretrain("scenes:512:64", tmp_path / "cut", "vit_b16_stop", **options)
    losses = [[line["loss"] for line in run.metrics] for run in (whole, cut)]
    torch.testing.assert_close(losses[0], losses[1], rtol=5e-3, atol=0)
