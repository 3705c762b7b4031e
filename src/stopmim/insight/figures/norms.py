"""Norms of A and of the mask token: with sigma the paper sees A shrink and the token grow."""

from collections.abc import Sequence
from operator import itemgetter

from matplotlib.figure import Figure

from stopmim.base.errors import UserError
from stopmim.insight.figures import curves
from stopmim.insight.figures.pictures import COLOURS, SERIES, house_style, panels, style_plot
from stopmim.runs.run import Run

LABELS = {"norm_A": "norm of A", "norm_mask_token": "norm of the mask token"}


@house_style()
def figure(runs: Sequence[Run]) -> Figure:
    """The last norms over sigma if the runs differ in it, else the norms over the steps."""
    sigmas = [run.config.positions.sigma or 0.0 for run in runs]  # 0: certain positions
    picture, grid = panels(1, 2, (6.4, 2.5))
    for axes, (key, label) in zip(grid[0], LABELS.items(), strict=True):
        found = [curves.curve(run.metrics, key) for run in runs]
        for run, c in zip(runs, found, strict=True):
            if not len(c.step):
                raise UserError(f"{run.path}: metrics.jsonl has no norms of A and the mask token")
        if len(set(sigmas)) > 1:
            last = sorted(zip(sigmas, (c.mean[-1] for c in found), strict=True), key=itemgetter(0))
            axes.plot(
                *zip(*last, strict=True), color=SERIES[0], marker="o", linewidth=1.6, clip_on=False
            )
            style_plot(axes, label, "sigma, the variance of the noise")
            continue
        for colour, run, c in zip(COLOURS, runs, found, strict=False):
            axes.plot(c.step, c.mean, color=colour, linewidth=1.6, label=run.path.resolve().name)
        style_plot(axes, label, "step")
        if key == "norm_A" and len(runs) > 1:
            axes.legend(frameon=False)
    return picture
