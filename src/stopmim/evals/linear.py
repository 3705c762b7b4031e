"""Linear classifiers on frozen features: trained as in the papers, or solved to the optimum.

Both readings of the protocol are here. `held-out`, the default: a setting is chosen on a fifth of
the training set, the classifier is retrained on all of it, and tested once. `paper`: the best
number on the test set, as in the tables of I-JEPA and StoP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stopmim.base.random_keys import torch_generator
from stopmim.evals.features import Device
from stopmim.evals.heads import Head, Split, grid, train_heads
from stopmim.evals.lowshot import fit_each, standardise
from stopmim.evals.recipes import OWN, Recipe
from stopmim.evals.results import Reading, wilson_interval

HELD_OUT = 0.2  # of the training set
L2S = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-6  # of the objective; accuracies have three digits


def selection_split(y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the samples to choose on, and of the rest, which has every class."""
    order = torch.randperm(len(y), generator=torch_generator("probe", seed)).to(y.device)
    held, rest = order.tensor_split([round(HELD_OUT * len(y))])
    lost = ~torch.isin(y[held], y[rest])  # rare classes that would be held out entirely
    return held[~lost], torch.cat([rest, held[lost]])


def depths(layers: Sequence[int], features: Tensor, width: int) -> list[int]:
    """`layers`, limited to the existing blocks: an encoder of two blocks has no last four."""
    return list(dict.fromkeys(min(n, features.shape[1] // width) for n in layers))


@dataclass(frozen=True, eq=False)  # tensors have no plain ==
class ChosenHead:
    """The head that one reading chose, and how it did on the test set."""

    head: Head
    reading: Reading
    score: int  # correct answers on the images it was chosen by; compares heads of one reading
    correct: Tensor  # (n,) bool, after the last epoch
    epochs: Tensor  # (epochs,) correct test samples after each; held-out: the last only

    @property
    def best_epoch(self) -> int:
        """Epoch, from 0, that is best on test; papers do not say whether they quote it."""
        return int(self.epochs.argmax())


def probes(
    split: Split,
    recipe: Recipe = OWN,
    *,
    layers: Sequence[int] = (1, 4),
    readings: Sequence[Reading] = ("held-out",),
    plain: Tensor | None = None,
    seed: int = 0,
    device: Device = "cpu",
) -> list[ChosenHead]:
    """The best head for each of `layers`, once for each of `readings`.

    The published protocol trains on a fresh random view in every epoch, so on `recipe.epochs`
    views; a few, or one that is not random, cost less.

    `plain` are features (N, L * D) of the training images in the view of test images, to choose
    on; by default the first view.
    """
    deep = depths(layers, split.test, split.width)
    heads = grid(recipe, deep)
    common: dict[str, Any] = {"seed": seed, "device": device}
    chosen: dict[int, tuple[Head, int]] = {}
    if "held-out" in readings:
        held, rest = selection_split(split.y, seed)
        shown, y = split.train[0] if plain is None else plain, split.y
        part = Split([x[rest] for x in split.train], y[rest], shown[held], y[held], split.width)
        found = train_heads(heads, recipe, part, every_epoch=False, **common)
        chosen = {n: _best(heads, found.correct[-1], n) for n in deep}
    # Heads do not affect each other: train only those that are needed.
    if "paper" not in readings:
        heads = list(dict.fromkeys(head for head, _ in chosen.values()))
    found = train_heads(heads, recipe, split, every_epoch="paper" in readings, **common)
    results = []
    for reading in readings:
        for n in deep:
            # Chosen by the last epoch here, too; the best epoch of this head is kept beside it.
            best = chosen[n] if reading == "held-out" else _best(heads, found.correct[-1], n)
            i = heads.index(best[0])
            correct = found.predicted[i] == split.test_y.cpu()
            results.append(ChosenHead(best[0], reading, best[1], correct, found.correct[:, i]))
    return results


def _best(heads: list[Head], correct: Tensor, layers: int) -> tuple[Head, int]:
    """The head with this many layers and the most correct answers, and their number.

    If several tie, the first one.
    """
    own = [i for i, head in enumerate(heads) if head.layers == layers]
    best = max(own, key=lambda i: int(correct[i]))
    return heads[best], int(correct[best])


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """A solved classifier and its answers on the test set."""

    correct: Tensor  # (n,) bool
    l2: float
    weights: Tensor  # (classes, D + 1), intercept last, for standardised features
    score: int  # correct answers on the images that l2 was chosen by

    @property
    def accuracy(self) -> float:
        return int(self.correct.sum()) / len(self.correct)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy."""
        return wilson_interval(int(self.correct.sum()), len(self.correct))


def linear_probe(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    seed: int = 0,
    l2s: Sequence[float] = L2S,
    reading: Reading = "held-out",
    tolerance: float = TOLERANCE,
) -> ProbeResult:
    """Fits logistic regression with an intercept to all of train and tests it.

    Features are standardised by the training set. In the held-out reading, nothing that is chosen
    or fitted depends on the test set; in the paper's, l2 is the one that is best on it.

    Features are (N, D), labels (N,); a test label that train does not have counts as wrong.

    Args:
        seed: of the split of train on which l2 is chosen.
        l2s: penalties to choose from, relative to the mean loss; see `fit_logistic`.
        tolerance: of the fits that choose l2.
    """
    data = train_x, train_y, test_x, test_y
    if reading == "paper":
        return max(_solve(*data, l2s), key=lambda probe: probe.score)
    held, rest = selection_split(train_y, seed)
    parts = train_x[rest], train_y[rest], train_x[held], train_y[held]
    # If penalties tie, max takes the first, which is the largest: the simplest classifier.
    tried = _solve(*parts, sorted(l2s, reverse=True), tolerance)
    best = max(tried, key=lambda probe: probe.score)
    (probe,) = _solve(*data, [best.l2])
    return replace(probe, score=best.score)


def _solve(
    x: Tensor,
    y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    l2s: Sequence[float],
    tolerance: float = TOLERANCE,
) -> list[ProbeResult]:
    """The classifier of each of `l2s`, tested."""
    fitted = fit_each(standardise(x, x), y, l2s, intercept=True, tolerance=tolerance)
    test_x = standardise(test_x, x)
    answers = [(test_x @ w[:, :-1].T + w[:, -1]).argmax(dim=1) == test_y for w in fitted]
    found = zip(answers, l2s, fitted, strict=True)
    return [ProbeResult(correct, l2, w, int(correct.sum())) for correct, l2, w in found]
