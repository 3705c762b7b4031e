"""Linear heads trained together, by the published recipes."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import seeded
from stopmim.base.random_keys import torch_generator
from stopmim.evals.heads import Head, Split, grid, train_heads
from stopmim.evals.linear import linear_probe, probes, selection_split
from stopmim.evals.recipes import OWN, TASKS, Recipe
from stopmim.evals.results import Reading
from stopmim.method.encoder import VisionTransformer

SHORT = Recipe(3, batch_size=32, lr=0.1, lr_factors=(1.0, 0.1), weight_decays=(5e-4, 0.0))
LARS = Recipe(3, batch_size=32, lr=10.0, optimizer="lars", lr_factors=(1.0, 0.1))
WIDTH = 6


def planted(n: int, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (n, 4 * WIDTH): the last block holds the label, the others are noise."""
    generator = seeded(seed)
    y = torch.randint(classes, (n,), generator=generator)
    x = torch.randn(n, 4 * WIDTH, generator=generator) * 0.2 + 1
    x[:, -WIDTH:] += F.pad(F.one_hot(y, classes), (0, WIDTH - classes))
    return x, y


# ------------------------------------------------------------------------------ the grid


@pytest.mark.parametrize("recipe", [SHORT, LARS], ids=["sgd", "lars"])
def test_a_grid_of_heads_trained_together_equals_each_trained_alone(recipe: Recipe) -> None:
    (x, y), (test_x, test_y) = planted(100), planted(400, seed=1)
    heads = grid(recipe, (1, 4))
    together = train_heads(heads, recipe, Split([x], y, test_x, test_y, WIDTH))
    assert len(heads) == len(set(heads)) == 4 * len(recipe.lr_factors) * len(recipe.weight_decays)
    for i, head in enumerate(heads):
        alone = train_heads([head], recipe, Split([x], y, test_x, test_y, WIDTH))
        assert torch.equal(alone.correct[:, 0], together.correct[:, i]), head
        assert torch.equal(alone.predicted[0], together.predicted[i]), head


def reference(head: Head, recipe: Recipe, x: Tensor, y: Tensor, first: nn.Sequential) -> nn.Module:
    """The head as modules, trained by torch.optim.SGD or by LARS written down parameter-wise."""
    linear, speed = first[-1], dict[str, Tensor | int]()
    if recipe.optimizer == "sgd":
        matrix = [linear.weight, linear.bias]
        norm = [p for name, p in first.named_parameters() if not any(p is m for m in matrix)]
        params: list[dict[str, Any]] = [{"params": matrix}, {"params": norm, "weight_decay": 0.0}]
        sgd = torch.optim.SGD(
            params,
            lr=1.0, momentum=0.9, nesterov=True, weight_decay=head.weight_decay,
        )  # fmt: skip
    first.train()
    for epoch in range(recipe.epochs):
        order = torch.randperm(len(y), generator=torch_generator("heads", 0, epoch))
        rate = head.lr * recipe.rate(epoch)
        for part in order.split(recipe.batch_size):
            first.zero_grad()
            F.cross_entropy(first(x[part, -head.layers * WIDTH :]), y[part]).backward()
            if recipe.optimizer == "sgd":
                for group in sgd.param_groups:
                    group["lr"] = rate
                sgd.step()
                continue
            for name, p in first.named_parameters():
                g = p.grad if p.grad is not None else torch.zeros_like(p)
                if p is linear.weight or p is linear.bias:  # batch norm does not decay
                    g = g + head.weight_decay * p.data
                if p.ndim > 1 and p.data.norm() > 0 and g.norm() > 0:
                    g = g * (0.001 * p.data.norm() / g.norm())
                speed[name] = 0.9 * speed.get(name, 0) + g
                p.data -= rate * speed[name]
    return first.eval()


