"""The study of stability, for results.py: which runs of a grid collapsed, with and without noise.

Its runs differ in the learning rate, the EMA at the start, the position and the seed. Those that
differ in the position alone are a pair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stopmim.ablations.trial import Outcome
from stopmim.evals.paired import mcnemar
from stopmim.evals.results import Estimate, over_seeds, wilson_interval
from stopmim.health.rules import COLLAPSES, EXIT_CODES
from stopmim.insight.figures.pictures import INK, colour_bar, house_style, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "stability"
BASELINE = "sine-cosine"
FILLED = {"collapse": "full", "partial collapse": "left"}
MARKERS = {"not collapsed": "s", "shortcut": "^", "over-training": "v"}
Records = Sequence[dict[str, Any]]


class One(NamedTuple):
    """A run of the grid."""

    position: str
    lr: float
    ema: float  # at the start
    seed: int
    verdict: str
    kept: float  # RankMe after training, relative to the untrained network
    knn: float  # percent
    untrained: float  # its k-NN before training

    @property
    def place(self) -> tuple[float, float, int]:
        """Equal for the runs of a pair."""
        return self.lr, self.ema, self.seed

    @property
    def collapsed(self) -> bool:
        return self.verdict in COLLAPSES


def grid(records: Records, outcomes: Sequence[Outcome]) -> list[One]:
    """The finished runs, in the order of the records."""
    found = []
    for record, run in zip(records, outcomes, strict=True):
        positions, optim = record["config"]["positions"], record["config"]["optim"]
        noise = positions["kind"] == "stochastic"
        (knn,) = (a for a in run.answers if (a["protocol"], a["name"]) == ("knn", "accuracy"))
        assert run.rank is not None
        found.append(
            One(
                f"StoP-{positions['sigma']:g}" if noise else BASELINE,
                optim["lr"],
                optim["ema"][0],
                run.seed,
                run.verdict,
                run.rank / record["random_init"]["target_rank"],
                knn["value"],
                knn["random_init"],
            )
        )
    return found


@dataclass(frozen=True)
class Pairs:
    """Runs with noise beside those without, at the same places."""

    pairs: Sequence[tuple[One, One]]  # without noise, with noise

    def count(self, before: bool, after: bool) -> int:
        """Pairs in which the run without noise has collapsed or not, and so has that with noise."""
        return sum((a.collapsed, b.collapsed) == (before, after) for a, b in self.pairs)

    @property
    def p(self) -> float:
        """Exact, two-sided: whether the pairs in which one run collapsed are evenly split."""
        return mcnemar(self.count(True, False), self.count(False, True))

    @property
    def difference(self) -> tuple[float, float, float]:
        """Rate of collapse with noise less that without, and its 95 % interval.

        Newcombe's for pairs (1998, method 10), which also holds where no pair is split.
        """
        both, first = self.count(True, True), self.count(True, False)
        second, neither = self.count(False, True), self.count(False, False)
        n = len(self.pairs)
        one, two = both + second, both + first  # with noise, without
        product: float = both * neither - first * second
        product = max(0, product - n / 2) if product > 0 else product
        spread = math.sqrt(one * (n - one) * two * (n - two))
        phi = product / spread if spread else 0.0
        (low1, high1), (low2, high2) = wilson_interval(one, n), wilson_interval(two, n)

        def half(a: float, b: float) -> float:
            return math.sqrt(a * a - 2 * phi * a * b + b * b)

        gain, p1, p2 = (one - two) / n, one / n, two / n
        return gain, gain - half(p1 - low1, high2 - p2), gain + half(high1 - p1, p2 - low2)

    @property
    def rank(self) -> Estimate:
        """Logarithm of the factor between the ranks."""
        return over_seeds([math.log(b.kept / a.kept) for a, b in self.pairs])

    @property
    def knn(self) -> Estimate:
        return over_seeds([b.knn - a.knn for a, b in self.pairs])


def paired(runs: Sequence[One]) -> dict[str, Pairs]:
    """For every position with noise, its pairs with the baseline."""
    base = {run.place: run for run in runs if run.position == BASELINE}
    return {
        name: Pairs([(base[r.place], r) for r in own if r.place in base])
        for name, own in _by(runs, "position").items()
        if name != BASELINE
    }


def _by(runs: Sequence[One], field: str) -> dict[str, list[One]]:
    found: dict[str, list[One]] = {}
    for run in runs:
        found.setdefault(getattr(run, field), []).append(run)
    return found


# ------------------------------------------------------------------------------ tables


def rates(runs: Sequence[One]) -> list[dict[str, str]]:
    """A line per position."""
    return [
        {
            "positions": name,
            "runs": str(len(own)),
            "collapsed": str(sum(run.collapsed for run in own)),
            "of these in full": str(sum(run.verdict == "collapse" for run in own)),
            "RankMe kept": _percent(_mean(own, "kept")),
            "k-NN": f"{_mean(own, 'knn'):.1f}",
        }
        for name, own in _by(runs, "position").items()
    ]


def differences(runs: Sequence[One]) -> list[dict[str, str]]:
    """A line per position with noise, against the baseline."""
    rows = []
    for name, both in paired(runs).items():
        gain, low, high = (100 * x for x in both.difference)
        rank, half = both.rank.mean, both.rank.half or 0.0
        low_rank, mean, high_rank = (math.exp(x) for x in (rank - half, rank, rank + half))
        cells = {"positions": name, "pairs": str(len(both.pairs))}
        cells |= {
            f"only {BASELINE} collapsed": str(both.count(True, False)),
            "only StoP collapsed": str(both.count(False, True)),
            "collapse rate, points": f"{gain:+.0f} ({low:+.0f} to {high:+.0f})",
            "exact p": f"{both.p:.2f}",
            "RankMe, factor": f"{mean:.2f} ({low_rank:.2f} to {high_rank:.2f})",
            "k-NN, points": f"{both.knn.mean:+.1f} \u00b1 {both.knn.half or 0:.1f}",
        }
        rows.append(cells)
    return rows


def verdicts(runs: Sequence[One]) -> list[dict[str, str]]:
    """A line per verdict, from the best to the worst: what rank and k-NN say of the doctor."""
    found = _by(runs, "verdict")
    return [
        {
            "verdict": name,
            "runs": str(len(found[name])),
            "RankMe kept": f"{_percent(min(kept))} to {_percent(max(kept))}",
            "k-NN": f"{_mean(found[name], 'knn'):.1f}",
            "lowest": f"{min(knn):.1f}",
            "highest": f"{max(knn):.1f}",
            "above random init": str(sum(run.knn > run.untrained for run in found[name])),
        }
        for name in EXIT_CODES
        if name in found
        for kept, knn in [([r.kept for r in found[name]], [r.knn for r in found[name]])]
    ]


def numbers(runs: Sequence[One]) -> dict[str, str]:
    """What a sentence may quote, as the tables have it: ``POSITION.collapsed``."""
    found = {"random init.k-NN": f"{_mean(runs, 'untrained'):.1f}"}
    for rows in (rates(runs), differences(runs)):
        for row in rows:
            own = {key: value for key, value in row.items() if key != "positions"}
            found |= {f"{row['positions']}.{key}": value for key, value in own.items()}
    for row in verdicts(runs):
        found |= {f"{row['verdict']}.{key}": value for key, value in row.items()}
    return found


def _mean(runs: Sequence[One], field: str) -> float:
    return math.fsum(getattr(run, field) for run in runs) / len(runs)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ------------------------------------------------------------------------------ the figure


@house_style()
def figure(runs: Sequence[One]) -> "Figure":
    """A panel per position, learning rate by EMA: colour is the rank kept, a dot a run."""
    import numpy as np
    from matplotlib.lines import Line2D

    rates, emas = sorted({run.lr for run in runs}), sorted({run.ema for run in runs})
    own = _by(runs, "position")
    picture, axes = panels(1, len(own), (6.6, 2.5))
    for i, (panel, (name, cells)) in enumerate(zip(axes[0], own.items(), strict=True)):
        kept = np.full((len(emas), len(rates)), np.nan)
        for y, ema in enumerate(emas):
            for x, lr in enumerate(rates):
                here = [run for run in cells if (run.lr, run.ema) == (lr, ema)]
                if here:
                    kept[y, x] = _mean(here, "kept")
                    panel.text(x, y - 0.17, _percent(kept[y, x]), ha="center", va="center", size=7)
                for k, run in enumerate(sorted(here, key=lambda run: run.seed)):
                    at = x + 0.26 * (k - (len(here) - 1) / 2), y + 0.2
                    panel.plot(*at, **_dot(run.verdict))
        across, along = range(len(rates)), range(len(emas))
        look = {"cmap": "RdYlBu", "vmin": -0.25, "vmax": 1.25}  # text is read on any cell
        image = panel.pcolormesh(across, along, kept, shading="nearest", **look)
        panel.set_title(name, size=9)
        panel.set_xlabel("learning rate")
        panel.set_xticks(across, [f"{lr:.0e}".replace("e-0", "e-") for lr in rates])
        panel.set_yticks(along, [f"{ema:g}" for ema in emas] if i == 0 else [])
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    axes[0, 0].set_ylabel("EMA at the start")
    bar = colour_bar(picture, image, axes, ticks=[0, 0.5, 1])
    bar.set_label("share of RankMe kept")
    bar.ax.set_ylim(0, 1)
    shown = [name for name in EXIT_CODES if any(run.verdict == name for run in runs)]
    handles = [Line2D([], [], linestyle="", label=name, **_dot(name)) for name in shown]
    picture.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return picture


def _dot(verdict: str) -> dict[str, Any]:
    """The more of a run has collapsed, the more of its dot is filled."""
    look = {"color": INK, "markerfacecoloralt": "white", "markersize": 5, "markeredgewidth": 0.8}
    look |= {"marker": MARKERS.get(verdict, "o"), "fillstyle": FILLED.get(verdict, "none")}
    return look
