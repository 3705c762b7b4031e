"""A 2-D map of features, where neighbours are alike to the encoder.

t-SNE (van der Maaten and Hinton, 2008), exact, as a page shows hundreds of points and not millions.
It starts from principal components, so that the same features give the same map.

Shapes: n images, D width.
"""

import numpy as np
from torch import Tensor

PERPLEXITY = 20.0  # about how many neighbours count
STEPS, GATHERING = 500, 120  # gradient steps; in the first ones attraction is exaggerated
EXAGGERATION = 6.0


def layout(features: Tensor) -> np.ndarray:
    """Places (n, 2) of `features` (n, D), from 0 to 1 along each axis."""
    x = features.double().numpy()
    x, n = x - x.mean(axis=0), len(x)
    wanted = _affinities(_distances(x), min(PERPLEXITY, max(1.0, (n - 1) / 3)))
    place = _components(x)
    speed, gain = np.zeros_like(place), np.ones_like(place)
    for step in range(STEPS):
        gathering = step < GATHERING
        close = 1 / (1 + _distances(place))  # (n, n): Student's t with one degree of freedom
        np.fill_diagonal(close, 0)
        force = (wanted * (EXAGGERATION if gathering else 1.0) - close / close.sum()) * close
        slope = 4 * (force.sum(axis=1, keepdims=True) * place - force @ place)
        # Longer steps in a direction that is kept, as in the authors' code.
        gain = np.where((slope > 0) != (speed > 0), gain + 0.2, np.maximum(0.8 * gain, 0.01))
        speed = (0.5 if gathering else 0.8) * speed - max(n / EXAGGERATION, 20.0) * gain * slope
        place = place + speed
    place = place - place.min(axis=0)
    return place / np.maximum(place.max(axis=0), 1e-12)


def _distances(x: np.ndarray) -> np.ndarray:
    """Squared distances (n, n)."""
    power = np.square(x).sum(axis=1)
    return np.maximum(power[:, None] + power - 2 * x @ x.T, 0)


def _affinities(distances: np.ndarray, perplexity: float) -> np.ndarray:
    """Joint probabilities (n, n): Gaussians whose widths give every row this perplexity."""
    n = len(distances)
    scaled = distances / max(float(distances.mean()), 1e-12)
    np.fill_diagonal(scaled, np.inf)  # no image is a neighbour of itself
    scaled -= scaled.min(axis=1, keepdims=True)
    low, high = np.full((n, 1), -20.0), np.full((n, 1), 20.0)  # logarithm of the precision
    for _ in range(40):
        middle = (low + high) / 2
        p = np.exp(-scaled * np.exp(middle))
        p /= p.sum(axis=1, keepdims=True)
        entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1, keepdims=True)
        too_wide = entropy > np.log(perplexity)
        low, high = np.where(too_wide, middle, low), np.where(too_wide, high, middle)
    return (p + p.T) / (2 * n)


def _components(x: np.ndarray) -> np.ndarray:
    """The first two principal components (n, 2), tiny, with a fixed choice of their signs."""
    left, values, _ = np.linalg.svd(x, full_matrices=False)
    place = np.zeros((len(x), 2))
    first = left[:, :2] * values[:2]
    place[:, : first.shape[1]] = first * np.where(np.power(first, 3).sum(axis=0) < 0, -1.0, 1.0)
    return 1e-4 * place / max(float(place[:, 0].std()), 1e-12)