@pytest.mark.parametrize("norm", ["bn", "none", "fixed bn"])
@pytest.mark.parametrize("recipe", [SHORT, LARS], ids=["sgd", "lars"])
def test_a_head_is_what_torch_modules_trained_one_by_one_become(recipe: Recipe, norm: str) -> None:
    (x, y), (test_x, test_y) = planted(96), planted(2000, seed=1)
    head = Head(4, norm, 0.5, 0.01)  # type: ignore[arg-type]
    linear = nn.Linear(4 * WIDTH, 4)
    generator = torch_generator("head", 0, 4, norm)
    bound = 1 / math.sqrt(4 * WIDTH)  # of nn.Linear
    for p in (linear.weight, linear.bias):
        p.data = (torch.rand(p.shape, generator=generator) * 2 - 1) * bound
    eps = {"bn": 1e-5, "fixed bn": 1e-6}
    before = [] if norm == "none" else [nn.BatchNorm1d(24, eps=eps[norm], affine=norm == "bn")]
    module = reference(head, recipe, x, y, nn.Sequential(*before, linear))
    found = train_heads([head], recipe, Split([x], y, test_x, test_y, WIDTH))
    with torch.no_grad():
        logits = module(test_x)
    assert torch.equal(found.predicted[0], logits.argmax(dim=1))
    assert found.correct[-1, 0] == (logits.argmax(dim=1) == test_y).sum()


def test_epoch_e_sees_view_e_modulo_their_number() -> None:
    (x, y), (test_x, test_y) = planted(64), planted(200, seed=1)
    recipe, other = Recipe(2, batch_size=16, lr=0.1, norms=("none",)), torch.randn_like(x)
    heads = grid(recipe, (1,))

    def last(*views: Tensor) -> Tensor:
        return train_heads(heads, recipe, Split(views, y, test_x, test_y, WIDTH)).correct

    assert torch.equal(last(x, other)[0], last(x)[0])
    assert not torch.equal(last(x, other)[1], last(x)[1])
    assert torch.equal(last(x, x), last(x))


def test_half_precision_features_give_the_same_heads_up_to_their_rounding() -> None:
    (x, y), (test_x, test_y) = planted(200), planted(1000, seed=1)
    heads = grid(SHORT, (1, 4))
    full = train_heads(heads, SHORT, Split([x], y, test_x, test_y, WIDTH))
    half = train_heads(heads, SHORT, Split([x.half()], y, test_x.half(), test_y, WIDTH))
    assert (full.predicted == half.predicted).float().mean() > 0.995


def test_a_last_batch_of_one_is_no_failure() -> None:
    x, y = planted(33)
    found = train_heads(grid(SHORT, (1,)), SHORT, Split([x], y, x[:1], y[:1], WIDTH))
    assert found.predicted.shape == (8, 1)


def test_classes_that_train_lacks_count_as_wrong() -> None:
    (x, y), (test_x, test_y) = planted(300), planted(1000, seed=1)
    known = y < 2
    split = Split([x[known]], y[known], test_x, test_y, WIDTH)
    found = train_heads([Head(1, "bn", 1.0, 0.0)], Recipe(10, lr=0.5, batch_size=32), split)
    assert int(found.correct[-1, 0]) == pytest.approx(int((test_y < 2).sum()), abs=20)


def test_labels_of_one_class_are_refused() -> None:
    x, y = planted(20)
    with pytest.raises(ValueError, match="all 20 labels are 0: there is nothing to separate"):
        train_heads(grid(SHORT, (1,)), SHORT, Split([x], y * 0, x, y, WIDTH))


# ------------------------------------------------------------------------------ recipes


def test_published_rates_at_the_boundaries_of_epochs() -> None:
    imagenet = TASKS["imagenet"].recipe
    assert [imagenet.rate(e) for e in (0, 7.99, 8, 15, 16, 23, 24, 27)] == pytest.approx(
        [0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5]
    )
    count = TASKS["clevr_count"].recipe
    for e in (0, 1, 25, 49):
        expected = 1e-4 + 0.5 * (0.01 - 1e-4) * (1 + math.cos(math.pi * e / 50))
        assert count.rate(e) == pytest.approx(expected)
        assert count.rate(e + 0.9) == count.rate(e)  # once an epoch
    lars = TASKS["imagenet_lars"].recipe
    assert [lars.rate(e) for e in (0, 14, 15, 30, 49)] == pytest.approx(
        [6.4, 6.4, 0.64, 0.064, 0.0064]
    )
    mae = TASKS["imagenet_mae"].recipe
    assert [mae.rate(e) for e in (0, 5, 10, 50, 90)] == pytest.approx([0, 3.2, 6.4, 3.2, 0])
    assert mae.rate(5.5) == pytest.approx(3.52)  # at every step


