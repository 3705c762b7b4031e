"""Norms of A and of the mask token: with sigma the paper sees A shrink and the token grow."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from stopmim.base.errors import UserError
from stopmim.insight.figures import curves
from stopmim.insight.figures.pictures import BLOCKS, SERIES, house_style, panels, style_plot
from stopmim.runs.run import Run

LABELS = (("norm_A", "norm of A"), ("norm_mask_token", "norm of the mask token"))


class Norms(NamedTuple):
    name: str
    sigma: float  # 0 for a run with certain positions
    curves: tuple[curves.Curve, curves.Curve]  # over the steps, in the order of LABELS


def norms(run: Run) -> Norms:
    """The norms that `run` logged."""
    metrics = run.metrics
    found = curves.curve(metrics, "norm_A"), curves.curve(metrics, "norm_mask_token")
    if not all(len(c.step) for c in found):
        raise UserError(f"{run.path}: metrics.jsonl has no norms of A and the mask token")
    return Norms(run.path.resolve().name, run.config.positions.sigma or 0.0, found)


@house_style()
def figure(runs: Sequence[Norms]) -> Figure:
    """The last norms over sigma if the runs differ in it, else the norms over the steps."""
    runs = sorted(runs, key=lambda run: run.sigma)
    sigmas = [run.sigma for run in runs]
    picture, grid = panels(1, 2, (6.4, 2.5))
    for k, (axes, (_, label)) in enumerate(zip(grid[0], LABELS, strict=True)):
        if len(set(sigmas)) > 1:
            last = [float(run.curves[k].mean[-1]) for run in runs]
            axes.plot(sigmas, last, color=SERIES[0], marker="o", linewidth=1.6, clip_on=False)
            style_plot(axes, label, "sigma, the variance of the noise")
        else:
            for colour, run in zip((*SERIES, *BLOCKS), runs, strict=False):
                c = run.curves[k]
                axes.plot(c.step, c.mean, color=colour, linewidth=1.6, label=run.name)
            style_plot(axes, label, "step")
            if k == 0 and len(runs) > 1:
                axes.legend(frameon=False)
    return picture
