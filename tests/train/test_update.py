"""A step at rates that are tensors, as it is recorded on a GPU, is the step at plain numbers.

What only a GPU can show, that a recording does the same, is in test_gpu.py.
"""

import copy
import weakref
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from test_mim import draw, small, small_batch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from stopmim.config.schema import OptimConfig
from stopmim.method.build import configure
from stopmim.method.model import MaskedImageModel
from stopmim.train.distributed import ALONE, World
from stopmim.train.optimizer import adamw, advance, one_pass, set_rates, step_at
from stopmim.train.rates import Rates, rates
from stopmim.train.step import Part, Step, build_step, is_recorded

# A decay and a rate so high that forgetting one, or mixing them up, cannot be missed.
OPTIM = OptimConfig(epochs=20, lr=2e-2, start_lr=1e-3, warmup_epochs=5, weight_decay=(0.5, 4.0))


def tensors(now: Rates) -> Rates:
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


def in_place(model: MaskedImageModel, optim: OptimConfig, n_parts: int) -> Step:
    """A step whose gradients stay in place, as they do between recordings of its parts."""
    step = Step(model, adamw(model, optim), optim, n_parts=n_parts)
    step.keep_gradients()
    return step


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_that_stay_in_place_make_the_same_updates_bit_for_bit(n: int) -> None:
    usual = small()
    ours = copy.deepcopy(usual)
    optim = OPTIM.model_copy(update={"clip_grad": 0.05, "penalty_l1": 0.01})
    plain, kept = Step(usual, adamw(usual, optim), optim, n_parts=n), in_place(ours, optim, n)
    places = {name: p.grad.data_ptr() for name, p in ours.named_parameters() if p.grad is not None}
    data = parts(usual)
    found: list[dict[str, Tensor]] = []
    for step in range(4):
        own, now = list(islice(data, n)), rates(OPTIM, step, 1)
        want = plain(own, now)
        found.append(kept(iter(own), now))
        assert {k: float(v) for k, v in found[-1].items()} == {k: float(v) for k, v in want.items()}
    want_all, found_all = everything(usual, plain.optimizer), everything(ours, kept.optimizer)
    assert [k for k in want_all if not torch.equal(want_all[k], found_all[k])] == []
    assert len({float(values["loss"]) for values in found}) == 4  # none was overwritten
    for name, p in ours.named_parameters():
        assert not p.requires_grad or (p.grad is not None and p.grad.data_ptr() == places[name])
    assert all(place % 16 == 0 for place in places.values())


def test_a_part_is_worked_on_before_the_next_is_drawn_and_then_is_gone() -> None:
    model, events = small(), list[str]()
    seen: list[weakref.ref[Tensor]] = []

    def drawn() -> Iterator[Part]:
        for batch, noise in islice(parts(model), 4):
            events.append(f"draw, {sum(x() is not None for x in seen)} left")
            part = batch._replace(images=batch.images.clone()), noise
            del batch, noise
            seen.append(weakref.ref(part[0].images))
            yield part
            del part

    step = in_place(model, OPTIM, 4)

    def work(part: Part | None, rates: Rates | None) -> dict[str, Tensor]:
        events.append(f"{'part' if part else ''}{'update' if rates else ''}")
        return step.work(part, rates)

    step(drawn(), rates(OPTIM, 3, 1), work)
    # The one that was just worked on is still at hand.
    drawing = ["draw, 0 left", "part"] + 3 * ["draw, 1 left", "part"]
    assert events == [*drawing, "update"]
    del events[:], seen[:]
    alone = Step(model, adamw(model, OPTIM), OPTIM)
    alone([next(parts(model))], rates(OPTIM, 3, 1), lambda *given: work(*given))
    assert events == ["partupdate"]  # one recording


def test_an_update_that_failed_in_its_second_part_leaves_nothing_to_the_next() -> None:
    usual = small()
    ours = copy.deepcopy(usual)
    plain, kept = Step(usual, adamw(usual, OPTIM), OPTIM, n_parts=4), in_place(ours, OPTIM, 2)
    data, now = parts(usual), rates(OPTIM, 3, 1)
    first, *own = islice(data, 5)

    def failing() -> Iterator[Part]:
        yield first
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        kept(failing(), now)
    assert kept.settled
    assert kept.sums.any()  # or there was nothing to leave
    kept.cut(4)
    assert all(p.grad is None for p in ours.parameters())
    kept.keep_gradients()
    assert float(kept(own, now)["loss"]) == float(plain(own, now)["loss"])
    want, found = everything(usual, plain.optimizer), everything(ours, kept.optimizer)
    assert [k for k in want if not torch.equal(want[k], found[k])] == []


def test_what_a_gpu_records() -> None:
    gpu, pair = torch.device("cuda"), World(0, 2, store=HashStore())
    cases: list[tuple[dict[str, object], World, bool]] = [
        ({}, ALONE, True),
        ({"runtime.accumulate": 8}, ALONE, True),
        ({"runtime.accumulate": 8}, pair, True),
        ({"runtime.parallel": "fsdp"}, pair, False),
        ({"runtime.parallel": "fsdp"}, ALONE, True),  # there is nothing to shard
        ({"runtime.precision": "fp16"}, ALONE, False),
        ({"runtime.compile": "on"}, pair, False),
        ({"runtime.compile": "off"}, ALONE, False),
        ({"masking.compat": "released"}, ALONE, False),
    ]
    for changes, world, expected in cases:
        config = configure("vit_b16_stop", {"runtime.precision": "bf16"} | changes)
        assert is_recorded(config, gpu, world) == expected, changes
    assert not is_recorded(configure("vit_b16_stop"), torch.device("cpu"))


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
