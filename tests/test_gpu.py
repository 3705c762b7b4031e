"""What only a GPU can show. `make test-gpu` runs these; a machine without one leaves them out."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stopmim.data import loader
from stopmim.data.scenes import Scenes
from stopmim.mim import Batch, build
from stopmim.optim import adamw, rates, set_rates
from stopmim.plan import configure
from stopmim.runtime import compiled
from stopmim.train import comparison, draw_masks, draw_noise, find_cells, pretrain, train_step

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
    from stopmim.kernels import short_attention

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


def test_our_gelu_is_gelu_and_not_its_tanh() -> None:
    from stopmim.kernels import gelu

    x = torch.linspace(-8, 8, 65537, device="cuda").bfloat16().requires_grad_()
    expected = F.gelu(x.double())
    found = gelu(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    (found_slope,) = torch.autograd.grad(found.sum(), x)
    # Half of the last bit is what rounding may do; far out, the tanh is off by more than it all.
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(found_slope, slope, rtol=2**-7, atol=1e-5)


@cache
def twelve(compile_: str) -> list[float]:
    return updates(compile_, 12)


def updates(compile_: str, n: int, strict_from: int | None = None, **more: Any) -> list[float]:
    """The losses of `n` updates; from `strict_from` on, waiting for the device is an error."""
    fixed = SMALL if "masking" not in more else {k: SMALL[k] for k in SMALL if "mask" not in k}
    config = configure("vit_b16_stop", fixed | {"runtime.compile": compile_} | more)
    device = torch.device("cuda")
    model = build(config).to(device).train()
    optimizer = adamw(model, config.optim)
    loss = compiled(comparison(config), config, device)
    part = slice(0, config.optim.batch_size)
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(part.stop, 3, 64, 64, generator=generator, device=device)
    broken = torch.zeros((), device=device)
    losses = []
    try:
        for step in range(n):
            if step == strict_from:
                torch.cuda.set_sync_debug_mode("error")
            set_rates(optimizer, rates(config.optim, step, 100))
            (masks,) = draw_masks(config, step, [part], device)
            noise = draw_noise(model.predictor, masks, part, config, step, torch.bfloat16)
            values = train_step(
                model,
                iter([(Batch(images, *masks, find_cells(config, step, masks.targets)), noise)]),
                optimizer,
                momentum=0.996,
                amp=torch.bfloat16,
                broken=broken,
                compare=loss,
            )
            losses.append(values["loss"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(x) for x in losses]


def test_compiled_and_plain_training_give_the_same_losses() -> None:
    torch.testing.assert_close(twelve("on"), twelve("off"), rtol=5e-3, atol=0)


def test_recorded_and_compiled_training_give_the_same_losses() -> None:
    torch.testing.assert_close(twelve("auto"), twelve("on"), rtol=5e-3, atol=0)


VARIANTS: dict[str, dict[str, Any]] = {
    "jitter": {"positions.kind": "jitter", "positions.sigma": 1.0},
    "conditioned": {"positions.covariance": "conditioned"},
    "untied": {"positions.covariance": "untied"},
    "both": {"positions.tokens": "both"},
    "lowres": {"positions": {"kind": "sincos"}, "lowres": "bilinear"},
    "pixels": {"target": "pixels", "class_token": True, "masking": {"kind": "random"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_compiled_to_what_it_is(name: str) -> None:
    compiled_, plain = (updates(how, 3, **VARIANTS[name]) for how in ("on", "off"))
    torch.testing.assert_close(compiled_, plain, rtol=5e-3, atol=0)


def test_nothing_waits_for_the_device_between_log_points() -> None:
    several = {"masking.target_scale": (0.15, 0.2), "masking.target_aspect": (0.75, 1.5)}
    assert len(updates("auto", 40, strict_from=20, **several)) == 40


def test_waiting_for_the_device_would_be_noticed() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.zeros((), device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_run_stopped_and_resumed_on_a_gpu_ends_where_the_other_does(tmp_path: Path) -> None:
    options = SMALL | {"runtime.log_every": 1, "runtime.save_every": 7}
    whole = pretrain("scenes:512:64", tmp_path / "whole", "vit_b16_stop", **options)
    pretrain("scenes:512:64", tmp_path / "cut", "vit_b16_stop", stop_at=3, **options)
    cut = pretrain("scenes:512:64", tmp_path / "cut", "vit_b16_stop", **options)
    losses = [[line["loss"] for line in run.metrics] for run in (whole, cut)]
    assert losses[0] == losses[1]  # bit for bit


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
