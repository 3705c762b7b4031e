"""Differences between encoders that answered for the same test images, with their intervals.

Shapes: n test images, K untrained networks.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stopmim.base.random_keys import numpy_generator
from stopmim.evals.results import Z99, t_quantile
from stopmim.runs.verdict import LEVEL

RESAMPLES = 10_000


def beside_random_init(correct: Tensor, untrained: Sequence[Tensor]) -> tuple[float, float]:
    """99 % interval of the gain in accuracy over random init, over test images and random inits.

    `correct` (n,) says which images the encoder got right, `untrained` the same for K networks that
    differ only in their random weights. Two of these can differ by several points, far more than
    the number of images explains: compared with only one, untrained encoders often look trained.
    """
    others = torch.stack([answers.float() for answers in untrained])  # (K, n)
    k, n = others.shape
    gain = correct.float() - others.mean(dim=0)  # (n,)
    over_images = Z99 * float(gain.std(correction=0)) / math.sqrt(n)
    over_inits = 0.0
    if k > 1:
        # Accuracies of untrained networks vary by their weights, and by the choice of images.
        by_images = float(others.var(dim=0).mean()) / n
        by_weights = max(0.0, float(others.mean(dim=1).var()) - by_images)
        # The encoder is one more draw, the K have a mean: hence 1 + 1 / K.
        over_inits = t_quantile(k - 1, 99) * math.sqrt(by_weights * (1 + 1 / k))
    half, mean = math.hypot(over_images, over_inits), float(gain.mean())
    return mean - half, mean + half


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value; of images that only one gets right, half should be A's."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    logs = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def bootstrap(only_a: int, only_b: int, n: int, seed: int) -> tuple[float, float]:
    """99 % bootstrap interval of the difference in accuracy, over pairs of answers."""
    # Only the number of pairs of each kind matters, and it is multinomial.
    share = [only_a / n, only_b / n, (n - only_a - only_b) / n]
    drawn = numpy_generator("compare", seed).multinomial(n, share, size=RESAMPLES)
    tail = (1 - LEVEL / 100) / 2
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / n, (tail, 1 - tail))
    return float(low), float(high)
