"""The label of the most similar training images: an evaluation with nothing to fit."""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**24  # similarities in memory at a time, 64 MB of them


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

    Nearness is cosine similarity, a vote weighs exp(similarity / temperature), and the defaults
    are those of DINO (eval_knn.py). All neighbours as near as the k-th one vote, so that the order
    of the training set does not matter; of labels with equal votes the lowest wins.

    Args:
        train_x: features (N, D), train_y: labels (N,); the same for the test samples.
        k: number of neighbours, at most N.

    Raises:
        ValueError: k is not between 1 and N, or a feature is not finite.
    """
    if not 1 <= k <= len(train_x):
        raise ValueError(f"k must be between 1 and the {len(train_x)} training samples, got {k}")
    if not (train_x.isfinite().all() and test_x.isfinite().all()):
        raise ValueError("features that are not finite have no neighbours")
    train, test = F.normalize(train_x.float(), dim=1), F.normalize(test_x.float(), dim=1)
    votes_of = F.one_hot(train_y.long()).float()  # (N, classes)
    correct = 0
    rows = max(1, CHUNK // len(train))
    for x, y in zip(test.split(rows), test_y.split(rows), strict=True):
        near = x @ train.T  # (B, N)
        last = near.topk(k, dim=1).values[:, -1:]  # (B, 1)
        # Less 1, the largest similarity there is: the ratios stay, and nothing overflows.
        weights = torch.where(near >= last, ((near - 1) / temperature).exp(), 0)
        correct += int(((weights @ votes_of).argmax(dim=1) == y).sum())
    return correct / len(test)
