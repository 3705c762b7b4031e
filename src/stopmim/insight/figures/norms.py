"""What sigma does to A and to the mask token: the paper finds that it shrinks the one, as a
regulariser would, and lets the other grow above the noise."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stopmim.base.errors import UserError
from stopmim.insight.figures import curves
from stopmim.insight.figures.pictures import BLOCKS, SERIES, house_style
from stopmim.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = (("norm_A", "norm of A"), ("norm_mask_token", "norm of the mask token"))


class Norms(NamedTuple):
    name: str
    sigma: float  # 0 for a run with certain positions
    curves: tuple[curves.Curve, curves.Curve]  # over the steps, in the order of LABELS


def norms(run: Run) -> Norms:
    """What `run` logged of the two."""
    metrics = run.metrics
    found = curves.curve(metrics, "norm_A"), curves.curve(metrics, "norm_mask_token")
    if not all(len(c.step) for c in found):
        raise UserError(f"{run.path}: metrics.jsonl has no norms of A and the mask token")
    return Norms(run.path.resolve().name, run.config.positions.sigma or 0.0, found)


@house_style()
def figure(runs: Sequence[Norms]) -> "Figure":
    """Last norms against sigma if the runs differ in it, and over the steps if they do not."""
    from matplotlib.figure import Figure

    runs = sorted(runs, key=lambda run: run.sigma)
    sigmas = [run.sigma for run in runs]
    picture = Figure(figsize=(6.4, 2.5), layout="constrained")
    both: Any = picture.subplots(1, 2)
    for k, (axes, (_, label)) in enumerate(zip(both, LABELS, strict=True)):
        if len(set(sigmas)) > 1:
            last = [float(run.curves[k].mean[-1]) for run in runs]
            axes.plot(sigmas, last, color=SERIES[0], marker="o", linewidth=1.6, clip_on=False)
            axes.set_xlabel("sigma, the variance of the noise")
        else:
            for colour, run in zip((*SERIES, *BLOCKS), runs, strict=False):
                c = run.curves[k]
                axes.plot(c.step, c.mean, color=colour, linewidth=1.6, label=run.name)
            axes.set_xlabel("step")
            if k == 0 and len(runs) > 1:
                axes.legend(frameon=False)
        axes.set_title(label, size=9)
        axes.grid(axis="y", linewidth=0.7)
        axes.tick_params(length=0)
        axes.spines[["top", "left", "right"]].set_visible(False)
    return picture