def test_the_recipe_for_huge_models_has_the_sixteen_published_heads_in_their_order() -> None:
    heads = grid(TASKS["imagenet_lars"].recipe, (4, 1))
    assert len(heads) == 16
    assert heads[:4] == [Head(n, norm, 1.0, 5e-4) for n in (4, 1) for norm in ("bn", "none")]
    groups = [(head.lr, head.weight_decay) for head in heads[::4]]
    assert groups == [(1.0, 5e-4), (1.0, 0.0), (0.1, 5e-4), (0.1, 0.0)]


def test_tasks_have_the_published_classes_epochs_and_views() -> None:
    assert {name: (task.classes, task.recipe.epochs) for name, task in TASKS.items()} == {
        "imagenet": (1000, 28), "cifar100": (100, 28), "places205": (205, 14),
        "inat18": (8142, 84), "clevr_count": (8, 50), "clevr_dist": (6, 100),
        "imagenet_lars": (1000, 50), "imagenet_mae": (1000, 90),
    }  # fmt: skip
    with torch.device("meta"):
        b16, l16 = (VisionTransformer.from_arch(f"vit_{size}16", 224) for size in "bl")
    for name, task in TASKS.items():
        views = task.views(b16)
        if "clevr" in name:  # stretched, never cropped
            assert (views.train.scale, views.test.resize) == (None, (224, 224))
        else:
            assert (views.train.scale, views.test.resize) == ((0.08, 1.0), 256)
    assert TASKS["inat18"].views(b16).test.mode == "bilinear"
    assert TASKS["inat18"].views(l16).test.mode == "bicubic"
    assert not TASKS["imagenet_mae"].views(b16).train.retry


def test_the_probe_of_mae_is_shorter_from_vit_l_on() -> None:
    """FINETUNE.md of MAE: 90 epochs for ViT-B, 50 for ViT-L and ViT-H."""
    with torch.device("meta"):
        sizes = [VisionTransformer.from_arch(f"vit_{n}", 224) for n in ("s16", "b16", "l16", "h14")]
    epochs = [TASKS["imagenet_mae"].heads(encoder).epochs for encoder in sizes]
    assert epochs == [90, 90, 50, 50]
    large = TASKS["imagenet_mae"].heads(sizes[2])
    assert large.rate(50) == 0.0  # the cosine ends with it
    assert {TASKS["imagenet"].heads(encoder).epochs for encoder in sizes} == {28}


def test_batch_norm_decays_for_class_tokens_alone() -> None:
    with torch.device("meta"):
        ours, token = (
            VisionTransformer.from_arch("vit_b16", 224, class_token=t) for t in (False, True)
        )
    decayed = {name: task.heads(token).decay_bn for name, task in TASKS.items()}
    assert {name for name, decays in decayed.items() if not decays} == {
        "imagenet_lars",
        "imagenet_mae",
    }
    assert not any(task.heads(ours).decay_bn for task in TASKS.values())


# ------------------------------------------------------------------------------ the two readings


def test_both_readings_find_planted_labels_and_say_what_they_chose() -> None:
    (x, y), (test_x, test_y) = planted(600), planted(1000, seed=1)
    split = Split([x], y, test_x, test_y, WIDTH)
    found = probes(split, OWN, readings=("held-out", "paper"))
    assert [(p.reading, p.head.layers) for p in found] == [
        ("held-out", 1), ("held-out", 4), ("paper", 1), ("paper", 4),
    ]  # fmt: skip
    for probe in found:
        assert probe.correct.float().mean() > 0.99
        assert int(probe.epochs[-1]) == int(probe.correct.sum())
    for held, paper in zip(found[:2], found[2:], strict=True):
        assert paper.correct.sum() >= held.correct.sum()
        assert paper.epochs[paper.best_epoch] == paper.epochs.max()


