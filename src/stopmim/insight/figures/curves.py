"""Curves of the log of a run over its steps, of b points each, and small figures of them."""

from collections.abc import Sequence
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stopmim.base.errors import UserError
from stopmim.base.files import number
from stopmim.config.yaml_text import parse_yaml
from stopmim.health.log import Logged, measurements
from stopmim.insight.figures.pictures import COLOURS, SERIES, house_style, panels, style_plot
from stopmim.runs.run import Run

POINTS = 240  # per curve: more cannot be seen, and would make the page of a long run many MB
NORMS = {"norm_A": "norm of A", "norm_mask_token": "norm of the mask token"}
SMALLEST_SPAN = 4e-3  # of an axis, relative to its values; the EMA momentum of I-JEPA fills it


class Panel(NamedTuple):
    title: str
    series: dict[str, str]  # key in metrics.jsonl -> name in the legend
    about: str  # may name the loss of the run, as {loss}
    low: float | None = None  # lower values are shown as this


_FILE = Path(__file__).with_name("panels.yaml")
PANELS = [Panel(**panel) for panel in parse_yaml(_FILE.read_text("ascii"), str(_FILE))]


class Curve(NamedTuple):
    """A series in at most POINTS pieces: the mean step, and the range and mean of the values."""

    step: np.ndarray  # (b,)
    low: np.ndarray  # (b,) smallest value of the piece
    mean: np.ndarray  # (b,)
    high: np.ndarray  # (b,)


def curve(
    lines: Sequence[Logged], key: str, points: int = POINTS, low: float | None = None
) -> Curve:
    """The finite values of `key` in the lines of metrics.jsonl, thinned to at most `points`.

    The measurement of the untrained network is the value at step 0.
    """
    untrained, _ = measurements(lines)
    every = [{**(untrained or {}), "step": 0}, *lines]
    pairs = [(number(line.get("step")), number(line.get(key))) for line in every]
    known = np.array([(s, v) for s, v in pairs if s is not None and v is not None]).reshape(-1, 2)
    if low is not None:
        known[:, 1] = known[:, 1].clip(min=low)
    pieces = np.array_split(known, min(points, len(known)) or 1)
    reduced = [
        (steps.mean(), values.min(), values.mean(), values.max())
        for steps, values in (piece.T for piece in pieces if len(piece))
    ]
    return Curve(*np.array(reduced).reshape(-1, 4).T)


def _short(value: float) -> str:
    """A tick label: 0.25, and 3e-4 rather than 0.0003."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.4g}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


@house_style()
def figure(curves: Sequence[Curve]) -> Figure:
    """Draws up to two curves over the steps, with a band from minimum to maximum."""
    picture = Figure(figsize=(3.3, 1.7))
    axes = picture.add_axes((0.16, 0.23, 0.82, 0.73))  # fixed: figures of a page line up
    for colour, c in zip(SERIES, curves, strict=False):
        axes.fill_between(c.step, c.low, c.high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(c.step, c.mean, color=colour, linewidth=1.6, marker="." * (len(c.step) == 1))
    low, high = axes.get_ylim()
    # A nearly constant curve looks flat, and the four digits of its tick labels still differ.
    if (room := SMALLEST_SPAN * max(abs(low), abs(high)) - (high - low)) > 0:
        axes.set_ylim(low - room / 2, high + room / 2)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    style_plot(axes, x="step")
    axes.margins(x=0.02)
    return picture


@house_style()
def norms(runs: Sequence[Run]) -> Figure:
    """Draws the last norms over sigma if the runs differ in it, else the norms over the steps.

    In the paper, A shrinks and the mask token grows with sigma.
    """
    configs = [run.config for run in runs]
    sigmas = [config.positions.sigma or 0.0 for config in configs]  # 0: certain positions
    # A fixed covariance has its sigma after A, jitter has it in patches: neither fits this axis.
    elsewhere = [c.positions.kind == "jitter" or c.positions.covariance == "fixed" for c in configs]
    over_sigma = len(set(sigmas)) > 1 and not any(elsewhere)
    released = any(config.compat == "released" for config in configs)
    picture, grid = panels(1, 2, (6.4, 2.5))
    for axes, (key, label) in zip(grid[0], NORMS.items(), strict=True):
        if key == "norm_mask_token" and released:
            label += " (released: bias of A)"
        found = [curve(run.metrics, key) for run in runs]
        for run, c in zip(runs, found, strict=True):
            if not len(c.step):
                raise UserError(f"{run.path}: metrics.jsonl has no norms of A and the mask token")
        if over_sigma:
            last = sorted(zip(sigmas, (c.mean[-1] for c in found), strict=True), key=itemgetter(0))
            axes.plot(
                *zip(*last, strict=True), color=SERIES[0], marker="o", linewidth=1.6, clip_on=False
            )
            style_plot(axes, label, "sigma, the variance of the noise")
            continue
        for colour, run, c in zip(cycle(COLOURS), runs, found, strict=False):
            axes.plot(c.step, c.mean, color=colour, linewidth=1.6, label=run.path.resolve().name)
        style_plot(axes, label, "step")
        if key == "norm_A" and len(runs) > 1:
            axes.legend(frameon=False)
    return picture
