"""Surveys a sample of the images: the form that they have in common, and its statistics.

Shapes: n images of a sample, P pixels of each, C channels.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from stopmim.base.console import busy, warn
from stopmim.base.errors import DataError
from stopmim.base.random_keys import numpy_generator
from stopmim.config.schema import Config
from stopmim.data.channels import MOST, Form, as_kind, fitting
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images, open_image
from stopmim.data.order import evenly_spaced
from stopmim.data.pixels import PixelStats
from stopmim.data.rasters.windows import read_sample
from stopmim.data.workers import Watched, batches

FEW = 3  # images that are read to see their channels
SAMPLE = 1000  # images that statistics are measured on
CHUNK = 16  # images per answer of a worker
NUMBERS = 2**24  # of all channels and images together, at most: 64 MiB
PERCENTILES = (0.1, 99.9)  # values beyond are clipped: dead pixels, glints, missing values
# Range over standard deviation, at most: a channel that is almost always 0 would otherwise be
# normalised to hundreds where it is not.
PEAK = 10.0


def common_form(images: Images, config: Config | None = None) -> Form:
    """The form that the source states, or else the most frequent one of a few images.

    Unreadable images do not count; if all are, they are taken for ordinary pictures.
    """
    names: tuple[str, ...] = tuple(getattr(images, "channel_names", None) or ())
    if hasattr(images, "channels") or hasattr(images, "kind"):
        usual = Form()
        channels, kind = (getattr(images, key, getattr(usual, key)) for key in ("channels", "kind"))
        return Form(channels, kind, names)
    if not len(images):
        return Form()
    numbers = np.array(evenly_spaced(len(images), FEW))
    found = [form for form in _read(images, numbers, config, _form) if form is not None]
    if not found:
        return Form()
    form = max(found, key=found.count)  # the first, if all differ
    if not 1 <= form.channels <= MOST:
        raise DataError(f"{images.name(0)}: {form.channels} channels; expected 1 to {MOST}")
    return form._replace(names=names if len(names) == form.channels else ())


def check_like(images: Images, stats: PixelStats, who: str = "the encoder") -> None:
    """Raises DataError if `who` was trained on images of other channels, or of another type."""
    wanted = Form(stats.channels, stats.kind, stats.names or ())
    form = common_form(images) if len(images) else wanted
    if not form.is_like(wanted):
        raise DataError(
            f"{who} takes images of {wanted}; {images.name(0)} has {form}; give images like those "
            f"of its training, or some of their channels, as channels:0,1,2:DATA"
        )
    if form.names and wanted.names and form.names != wanted.names:
        if sorted(form.names) != sorted(wanted.names):
            names = f"{', '.join(form.names)} instead of {', '.join(wanted.names)}"
            warn(f"{images.name(0)}: other channel names than {who} was trained on: {names}")
            return
        order = ",".join(wanted.names)
        raise DataError(
            f"{images.name(0)}: its channels are {', '.join(form.names)}, in another order than "
            f"{who} was trained on; give channels:{order}:DATA"
        )


def measure(images: Images, form: Form, config: Config) -> tuple[PixelStats, int]:
    """Statistics of the channels, and the number of images that they were measured on.

    A function of the images and the seed. Bounds that the config states are kept.
    """
    count = min(SAMPLE, len(images))
    chosen = numpy_generator("pixels", config.seed).choice(len(images), count, replace=False)
    each = max(1, NUMBERS // (form.channels * count))
    sample = partial(_sample, each=each, form=form, seed=config.seed)
    parts = [x for x in _read(images, np.sort(chosen), config, sample) if x is not None]
    if not parts:
        raise DataError(f"none of {count} images can be read, such as {images.name(0)}")
    values = np.concatenate(parts)  # (n * P, C)
    stated = config.data.low, config.data.high
    columns = [
        _channel(values[:, c], *(None if bound is None else bound[c] for bound in stated))
        for c in range(form.channels)
    ]
    low, high, mean, std = zip(*columns, strict=True)
    return PixelStats(mean, std, low, high, form.kind), len(parts)


def _channel(
    values: np.ndarray, low: float | None, high: float | None
) -> tuple[float, float, float, float]:
    """Low, high, mean and standard deviation of the values (n,) of a channel."""
    values = values[np.isfinite(values)].astype(np.float64)
    if not len(values):
        values = np.zeros(1)  # missing in every image
    least, most = np.percentile(values, PERCENTILES)
    if least == most:  # almost empty: what little there is must not be clipped away
        least, most = values.min(), values.max()
    low, high = (x if given is None else given for given, x in ((low, least), (high, most)))
    if not high > low:
        high = low + 1.0  # constant
    low, high = _short(low), _short(high)
    clipped = values.clip(low, high)
    return low, high, _short(clipped.mean()), _short(max(clipped.std(), (high - low) / PEAK))


def _short(x: float) -> float:
    """Six digits: enough, the same on every machine, and readable in run.json."""
    return float(f"{x:.6g}")


# ------------------------------------------------------------------------------ reading


def _read(images: Images, numbers: np.ndarray, config: Config | None, make: Any) -> Iterator[Any]:
    """Yields `make` of each image and its number; None for one that cannot be read."""
    runtime = (config or Config()).runtime
    watched = Watched(images, runtime.workers, runtime.worker_timeout)
    chunks = [numbers[i : i + CHUNK].tolist() for i in range(0, len(numbers), CHUNK)]
    watched.workers = min(watched.workers, len(chunks))
    with busy(f"looking at {len(numbers):,} images"):
        for answers in batches(partial(_answers, watched, make), chunks, watched):
            yield from answers


def _answers(watched: Watched, make: Any, numbers: list[int]) -> list[Any]:
    found = []
    for i in numbers:
        try:
            with watched.reading_image(i):
                raster = open_image(watched.images, i)
                rng = numpy_generator("parts", i)
                pixels = watched.images.read(i) if raster is None else read_sample(raster, rng)
            found.append(make(pixels, i))
            del pixels  # before the next ones are read
        except BadImageError:
            found.append(None)
    return found


def _form(pixels: np.ndarray, number: int) -> Form | None:
    """Channels and type of an image; None if it cannot be one."""
    converted = as_kind(pixels)
    return None if converted is None or pixels.ndim != 3 else Form.of(converted)


def _sample(pixels: np.ndarray, number: int, *, each: int, form: Form, seed: int) -> np.ndarray:
    """Values (P, C) of `each` pixels of an image, float32; only if it is like the others."""
    flat = fitting(pixels, form).reshape(-1, form.channels)
    if len(flat) > each:
        flat = flat[numpy_generator("pixels", seed, number).integers(len(flat), size=each)]
    return flat.astype(np.float32)
