"""Nearest neighbours among the user's images: which ones an encoder finds alike, before and after
training.

Shapes: n images, S pixels along an edge, D width, k neighbours of each.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from stopmim.base.errors import DataError
from stopmim.config.schema import resolve
from stopmim.data.channels import fitting
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images
from stopmim.data.pixels import PixelStats, stats_of
from stopmim.data.subset import Subset
from stopmim.data.transform import seeing
from stopmim.evals.features import extract
from stopmim.evals.views import View, middle
from stopmim.gpu.devices import choose_device
from stopmim.insight.figures.false_colour import FalseColour
from stopmim.insight.figures.pictures import house_style
from stopmim.insight.figures.subject import images_of, refuse_unlike
from stopmim.method.build import build
from stopmim.method.encoder import VisionTransformer
from stopmim.runs.run import Run

SHOWN, FEWEST = 300, 24  # images that are compared with each other
WORK = 1.5e12  # multiplications on a CPU: a minute on two busy cores
NEAREST = 6
QUERIES = 8  # images whose neighbours are shown
KINDS = 12  # classes that colours can tell apart
SAME = "#009e73"  # frame of a neighbour of the same class


class Embedded(NamedTuple):
    """Images as one encoder sees them."""

    name: str
    features: Tensor  # (n, D), of length 1
    nearest: np.ndarray  # (n, k) numbers of images, nearest first


class Neighbours(NamedTuple):
    """Some images of a source, in every encoder that is compared."""

    images: Subset
    pictures: np.ndarray  # (n, S, S, 3) uint8
    caption: str  # which channels they show; "" for ordinary pictures
    total: int  # images of the source
    encoders: list[Embedded]  # the untrained one first


def find(runs: Sequence[Run], images: Images | None = None, show: Sequence[str] = ()) -> Neighbours:
    """Neighbours in the untrained encoder of the first run, and in the newest one of every run.

    By default among the images that the first run was trained on. Unreadable images are left out.
    `show` are the channels for pictures, see false_colour.py.
    """
    refuse_unlike(runs)
    config = resolve(runs[0].config)
    stats = stats_of(config)
    names = ["after training"] if len(runs) == 1 else [run.path.resolve().name for run in runs]
    networks = [build(config).eval().branch(), *(run.model().branch() for run in runs)]
    seeing(networks[0], stats)
    source = images_of(runs[0]) if images is None else images
    device, view, count = choose_device("auto"), middle(networks[0], source), SHOWN
    if device.type == "cpu":
        count = min(SHOWN, max(FEWEST, int(WORK / _work(networks))))
    chosen, views = _sample(source, view, stats, count)
    found, colours = [], FalseColour.of(stats, show)
    for name, network in zip(["before training", *names], networks, strict=True):
        shown, own = views, network.side * network.patch
        if own != view.size:
            shown = F.interpolate(views, own, mode="bilinear", antialias=True)
        features = extract(
            network.to(device),
            chosen,
            size=shown.to(device).split(32),
            pool=network.pool,
            device=device,
        )
        found.append(embedded(name, features))
    pictures = colours(views.permute(0, 2, 3, 1).numpy())
    return Neighbours(chosen, pictures, colours.caption, len(source), found)


def _work(networks: Sequence[VisionTransformer]) -> float:
    """Multiplications per image: every weight of a block meets every patch once."""
    return sum(n.side**2 * sum(p.numel() for p in n.blocks.parameters()) for n in networks)


def _sample(images: Images, view: View, stats: PixelStats, count: int) -> tuple[Subset, Tensor]:
    """At most `count` evenly spaced images, so that every class is present, and their views."""
    found = {}
    for i in np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).round()):
        with suppress(BadImageError):
            found[int(i)] = view(fitting(images.read(int(i)), stats))
    if len(found) < 2:
        raise DataError(f"neighbours need two images that can be read, found {len(found)}")
    return Subset(images, list(found)), torch.stack(list(found.values()))


def embedded(name: str, features: Tensor) -> Embedded:
    """Normed `features` (n, D) with their neighbours by cosine, as k-NN evaluations measure it."""
    unit = F.normalize(features.double(), dim=1)
    near = (unit @ unit.T).fill_diagonal_(-torch.inf)
    nearest = near.argsort(dim=1, descending=True, stable=True)[:, : min(NEAREST, len(near) - 1)]
    return Embedded(name, unit, nearest.numpy())


def kept(before: Embedded, after: Embedded) -> float:
    """Share of the neighbours that two encoders have in common."""
    pairs = zip(before.nearest.tolist(), after.nearest.tolist(), strict=True)
    return float(np.mean([len({*a} & {*b}) / len(a) for a, b in pairs]))


def queries(n: int) -> np.ndarray:
    """Images whose neighbours are shown, evenly spaced among `n`."""
    return np.unique(((np.arange(QUERIES) + 0.5) * n / QUERIES).astype(int))


# ------------------------------------------------------------------------------ with labels


class Kinds(NamedTuple):
    """A label whose values colours can tell apart; the rarest of many share the last one."""

    label: str
    values: np.ndarray  # (n,) below 0: unknown
    names: list[str]  # of the colours
    of: np.ndarray  # (n,) index into names; -1: unknown

    @property
    def unknown(self) -> int:
        """Number of images without this label: they are neither framed nor counted."""
        return int((self.of < 0).sum())


def kinds(images: Subset) -> list[Kinds]:
    """The labels of `images` that divide them into classes; "class" comes first."""
    found = []
    for label in sorted(images.labels, key=lambda name: name != "class"):
        values = images.labels[label]
        known, counts = np.unique(values[values >= 0], return_counts=True)
        # Other numbers than a class may describe the file, such as its width.
        if len(known) < 2 or (len(known) > KINDS and label != "class"):
            continue
        often = known if len(known) <= KINDS else known[(-counts).argsort(kind="stable")]
        order = {int(value): min(i, KINDS - 1) for i, value in enumerate(often)}
        words: list[str] = getattr(images, "classes", []) if label == "class" else []
        names = [words[v] if v < len(words) else f"class {v}" for v in order][:KINDS]
        if len(known) > KINDS:
            names[-1] = f"{len(known) - KINDS + 1} others"
        of = np.array([order.get(int(value), -1) for value in values])
        found.append(Kinds(label, values, names, of))
    return found


def agreement(values: np.ndarray, nearest: np.ndarray) -> float:
    """Share of the neighbours (n, k) with the value of their image, where both are known."""
    near, own = values[nearest], values[:, None]
    known = (near >= 0) & (own >= 0)
    return float(((near == own) & known).sum() / max(1, known.sum()))


def by_chance(values: np.ndarray) -> float:
    """The agreement of neighbours drawn at random."""
    _, counts = np.unique(values[values >= 0], return_counts=True)
    pairs = max(1, counts.sum() * (counts.sum() - 1))
    return float((counts * (counts - 1)).sum() / pairs)


# ------------------------------------------------------------------------------ the figure


@house_style()
def figure(found: Neighbours) -> Figure:
    """Draws one row per image: the image, then its neighbours in every encoder, nearest first."""
    rows, k = queries(len(found.images)), found.encoders[0].nearest.shape[1]
    wide = 1 + len(found.encoders) * (k + 0.4)  # in pictures
    high = len(rows) + 0.7 + 0.25 * bool(found.caption)
    picture = Figure(figsize=(0.62 * wide, 0.62 * high))
    axes = picture.add_axes((0, 0, 1, 1))
    shown, label = found.pictures, next(iter(kinds(found.images)), None)
    axes.text(0.03, -0.1, "image")
    for y, query in enumerate(rows):
        _draw(axes, shown[query], 0, y)
    for e, encoder in enumerate(found.encoders):
        start, title = 1.4 + e * (k + 0.4), encoder.name
        if label:
            share = agreement(label.values, encoder.nearest)
            title += f": {100 * share:.0f} % of the same {label.label}"
        axes.text(start + 0.03, -0.1, title)
        for y, query in enumerate(rows):
            for x, i in enumerate(encoder.nearest[query]):
                alike = label is not None and label.of[i] == label.of[query] >= 0
                _draw(axes, shown[i], start + x, y, framed=alike)
    if label:
        legend = f"framed: same {label.label}; shares are of the {k} neighbours of each of "
        rest = f" ({label.unknown} unlabelled: no frame)" if label.unknown else ""
        legend += f"{len(shown) - label.unknown} images{rest}; "
        legend += f"{100 * by_chance(label.values):.0f} % by chance"
        axes.text(0.03, len(rows) + 0.22, legend)
    if found.caption:
        axes.text(0.03, len(rows) + (0.47 if label else 0.22), found.caption)
    axes.set(xlim=(0, wide), ylim=(high - 0.35, -0.35))
    axes.set_axis_off()
    return picture


def _draw(axes: Any, image: np.ndarray, x: float, y: float, *, framed: bool = False) -> None:
    left, right, top, bottom = x + 0.03, x + 0.97, y + 0.03, y + 0.97
    axes.imshow(image, extent=(left, right, bottom, top))
    if framed:
        axes.add_patch(Rectangle((left, top), 0.94, 0.94, fill=False, ec=SAME, lw=2))
