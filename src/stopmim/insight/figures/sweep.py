"""Figures of a quantity over a hyperparameter, one line per method: the paper's over sigma."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stopmim.insight.figures.pictures import COLOURS, INK, house_style, panels, style_plot

COLUMNS = 2  # panels side by side


class Point(NamedTuple):
    x: float
    values: Sequence[float]  # one per seed


class Panel(NamedTuple):
    title: str
    axis: str  # meaning of x
    lines: Mapping[str, Sequence[Point]]
    level: float | None = None  # of the untrained network, drawn behind the lines


def along(points: Sequence[tuple[str, Point]]) -> dict[str, list[Point]]:
    """Groups points by line; a point without a line belongs to all of them."""
    known = [(line, point) for line, point in points if point.values]
    names = dict.fromkeys(line for line, _ in known if line)
    return {name: [point for line, point in known if line in ("", name)] for name in names}


@house_style()
def figure(shown: Sequence[Panel]) -> Figure:
    """Draws lines through the means over seeds, and a dot for every seed.

    Panels with the same title show one quantity over different axes, and share the vertical axis.
    """
    rows = math.ceil(len(shown) / COLUMNS)
    picture, grid = panels(rows, COLUMNS, (6.6, 2.4 * rows))
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    colours = dict(
        zip(dict.fromkeys(n for p in shown for n in p.lines), cycle(COLOURS), strict=False)
    )
    first, named = dict[str, Axes](), set[str]()
    for axes, panel in zip(grid.flat, shown, strict=False):
        if panel.title in first:
            axes.sharey(first[panel.title])
        first.setdefault(panel.title, axes)
        for name, points in panel.lines.items():
            colour = colours[name]
            points = sorted(points, key=lambda point: point.x)
            x = [point.x for point in points]
            mean = [math.fsum(p.values) / len(p.values) for p in points]
            axes.plot(x, mean, color=colour, marker="o", markersize=4, linewidth=1.6, label=name)
            dots = [(point.x, value) for point in points for value in point.values]
            axes.plot(*zip(*dots, strict=True), ".", color=colour, alpha=0.4, markersize=4)
        if panel.level is not None:
            axes.axhline(panel.level, color=INK, linewidth=0.9, linestyle=":", label="random init")
        every = [point.x for points in panel.lines.values() for point in points]
        if every and min(every) > 0:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        style_plot(axes, panel.title, panel.axis)
        if not named >= panel.lines.keys() and (len(colours) > 1 or panel.level is not None):
            axes.legend(frameon=False)
            named |= panel.lines.keys()
    return picture
