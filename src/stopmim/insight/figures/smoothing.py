"""The best predictor under uncertain positions smooths over them.

The paper's second proposition in one dimension: Y depends on the position X, and only R = X + noise
is known. The best prediction E[Y | R = r] is the mean of E[Y | X = x] over all x that r may stand
for: a convolution with a Gaussian, if all positions are equally likely.
"""

import math

import numpy as np
from matplotlib.figure import Figure

from stopmim.insight.figures.pictures import INK, SERIES, house_style, panels, style_plot

LENGTH = 10.0
PLACES = np.linspace(0.0, LENGTH, 800)
# E[Y | X = place], the function to predict: fine detail on the left, an edge on the right.
CLEAN = np.where(
    PLACES < LENGTH / 2, np.sin(3 * PLACES), np.where(PLACES < 0.75 * LENGTH, -1.0, 1.0)
)
VARIANCES = {0.05: (SERIES[0], "-"), 0.25: (SERIES[1], "-"), 1.0: ("#009e73", "--")}


def posterior_mean(r: np.ndarray, x: np.ndarray, y: np.ndarray, variance: float) -> np.ndarray:
    """E[Y | R = r] by Bayes' rule, for equally likely positions `x`."""
    joint = np.exp(-np.square(r[:, None] - x) / (2 * variance))  # (r, x)
    return joint @ y / joint.sum(axis=1)


@house_style()
def figure() -> Figure:
    """The function to predict, and its best predictions under more and more noise."""
    picture, ((axes,),) = panels(1, 1, (6.4, 2.6))
    axes.plot(PLACES, CLEAN, color=INK, linewidth=1.0, label="exact position")
    for variance, (colour, dash) in VARIANCES.items():
        best = posterior_mean(PLACES, PLACES, CLEAN, variance)
        label = f"noise of std {math.sqrt(variance):.2g}"
        axes.plot(PLACES, best, color=colour, linewidth=1.8, linestyle=dash, label=label)
    style_plot(axes, x="position")
    axes.set_ylabel("best prediction")
    axes.margins(x=0)
    picture.legend(frameon=False, ncols=4, loc="outside upper center")
    return picture