def test_labels_that_have_nothing_to_do_with_the_features_are_told_at_chance() -> None:
    (x, y), (test_x, test_y) = planted(400), planted(3000, seed=1)
    x, test_x = torch.randn(x.shape, generator=seeded(5)), torch.randn(test_x.shape)
    for probe in probes(Split([x], y, test_x, test_y, WIDTH), SHORT):
        assert float(probe.correct.float().mean()) == pytest.approx(0.25, abs=0.04)


def test_a_held_out_choice_does_not_depend_on_test_and_the_papers_does() -> None:
    (x, y), (test_x, test_y) = planted(80), planted(300, seed=1)
    x, test_x = x + torch.randn(x.shape, generator=seeded(3)) * 2, test_x.flip(1)

    def heads(labels: Tensor, reading: Reading) -> list[Head]:
        found = probes(Split([x], y, test_x, labels, WIDTH), SHORT, readings=(reading,))
        return [probe.head for probe in found]

    others = [(test_y + i) % 4 for i in range(4)]
    assert len({tuple(heads(labels, "held-out")) for labels in others}) == 1
    assert len({tuple(heads(labels, "paper")) for labels in others}) > 1


def test_the_held_out_number_is_of_the_chosen_head_trained_on_all_of_train() -> None:
    (x, y), (test_x, test_y) = planted(200), planted(500, seed=1)
    (probe,) = probes(Split([x], y, test_x, test_y, WIDTH), SHORT, layers=(1,))
    again = train_heads([probe.head], SHORT, Split([x], y, test_x, test_y, WIDTH))
    assert torch.equal(probe.correct, again.predicted[0] == test_y)
    held, rest = selection_split(y, 0)
    assert len(held) == 40
    assert sorted([*held.tolist(), *rest.tolist()]) == list(range(200))


def test_a_class_of_one_sample_is_never_held_out() -> None:
    y = torch.zeros(50, dtype=torch.long)
    y[7] = 1
    for seed in range(20):
        held, rest = selection_split(y, seed)
        assert 7 in rest.tolist()
        assert sorted([*held.tolist(), *rest.tolist()]) == list(range(50))


def test_heads_for_augmented_views_are_chosen_on_plain_ones() -> None:
    """The views of held-out samples show another class: there, a head that learned is the worst."""
    (x, y), (test_x, test_y) = planted(400), planted(300, seed=1)
    held, rest = selection_split(y, 0)
    twisted = x.clone()
    for i in held.tolist():
        twisted[i] = x[next(j for j in rest.tolist() if y[j] == (y[i] + 1) % 4)]
    recipe = Recipe(5, batch_size=32, lr=1.0, lr_factors=(1e-9, 1.0), norms=("none",))
    for plain, chosen in ((x, 1.0), (None, 1e-9)):
        split = Split([twisted], y, test_x, test_y, WIDTH)
        (probe,) = probes(split, recipe, layers=(1,), plain=plain)
        assert probe.head.lr == chosen


def test_an_encoder_of_two_blocks_has_a_last_two_and_no_last_four() -> None:
    (x, y), (test_x, test_y) = planted(100), planted(100, seed=1)
    split = Split([x[:, -2 * WIDTH :]], y, test_x[:, -2 * WIDTH :], test_y, WIDTH)
    found = probes(split, SHORT)
    assert [probe.head.layers for probe in found] == [1, 2]


def test_the_papers_reading_of_a_solved_probe_is_never_below_the_held_out_one() -> None:
    (x, y), (test_x, test_y) = planted(60), planted(500, seed=1)
    x = x + torch.randn(x.shape, generator=seeded(3))
    held = linear_probe(x, y, test_x, test_y)
    paper = linear_probe(x, y, test_x, test_y, reading="paper")
    assert paper.accuracy >= held.accuracy
