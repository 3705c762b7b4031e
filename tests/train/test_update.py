"""A step at rates that are tensors, as it is recorded on a GPU, is the step at plain numbers.

What only a GPU can show, that a recording does the same, is in test_gpu.py.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from test_mim import draw, small, small_batch
from torch import Tensor

from stopmim.config.schema import OptimConfig
from stopmim.gpu.devices import compiles_itself
from stopmim.method.build import build_sampler, configure
from stopmim.method.model import MaskedImageModel
from stopmim.train.optimizer import adamw, advance, one_pass, set_rates, step_at
from stopmim.train.rates import Rates, rates
from stopmim.train.step import Part, Step, build_step

# A decay and a rate so high that forgetting one, or mixing them up, cannot be missed.
OPTIM = OptimConfig(epochs=20, lr=2e-2, start_lr=1e-3, warmup_epochs=5, weight_decay=(0.5, 4.0))


def tensors(now: Rates[float]) -> Rates[Tensor]:
    return Rates(*(torch.tensor(x, dtype=torch.float64) for x in now))


def parts(model: MaskedImageModel) -> Iterator[Part]:
    """The same images and masks with ever new noise."""
    seed = 0
    while True:
        batch = small_batch()
        yield batch, draw(model, batch, seed)
        seed += 1


def everything(model: MaskedImageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    slots = {
        f"{i}/{j}/{slot}": value
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        for slot, value in optimizer.state[p].items()
    }
    return {name: x.clone() for name, x in (model.state_dict() | slots).items()}


@pytest.mark.parametrize("penalty", [(0.0, 0.0), (0.01, 0.02)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_at_tensors_is_the_step_at_numbers(
    clip: float | None, penalty: tuple[float, float]
) -> None:
    usual = small()
    ours = copy.deepcopy(usual)
    optimizers, data = (adamw(usual, OPTIM), adamw(ours, OPTIM)), parts(usual)
    own = {"clip_grad": clip, "penalty_l1": penalty[0], "penalty_l2": penalty[1]}
    optim = OPTIM.model_copy(update=own)
    at_numbers, at_tensors = Step(usual, optimizers[0], optim), Step(ours, optimizers[1], optim)
    for step in range(6):
        part, now = next(data), rates(OPTIM, step, 1)
        want, found = at_numbers([part], now), at_tensors([part], tensors(now))
        assert list(found) == list(want)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
    assert not at_tensors.broken
    wanted = everything(usual, optimizers[0])
    torch.testing.assert_close(everything(ours, optimizers[1]), wanted, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in ours.parameters())


def test_decay_by_hand_is_that_of_adamw_in_all_four_groups() -> None:
    usual = small()
    before = {name: p.clone() for name, p in usual.named_parameters()}
    ours = copy.deepcopy(usual)
    optimizers = adamw(usual, OPTIM), adamw(ours, OPTIM)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        now = rates(OPTIM, step, 1)
        for p, q in zip(usual.parameters(), ours.parameters(), strict=True):
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.clone()
        set_rates(optimizers[0], now)
        optimizers[0].step()
        step_at(optimizers[1], tensors(now), torch.zeros(()))
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, usual.get_parameter(name), rtol=1e-6, atol=1e-6)
    matrix, bias = "encoder.blocks.0.mlp.fc1.weight", "encoder.blocks.0.mlp.fc1.bias"
    assert usual.get_parameter(matrix).norm() < 0.9 * before[matrix].norm()  # it did decay
    assert not torch.equal(usual.get_parameter(bias), before[bias])


def test_a_parameter_without_gradient_does_not_decay() -> None:
    model = small()
    optimizer = adamw(model, OPTIM)
    unused, used = model.predictor.positions.mask_token, model.predictor.predictor_proj.weight
    used.grad = torch.zeros_like(used)
    before = unused.clone(), used.clone()
    step_at(optimizer, tensors(Rates(0.1, 1.0, 0.0)), torch.zeros(()))
    assert torch.equal(unused, before[0])
    torch.testing.assert_close(used, 0.9 * before[1])


@pytest.mark.parametrize("momentum", [0.25, 0.996, 0.99999, 1.0])
def test_a_momentum_on_the_device_moves_the_target_as_a_number_does(momentum: float) -> None:
    usual = small()
    ours = copy.deepcopy(usual)
    before = [p.clone() for p in usual.branch().parameters()]
    usual.update_target(momentum)
    ours.update_target(torch.tensor(momentum, dtype=torch.float64))
    for old, p, q in zip(
        before, usual.branch().parameters(), ours.branch().parameters(), strict=True
    ):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
        assert momentum < 1 or torch.equal(q, old)


def test_the_target_follows_the_updated_encoder_also_where_kernels_are_fused_in_vain() -> None:
    """On a CPU there is no single pass; the order of encoder and target is that of I-JEPA."""
    model = small()
    optimizer = adamw(model, OPTIM)
    at_once = one_pass(model, optimizer, torch.bfloat16)
    assert at_once is None
    weight, follower = (m.patch_embed.proj.weight for m in (model.encoder, model.branch()))
    weight.grad, before = torch.ones_like(weight), (weight.detach().clone(), follower.clone())
    advance(model, optimizer, Rates(0.1, 0.0, 0.75), torch.zeros(()), at_once)
    torch.testing.assert_close(weight.detach(), before[0] - 0.1)
    torch.testing.assert_close(follower, 0.75 * before[1] + 0.25 * (before[0] - 0.1))


def test_once_broken_nothing_changes_but_the_target_encoder() -> None:
    model = small()
    optimizer, data = adamw(model, OPTIM), parts(model)
    update, now = Step(model, optimizer, OPTIM), tensors(rates(OPTIM, 3, 1))
    update([next(data)], now)
    before = everything(model, optimizer)
    batch, noise = next(data)
    bad = batch._replace(images=batch.images * torch.nan), noise
    for part in (bad, (batch, noise), next(data)):
        update([part], now)
    assert int(update.broken) == 3
    after = everything(model, optimizer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[0] for name in changed} == {"target_encoder"}


def test_updates_are_recorded_on_a_gpu_if_that_is_left_to_us_and_never_on_a_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    own, released = (
        build_sampler(configure("vit_b16_stop", {"masking.compat": compat}))
        for compat in ("none", "released")
    )
    settings = ("auto", "on", "off")
    assert [compiles_itself(one, gpu, own.static) for one in settings] == [True, False, False]
    assert not compiles_itself("auto", gpu, released.static)
    assert not compiles_itself("auto", cpu, own.static)


def test_the_step_of_a_cpu_takes_rates_and_parts() -> None:
    """Every update has its own rates, and the settings of the config reach it."""
    config = configure("tiny_cpu", {"optim.clip_grad": 0.1, "optim.penalty_l2": 0.1})
    model = small()
    optimizer = adamw(model, OPTIM)
    make = build_step(model, optimizer, config, torch.device("cpu"))
    before = everything(model, optimizer)
    batch, noise = next(parts(model))
    found = make(iter([(batch, noise)]), Rates(0.0, 0.5, 1.0))
    assert float(found["penalty"]) > 0
    after = everything(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, torch.tensor(0.1), rtol=1e-3, atol=0)
    make(iter([(batch, noise)]), Rates(0.1, 0.5, 0.5))
    later = everything(model, optimizer)
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], later[name])}
    assert changed == {"encoder", "predictor", "target_encoder"}
