"""Linear classifiers on frozen features: trained as the papers do, or solved to their optimum.

Both readings of a protocol are here. `held-out`, the default: a setting is chosen on a fifth of the
training set, the classifier is then trained anew on all of it, and tested once. `paper`: the best
number on the test set counts, as in the tables of I-JEPA and StoP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stopmim.base.random_keys import torch_generator
from stopmim.evals.heads import Head, grid, train_heads
from stopmim.evals.lowshot import fit_logistic, standardise
from stopmim.evals.recipes import OWN, Recipe
from stopmim.evals.results import wilson_interval

Selection = Literal["held-out", "paper"]

HELD_OUT = 0.2  # of the training set
L2S = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-6  # of the objective; accuracies have three digits


# ------------------------------------------------------------------------------ trained


@dataclass(frozen=True, eq=False)  # tensors have no plain ==
class Probe:
    """The head that one reading chose, and what it knows of the test set."""

    head: Head
    selection: Selection
    correct: Tensor  # (n,) bool, after the last epoch
    epochs: Tensor  # (epochs,) test samples told right after each; held-out: the last alone

    @property
    def best_epoch(self) -> int:
        """From 0; which one the papers quote, this or the last, is not known."""
        return int(self.epochs.argmax())


def probes(
    train: Sequence[Tensor],
    y: Tensor,
    test: Tensor,
    test_y: Tensor,
    *,
    width: int,
    recipe: Recipe = OWN,
    layers: Sequence[int] = (1, 4),
    selections: Sequence[Selection] = ("held-out",),
    plain: Tensor | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Probe]:
    """The best head for each of `layers`, once for each of `selections`.

    Args:
        train: features (N, L * D) of views of the training images, see `train_heads`. The published
            protocol has a fresh random view in every epoch, so as many as `recipe.epochs`; a few,
            or a single one that is not random, cost less.
        width: D.
        layers: last blocks that a head sees; 4 means all that there are if there are fewer.
        plain: features (N, L * D) of the training images as test images are shown, to choose on.
            Default: the first of `train`.
    """
    # An encoder of two blocks has no last four.
    deep = list(dict.fromkeys(min(n, test.shape[1] // width) for n in layers))
    heads = grid(recipe, deep)
    common: dict[str, Any] = {"width": width, "seed": seed, "device": device}
    chosen: dict[int, Head] = {}
    if "held-out" in selections:
        held, rest = held_out(y, seed)
        shown = train[0] if plain is None else plain
        found = train_heads(
            heads, recipe, [x[rest] for x in train], y[rest], shown[held], y[held],
            every_epoch=False, **common,
        )  # fmt: skip
        for n in deep:
            chosen[n] = _best(heads, found.correct[-1], n)
    # A head comes out the same in any company: if nobody asks for the others, they are left out.
    heads = heads if "paper" in selections else list(dict.fromkeys(chosen.values()))
    found = train_heads(
        heads, recipe, train, y, test, test_y, every_epoch="paper" in selections, **common
    )
    results = []
    for selection in selections:
        for n in deep:
            # The last epoch decides here as well; the best one of this head is recorded beside it.
            head = chosen[n] if selection == "held-out" else _best(heads, found.correct[-1], n)
            i = heads.index(head)
            correct, epochs = found.predicted[i] == test_y.cpu(), found.correct[:, i]
            results.append(Probe(head, selection, correct, epochs))
    return results


def _best(heads: list[Head], correct: Tensor, layers: int) -> Head:
    """The head with that many layers and most correct; of equals the first."""
    own = [i for i, head in enumerate(heads) if head.layers == layers]
    return heads[max(own, key=lambda i: int(correct[i]))]


# ------------------------------------------------------------------------------ solved


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """Accuracy as a fraction (0 to 1) with its 95 % interval, and the classifier behind it."""

    accuracy: float
    l2: float
    interval: tuple[float, float]
    weights: Tensor  # (classes, D + 1), intercept last, for standardised features


def linear_probe(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    seed: int = 0,
    l2s: Sequence[float] = L2S,
) -> ProbeResult:
    """Logistic regression with an intercept, fitted to all of train and tested once.

    Features are standardised by the training set. This is the held-out reading of the protocol:
    nothing that is chosen or fitted depends on the test set.

    Args:
        train_x: features (N, D), train_y: labels (N,); the same for the test samples. A test label
            that train does not have counts as wrong.
        seed: of the split of train on which l2 is chosen.
        l2s: penalties to choose from, of the mean loss; see `fit_logistic`.
    """
    l2 = choose_l2(train_x, train_y, seed, l2s)
    weights = _fit(train_x, train_y, l2)
    correct = int((_predict(weights, test_x, train_x) == test_y).sum())
    n = len(test_y)
    return ProbeResult(correct / n, l2, wilson_interval(correct, n), weights)


def solve(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    selection: Selection = "held-out",
    seed: int = 0,
) -> tuple[Tensor, float]:
    """Which test samples (n,) the probe tells right, and its l2: chosen as `linear_probe` does, or,
    in the reading of the papers, the one that is best on the test samples."""

    def right(l2: float) -> Tensor:
        return _predict(_fit(train_x, train_y, l2), test_x, train_x) == test_y

    if selection == "held-out":
        # Roughly is enough to choose.
        l2 = choose_l2(train_x, train_y, seed, L2S, tolerance=1e-3)
        return right(l2), l2
    tried = {l2: right(l2) for l2 in L2S}
    best = max(tried, key=lambda l2: int(tried[l2].sum()))
    return tried[best], best


def choose_l2(
    x: Tensor, y: Tensor, seed: int, l2s: Sequence[float], tolerance: float = TOLERANCE
) -> float:
    """The penalty whose classifier, fitted to 80 % of the samples, is best on the other 20 %.

    Of penalties that are equally good it is the largest: the simplest classifier of them.
    """
    held, rest = held_out(y, seed)

    def correct(l2: float) -> int:
        weights = _fit(x[rest], y[rest], l2, tolerance)
        return int((_predict(weights, x[held], x[rest]) == y[held]).sum())

    return max(sorted(l2s, reverse=True), key=correct)  # max takes the first of equals


def held_out(y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the samples to choose on, and of the rest, which has some of every class."""
    order = torch.randperm(len(y), generator=torch_generator("probe", seed)).to(y.device)
    held, rest = order.tensor_split([round(HELD_OUT * len(y))])
    lost = ~torch.isin(y[held], y[rest])  # of a class that is rare: all of it was held out
    return held[~lost], torch.cat([rest, held[lost]])


def _fit(x: Tensor, y: Tensor, l2: float, tolerance: float = TOLERANCE) -> Tensor:
    return fit_logistic(standardise(x, x), y, l2, intercept=True, tolerance=tolerance)


def _predict(weights: Tensor, x: Tensor, train_x: Tensor) -> Tensor:
    return (standardise(x, train_x) @ weights[:, :-1].T + weights[:, -1]).argmax(dim=1)
