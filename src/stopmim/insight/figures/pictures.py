"""The look of every figure, and pictures of masked images.

A figure is drawn on white and can be saved anywhere. `svg` makes it part of a page, where its text
and lines follow the colours of the page, light or dark.

Shapes: H x W pixels of Ch channels, C context patches, M target blocks of K patches, on a grid of
side x side.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from stopmim.config.schema import Config
from stopmim.data.crops import AUGMENT
from stopmim.data.images import Images
from stopmim.data.loading import Crops, steps_per_epoch
from stopmim.data.order import batch_keys
from stopmim.data.pixels import stats_of
from stopmim.insight.figures.false_colour import FalseColour
from stopmim.method.build import draw_masks

# Colours that a page replaces by its own, and the CSS variables it has for them.
INK, RULE, SERIES = "#24292f", "#d8dde3", ("#0072b2", "#d55e00")
_VARIABLES = {INK: "--ink", RULE: "--rule", SERIES[0]: "--series-1", SERIES[1]: "--series-2"}

# Okabe and Ito, "Color Universal Design" (2008): distinct with any colour vision. Their black and
# blue are left out: too dark on a dark picture.
BLOCKS = ("#e69f00", "#56b4e9", "#cc79a7", "#f0e442", "#009e73", "#d55e00")
COLOURS = (*SERIES, *BLOCKS)  # of the lines of a plot

HIDDEN_ALPHA = 64  # of 255: hidden patches can be made out and are not mistaken for seen ones
PREVIEW_PIXELS = 256  # along an edge, or slightly less: whole pixels per patch


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Makes figures look like ours, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",  # text stays text, to be searched, read aloud and copied
                "font.size": 8.5,
                "text.color": INK,
                "axes.labelcolor": INK,
                "axes.edgecolor": RULE,
                "xtick.color": INK,
                "ytick.color": INK,
                "grid.color": RULE,
            }
        )
        yield


@house_style()
def svg(figure: Figure, name: str) -> str:
    """`figure` as an ``<svg>`` element; `name`, unique in a page, makes its ids unique."""
    matplotlib.rcParams["svg.hashsalt"] = name
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", dpi=200, transparent=True, metadata=nothing)
    element = text.getvalue()
    element = element[element.index("<svg") :]
    # Its style sheet would apply to the whole page; ids of groups are the same in all figures and
    # nothing refers to them; size and font are up to the page.
    element = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", element, count=1, flags=re.S)
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    element = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", element, count=1)
    element = re.sub(r" font-family: [^;\"]*;", "", element)
    for colour, variable in _VARIABLES.items():
        element = element.replace(colour, f"var({variable}, {colour})")
    return element


# ------------------------------------------------------------------------------ parts of figures


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure of `size` inches, and its axes (rows, columns)."""
    picture = Figure(figsize=size, layout="constrained")
    return picture, picture.subplots(rows, columns, squeeze=False)


def style_plot(axes: Any, title: str = "", x: str = "") -> None:
    """Styles axes with horizontal rules, no tick marks, and no frame but the x axis."""
    axes.set_title(title, size=9)
    axes.set_xlabel(x)
    axes.grid(axis="y", linewidth=0.7)
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)


def style_images(grid: Any) -> None:
    """Removes ticks and frames around the images on these axes."""
    for axes in np.asarray(grid).flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)


