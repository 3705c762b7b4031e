"""k-nearest-neighbour classification on frozen features: nothing is fitted."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.random_keys import torch_generator

CHUNK = 2**24  # similarities in memory at a time, 64 MB of them
KS = (5, 10, 20, 50, 100, 200)  # DINO's 10, 20, 100, 200, and two more for small sets
LEFT_OUT = 10_000  # training samples to choose k on, at most


def knn_accuracy(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Fraction (0 to 1) of the test samples whose k nearest training samples vote for their label.

    Features are (N, D), labels (N,). ValueError: k is not between 1 and N, a feature not finite.
    """
    found = knn_predict(train_x, train_y, test_x, (k,), temperature=temperature)[0]
    return int((found == test_y).sum()) / len(test_y)


def knn_predict(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    ks: Sequence[int],
    *,
    temperature: float = 0.07,
    itself: Tensor | None = None,
) -> Tensor:
    """Labels (len(ks), B) that the nearest training samples of each test sample vote for.

    Similarity is the cosine, votes are weighted by exp(similarity / temperature), and the defaults
    are DINO's (eval_knn.py). Neighbours that tie with the k-th one all vote, so that the order of
    the training set does not matter; among labels with equal votes the lowest wins. `itself` (B,)
    is, for each test sample, the index of a training sample that may not vote.
    """
    most = len(train_x) - (itself is not None)
    for k in ks:
        if not 1 <= k <= most:
            raise ValueError(f"k must be between 1 and the {most} training samples, got {k}")
    if not (train_x.isfinite().all() and test_x.isfinite().all()):
        raise ValueError("features that are not finite have no neighbours")
    train, test = F.normalize(train_x.float(), dim=1), F.normalize(test_x.float(), dim=1)
    train_y, classes = train_y.long(), int(train_y.max()) + 1
    found, rows = [], max(1, CHUNK // len(train))
    for start in range(0, len(test), rows):
        near = test[start : start + rows] @ train.T  # (B, N)
        if itself is not None:
            near.scatter_(1, itself[start : start + rows, None], -torch.inf)
        nearest = near.topk(max(ks), dim=1).values  # (B, most)
        row, col = (near >= nearest[:, -1:]).nonzero(as_tuple=True)
        close = near[row, col]
        # Minus 1, the largest cosine: ratios are unchanged and nothing overflows.
        weights = ((close - 1) / temperature).exp()
        predicted = []
        for k in ks:
            votes = near.new_zeros(len(near), classes)
            voting = torch.where(close >= nearest[row, k - 1], weights, 0)
            votes.index_put_((row, train_y[col]), voting, accumulate=True)
            predicted.append(votes.argmax(dim=1))
        found.append(torch.stack(predicted))
    return torch.cat(found, dim=1)


def choose_k(x: Tensor, y: Tensor, seed: int, ks: Sequence[int]) -> int:
    """The k that is best by leave-one-out on training samples; the largest if several tie."""
    order = torch.randperm(len(x), generator=torch_generator("knn", seed))[:LEFT_OUT].to(x.device)
    found = knn_predict(x, y, x[order], ks, itself=order)
    correct = (found == y[order]).sum(dim=1).tolist()
    return max(zip(correct, ks, strict=True))[1]
