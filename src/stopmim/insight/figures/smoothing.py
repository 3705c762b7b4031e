"""The best predictor under uncertain positions smooths over them.

The paper's second proposition in one dimension: Y depends on the position X, and only R = X + noise
is known. The best prediction E[Y | R = r] is the mean of E[Y | X = x] over all x that r may stand
for: a convolution with a Gaussian, if all positions are equally likely.
"""

import math
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from stopmim.insight.figures.pictures import INK, SERIES, house_style, panels, style_plot

LENGTH, PLACES = 10.0, 800


class Smoothing(NamedTuple):
    place: np.ndarray  # (x,)
    clean: np.ndarray  # (x,) E[Y | X = place]
    best: np.ndarray  # (v, x) E[Y | R = place] for every variance
    variances: tuple[float, ...]


def clean(x: np.ndarray) -> np.ndarray:
    """The function to predict: fine detail on the left, an edge on the right."""
    return np.where(x < LENGTH / 2, np.sin(3 * x), np.where(x < 0.75 * LENGTH, -1.0, 1.0))


def smoothing(variances: tuple[float, ...] = (0.05, 0.25, 1.0)) -> Smoothing:
    place = np.linspace(0.0, LENGTH, PLACES)
    best = np.stack([posterior_mean(place, place, clean(place), v) for v in variances])
    return Smoothing(place, clean(place), best, variances)


def posterior_mean(r: np.ndarray, x: np.ndarray, y: np.ndarray, variance: float) -> np.ndarray:
    """E[Y | R = r] by Bayes' rule, for equally likely positions `x`."""
    joint = np.exp(-np.square(r[:, None] - x) / (2 * variance))  # (r, x)
    return joint @ y / joint.sum(axis=1)


@house_style()
def figure(found: Smoothing) -> Figure:
    """The function to predict, and its best predictions under more and more noise."""
    picture, ((axes,),) = panels(1, 1, (6.4, 2.6))
    axes.plot(found.place, found.clean, color=INK, linewidth=1.0, label="exact position")
    for (colour, dash), variance, best in zip(
        ((SERIES[0], "-"), (SERIES[1], "-"), ("#009e73", "--")),
        found.variances,
        found.best,
        strict=False,
    ):
        label = f"noise of std {math.sqrt(variance):.2g}"
        axes.plot(found.place, best, color=colour, linewidth=1.8, linestyle=dash, label=label)
    style_plot(axes, x="position")
    axes.set_ylabel("best prediction")
    axes.margins(x=0)
    picture.legend(frameon=False, ncols=4, loc="outside upper center")
    return picture
