"""A linear classifier on frozen features, its one setting chosen on a part of the training set."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stopmim.evals import wilson_interval
from stopmim.evals.lowshot import fit_logistic, standardise
from stopmim.keys import torch_generator

HELD_OUT = 0.2  # of the training set
L2S = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-6  # of the objective; accuracies have three digits


@dataclass(frozen=True, eq=False)  # tensors have no plain ==
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


def choose_l2(x: Tensor, y: Tensor, seed: int, l2s: Sequence[float]) -> float:
    """The penalty whose classifier, fitted to 80 % of the samples, is best on the other 20 %.

    Of penalties that are equally good it is the largest: the simplest classifier of them.
    """
    order = torch.randperm(len(y), generator=torch_generator("probe", seed)).to(y.device)
    held, rest = order.tensor_split([round(HELD_OUT * len(y))])

    def correct(l2: float) -> int:
        weights = _fit(x[rest], y[rest], l2)
        return int((_predict(weights, x[held], x[rest]) == y[held]).sum())

    return max(sorted(l2s, reverse=True), key=correct)  # max takes the first of equals


def _fit(x: Tensor, y: Tensor, l2: float) -> Tensor:
    return fit_logistic(standardise(x, x), y, l2, intercept=True, tolerance=TOLERANCE)


def _predict(weights: Tensor, x: Tensor, train_x: Tensor) -> Tensor:
    return (standardise(x, train_x) @ weights[:, :-1].T + weights[:, -1]).argmax(dim=1)