def colour_bar(picture: Figure, image: Any, axes: Any, **options: Any) -> Any:
    """A colour bar beside `axes`, without frame and tick marks."""
    bar = picture.colorbar(image, ax=axes, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    return bar


def mark_patch(axes: Any, patch: int, side: int) -> None:
    """Frames a patch of a picture that is `side` units wide."""
    row, col = divmod(patch, side)
    # Dark around light: one of the two stands out from any colour.
    for edge, width in (("black", 3.2), ("white", 1.4)):
        axes.add_patch(Rectangle((col, row), 1, 1, fill=False, ec=edge, lw=width))


# ------------------------------------------------------------------------------ masked images


class Preview(NamedTuple):
    """One image as training sees it."""

    image: np.ndarray  # (H, W, Ch) in stored units
    context: np.ndarray  # (C,) patch numbers
    targets: np.ndarray  # (M, K) patch numbers
    side: int
    colours: FalseColour | None = None  # None: the image is a picture

    @property
    def picture(self) -> np.ndarray:
        """The image for people, (H, W, 3) uint8."""
        return self.colours(self.image) if self.colours else self.image

    @property
    def caption(self) -> str:
        """Names of the channels that the picture shows; "" for ordinary pictures."""
        return self.colours.caption if self.colours else ""


def previews(
    images: Images, config: Config, step: int, count: int, show: Sequence[str] = ()
) -> list[Preview]:
    """The first readable images of the batch of `step`, cropped and masked as on a CPU.

    `show` are the channels for their pictures, see false_colour.py.
    """
    count = min(count, config.optim.batch_size)
    part, per_epoch = slice(0, count), steps_per_epoch(images, config)
    keys = next(batch_keys(images, config, step, shares=[part], steps_per_epoch=per_epoch))
    (masks,) = draw_masks(config, step, [part], torch.device("cpu"))
    crops, colours = Crops(images, config), FalseColour.of(stats_of(config), show)
    found = []
    for i, key in enumerate(keys):
        sample = crops[key]
        if sample.image is None:
            continue
        pixels = sample.image[None]  # (1, Ch, H, W)
        if change := AUGMENT.get(config.data.augmentation or "crop"):
            numbers = torch.from_numpy(sample.augmentation)[None]
            pixels = change(pixels, numbers)
            if sample.image.dtype == torch.uint8:
                pixels = pixels.round().clamp(0, 255).byte()
        image = pixels[0].permute(1, 2, 0).numpy()  # (Ch, H, W) -> (H, W, Ch)
        context, targets = masks.context[i].numpy(), masks.targets[:, i].numpy()
        found.append(Preview(image, context, targets, config.side, colours))
    return found


def faded(image: np.ndarray, context: np.ndarray, side: int) -> np.ndarray:
    """`image` with alpha, (H, W, 4) uint8: seen patches are solid, the others faint."""
    height, width = image.shape[0] // side, image.shape[1] // side
    alpha = np.full(side * side, HIDDEN_ALPHA, np.uint8)
    alpha[context] = 255
    pixels = np.kron(alpha.reshape(side, side), np.ones((height, width), np.uint8))  # (H, W)
    return np.dstack([image, pixels])


def outline(index: np.ndarray, side: int, inset: float = 0.0) -> np.ndarray:
    """The border of a set of patches: segments (n, 2, 2) of ``(x, y)``, one per edge of a patch.

    They lie `inset` patches further in, so that borders in the same place remain distinct.
    """
    inside = np.zeros((side + 2, side + 2), bool)  # with a rim of patches outside
    inside[index // side + 1, index % side + 1] = True
    segments = []
    for row, col in np.argwhere(inside):
        for down, right in ((0, 1), (0, -1), (1, 0), (-1, 0)):  # to the patch across the edge
            if inside[row + down, col + right]:
                continue
            ends = []
            for way in (-1, 1):  # along the edge, which is at right angles to (down, right)
                r, c = row + way * right, col + way * down
                # Shorter where the border turns inwards, longer where it turns outwards.
                turn = inside[r + down, c + right] if inside[r, c] else -1
                half = way * (0.5 + inset * turn)
                x = col - 0.5 + right * (0.5 - inset) + down * half
                y = row - 0.5 + down * (0.5 - inset) + right * half
                ends.append((x, y))
            segments.append(ends)
    return np.array(segments).reshape(-1, 2, 2)


def resized(image: np.ndarray, edge: int) -> Image.Image:
    """`image` with `edge` x `edge` pixels: enlarged ones keep their pixels, others are averaged."""
    how = Image.Resampling.NEAREST if edge >= len(image) else Image.Resampling.BOX
    return Image.fromarray(image).resize((edge, edge), how)


@house_style()
def figure(preview: Preview) -> Figure:
    """Draws an image with faint hidden patches and a coloured outline around every target block."""
    picture = Figure(figsize=(2, 2))
    draw_preview(picture.add_axes((0, 0, 1, 1)), preview)
    return picture


def draw_preview(axes: Any, preview: Preview) -> None:
    """Draws the picture of `figure` on axes that are two inches wide."""
    side = preview.side
    # Whole pixels per patch.
    image = np.asarray(resized(preview.picture, side * max(1, PREVIEW_PIXELS // side)))
    seen = faded(image, preview.context, side)
    axes.imshow(seen, extent=(0, side, side, 0), interpolation="none")
    point = side / (72 * 2)  # in patches
    for number, index in enumerate(preview.targets):
        segments = list(outline(index, side, min(0.4, (0.7 + number) * point)))
        for colour, width in (("black", 1.4), (BLOCKS[number % len(BLOCKS)], 1.0)):
            lines = LineCollection(segments, colors=colour, linewidths=width, capstyle="round")
            axes.add_collection(lines)
    axes.set(xlim=(0, side), ylim=(side, 0))
    axes.set_axis_off()
