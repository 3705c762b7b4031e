"""What the best predictor does when it is not told exactly where: it smooths over places.

The paper's second proposition on a line: Y depends on the place X, and only R = X + noise is known.
The best prediction E[Y | R = r] is a mean of E[Y | X = x] over the places x that r may stand for.
For places that are equally likely that is a convolution with a Gaussian.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stopmim.insight.figures.pictures import INK, SERIES, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH, PLACES = 10.0, 800


class Smoothing(NamedTuple):
    place: np.ndarray  # (x,)
    clean: np.ndarray  # (x,) E[Y | X = place]
    best: np.ndarray  # (v, x) E[Y | R = place] for every variance
    variances: tuple[float, ...]


def clean(x: np.ndarray) -> np.ndarray:
    """What is to be predicted at a place: details on the left, an edge on the right."""
    return np.where(x < LENGTH / 2, np.sin(3 * x), np.where(x < 0.75 * LENGTH, -1.0, 1.0))


def smoothing(variances: tuple[float, ...] = (0.05, 0.25, 1.0)) -> Smoothing:
    place = np.linspace(0.0, LENGTH, PLACES)
    best = np.stack([posterior_mean(place, place, clean(place), v) for v in variances])
    return Smoothing(place, clean(place), best, variances)


def posterior_mean(r: np.ndarray, x: np.ndarray, y: np.ndarray, variance: float) -> np.ndarray:
    """E[Y | R = r] by Bayes' rule, for places `x` that are equally likely."""
    joint = np.exp(-np.square(r[:, None] - x) / (2 * variance))  # (r, x)
    return joint @ y / joint.sum(axis=1)


@house_style()
def figure(found: Smoothing) -> "Figure":
    """The function to predict, and its best prediction under ever more noise."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = picture.subplots()
    axes.plot(found.place, found.clean, color=INK, linewidth=1.0, label="exact place")
    for (colour, dash), variance, best in zip(
        ((SERIES[0], "-"), (SERIES[1], "-"), ("#009e73", "--")),
        found.variances,
        found.best,
        strict=False,
    ):
        label = f"noise of std {math.sqrt(variance):.2g}"
        axes.plot(found.place, best, color=colour, linewidth=1.8, linestyle=dash, label=label)
    axes.set_xlabel("place")
    axes.set_ylabel("best prediction")
    picture.legend(frameon=False, ncols=4, loc="outside upper center")
    axes.grid(axis="y", linewidth=0.7)
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.margins(x=0)
    return picture
