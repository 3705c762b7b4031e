"""A quantity over a knob, several lines to compare: the paper's figures of sigma, and the like."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stopmim.insight.figures.pictures import BLOCKS, INK, SERIES, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 2  # panels side by side


class Point(NamedTuple):
    x: float
    values: Sequence[float]  # one per seed


class Panel(NamedTuple):
    title: str
    lines: Mapping[str, Sequence[Point]]
    level: float | None = None  # to be seen behind the lines: of the untrained network


def along(points: Sequence[tuple[str, Point]]) -> dict[str, list[Point]]:
    """Points by the line that they are of; one of no line is of all of them."""
    known = [(line, point) for line, point in points if point.values]
    names = dict.fromkeys(line for line, _ in known if line)
    return {name: [point for line, point in known if line in ("", name)] for name in names}


@house_style()
def figure(panels: Sequence[Panel], axis: str) -> "Figure":
    """Every line through the means over seeds, every seed a dot."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / COLUMNS)
    picture = Figure(figsize=(6.6, 2.4 * rows), layout="constrained")
    grid: Any = picture.subplots(rows, COLUMNS, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for i, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        for colour, (name, points) in zip((*SERIES, *BLOCKS), panel.lines.items(), strict=False):
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
        axes.set_title(panel.title, size=9)
        axes.set_xlabel(axis)
        axes.grid(axis="y", linewidth=0.7)
        axes.tick_params(length=0)
        axes.spines[["top", "left", "right"]].set_visible(False)
        if i == 0 and (len(panel.lines) > 1 or panel.level is not None):
            axes.legend(frameon=False)
    return picture
