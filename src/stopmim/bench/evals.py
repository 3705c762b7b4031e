"""Benchmarks evaluation: features of images in memory and of JPEGs, the suite, and tracking.

"Plain" is what people write: torch's DataLoader with a worker per core, in which Pillow decodes,
resizes and crops as torchvision does, and the encoder in float32, eager, 256 images at a time.
Each stage is also timed alone, which shows the bottleneck. On a GPU the figures that have goals
come last, each with its goal.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from stopmim.base.console import say
from stopmim.bench.loader import PHOTOS, write_photos
from stopmim.bench.timing import Line, machine, timed, wait
from stopmim.bench.tracking import tracking
from stopmim.data import workers
from stopmim.data.crops import normalise
from stopmim.data.images import Images
from stopmim.data.pixels import MEAN, STD
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.open import open_images
from stopmim.data.subset import Subset
from stopmim.evals.features import LAYERS, evaluating, extract
from stopmim.evals.inputs import Inputs, open_encoder
from stopmim.evals.protocols import Knn, Linear, Lowshot, Protocol, RankMe
from stopmim.evals.request import ImageRequest
from stopmim.evals.showing import Showing
from stopmim.evals.suite import measure, suite
from stopmim.evals.views import View, middle
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.method.encoder import Encoder

CLASSES = 10  # of the images of the suite
DECODER = 0.95  # goal, as a share of the rate of the decoder alone: nothing else then limits it

Part = Literal["memory", "jpeg", "suite", "tracking"]


@dataclass(frozen=True)
class Size:
    """Sizes of the measurements on a GPU; those on a CPU only show that everything works."""

    small: str = "random:vit_s8@64"
    large: str = "random:vit_b16@224"
    images: int = 50_000  # of 64 px, in memory; a tenth more to test on
    plain: int = 10_000  # of them for the plain way
    files: int = 16_384
    plain_files: int = 4096


ON_CPU = Size("random:vit_micro16@64", "random:vit_micro32@224", 300, 64, 96, 32)


def bench_evals(
    parts: Sequence[Part] = (), *, device: str = "auto", rounds: int = 3
) -> Iterator[Line]:
    """Measures `parts`, by default all; the error of one is raised after the others."""
    where = choose_device(device)
    size = Size() if where.type == "cuda" else ON_CPU
    measures: dict[Part, Callable[[], Iterator[Line]]] = {
        "memory": lambda: memory(size, where, rounds),
        "jpeg": lambda: jpeg(size, where, rounds),
        "suite": lambda: whole_suite(size, device),
        "tracking": lambda: iter([{"bench": "tracking", **tracking(device)}]),
    }
    about: Line = {"bench": "evals", "cores": workers.cores(), **machine(where)}
    yield about
    lines, failed = list[Line](), list[Exception]()
    for part in parts or measures:
        say(f"{part} ...")
        try:
            for line in measures[part]():
                lines.append(line)
                yield line
        except Exception as error:
            failed.append(error)
            say(f"{part}: {error}")
    if where.type == "cuda":
        yield from goals(lines)
    if failed:
        raise failed[0]


def goals(lines: Sequence[Line]) -> list[Line]:
    """The figures among `lines` that there are goals for; these are for an H200 with 16 cores."""
    figures = {(line["bench"], key): x for line in lines for key, x in line.items()}
    decoder = figures.get(("jpeg, decoded alone", "images_per_s"), math.inf)
    found = []
    for bench, key, least, most in (
        ("memory", "images_per_s", 25_000, None),
        ("jpeg", "images_per_s", min(3500, round(DECODER * decoder, 1)), None),
        ("suite, second time", "seconds", None, 25),
        ("tracking", "frames_per_s", 40, None),
        ("tracking", "ratio", 4, None),
        ("tracking", "jf_difference", -0.05, 0.05),
    ):
        if (x := figures.get((bench, key))) is not None:
            met = (least is None or x >= least) and (most is None or x <= most)
            bounds = {"at_least": least, "at_most": most}
            line = {"bench": f"goal: {bench}", key: x}
            found.append(line | {k: v for k, v in bounds.items() if v is not None} | {"met": met})
    return found


def memory(size: Size, device: torch.device, rounds: int) -> Iterator[Line]:
    """Features of small images in one array."""
    images = small_images(size.images, 0)
    encoder = open_encoder(size.small)
    yield from features("memory", encoder, images, size.plain, device, rounds)


def jpeg(size: Size, device: torch.device, rounds: int) -> Iterator[Line]:
    """Features of photographs in a folder, and how fast these are decoded alone."""
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder) / "photos", size.files, PHOTOS)
        images = open_images(Path(folder) / "photos")
        encoder = open_encoder(size.large)
        yield from features("jpeg", encoder, images, size.plain_files, device, rounds)
        yield _rate("jpeg, decoded alone", len(images), [_decoded(images) for _ in range(rounds)])


def features(
    name: str, encoder: Any, images: Images, plain: int, device: torch.device, rounds: int
) -> Iterator[Line]:
    """Rates of the plain way, of ours, and of its two halves: making views, and the encoder."""
    size, precision = encoder.side * encoder.patch, choose_precision("auto", device)
    encoder.to(device)
    showing = Showing(images, middle(encoder, images, size))
    how: Any = {"size": size, "layers": LAYERS, "device": device, "precision": precision}
    check_features(encoder, images, how)
    try:
        seconds = timed(_plain, encoder, images, showing.view, plain, device)
        yield _rate(f"{name}, plain", plain, [seconds])
    except RuntimeError as error:  # its batches need /dev/shm, which is small in containers
        yield {"bench": f"{name}, plain", "error": str(error)}
    yield _rate(name, len(images), [timed(extract, encoder, images, **how) for _ in range(rounds)])
    views = [timed(_exhaust, showing.batches(device), device) for _ in range(rounds)]
    yield _rate(f"{name}, views alone", len(images), views)
    batch = next(showing.batches(device)).clone()
    alone = [timed(_forward, encoder, batch, precision) for _ in range(rounds)]
    yield _rate(f"{name}, encoder alone", 8 * len(batch), alone)


def check_features(encoder: Encoder, images: Images, how: Mapping[str, Any]) -> None:
    """Raises RuntimeError unless batched features equal the plain ones, up to bf16 rounding.

    It also loads the kernels, which the measurements need not.
    """
    n = min(5000, len(images))
    every, view = list(range(0, n, n // 16)), middle(encoder, images, how["size"])
    found = extract(encoder, Subset(images, range(n)), **how)[every]
    data = _Plain(images, view, n)
    with evaluating(encoder):
        batch = torch.stack([data[i] for i in every]).to(how["device"])
        expected = encoder.features(batch, LAYERS).float().cpu()
    error = float((found - expected).norm() / expected.norm())
    if not error < 0.05:
        raise RuntimeError(f"features differ from those of the plain way by {error:.1%}")


def whole_suite(size: Size, device: str) -> Iterator[Line]:
    """Seconds of ``eval suite`` with untrained networks, and of its steps for one of them."""
    train, test = small_images(size.images, 0), small_images(size.images // 10, 1)
    encoder = open_encoder(size.small)
    request = ImageRequest(device=device)  # type: ignore[arg-type]
    kinds = [Knn(), Linear(), Lowshot(), RankMe()]
    inputs = Inputs(encoder, train, test, request)
    for which in ("first", "second"):
        with tempfile.TemporaryDirectory() as cache, _caching_in(cache):
            inputs = Inputs(encoder, train, test, request)
            seconds = timed(suite, inputs, _possible(kinds, inputs))
        networks = 1 + inputs.random_inits
        yield {"bench": f"suite, {which} time", "seconds": round(seconds, 2), "networks": networks}
    with _caching_in(""):
        twin = next(inputs.untrained_twins())
        steps = {"features": timed(lambda: (twin.train_x, twin.test_x))}
        for kind in _possible(kinds, inputs):
            steps[kind.name] = timed(measure, twin, [kind])
    rounded = {name: round(seconds, 2) for name, seconds in steps.items()}
    yield {"bench": "suite, one untrained network", "images": len(train) + len(test), **rounded}


def _possible(kinds: Sequence[Protocol], inputs: Inputs) -> list[Protocol]:
    return [kind for kind in kinds if not kind.obstacle(inputs)]


def _caching_in(folder: str) -> Any:
    return mock.patch.dict(os.environ, STOPMIM_CACHE=folder)


def small_images(n: int, seed: int) -> Arrays:
    """Noise over the pattern of a class, 64 px."""
    rng = np.random.default_rng(seed)
    y = rng.integers(CLASSES, size=n)
    patterns = np.random.default_rng(0).integers(0, 100, (CLASSES, 8, 8, 3), dtype=np.uint8)
    pixels = patterns.repeat(8, axis=1).repeat(8, axis=2)[y]
    pixels += rng.integers(0, 156, pixels.shape, dtype=np.uint8)
    return Arrays(pixels, {"class": y}, [], "image", f"bench-{n}-{seed}")


# ------------------------------------------------------------------------------ timed variants


class _Plain:
    """The data set of the plain way: Pillow, then floats."""

    def __init__(self, images: Images, view: View, n: int) -> None:
        self.images, self.view, self.n = images, view, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        image = Image.fromarray(self.images.read(i))
        assert isinstance(self.view.resize, int)
        scale, size = self.view.resize / min(image.size), self.view.size
        width, height = (int(scale * side) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - size) / 2), round((height - size) / 2)
        image = image.crop((left, top, left + size, top + size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        return pixels.sub_(mean).div_(std)


def _plain(encoder: Encoder, images: Images, view: Any, n: int, device: torch.device) -> None:
    data: Any = _Plain(images, view, n)
    gpu = device.type == "cuda"
    with evaluating(encoder):
        for batch in DataLoader(data, 256, num_workers=workers.cores(), pin_memory=gpu):
            encoder.features(batch.to(device), LAYERS).cpu()


def _decoded(images: Images) -> float:
    """Seconds that one process per core takes to read all images, and nothing else."""

    def make(numbers: list[int]) -> None:
        for i in numbers:
            images.read(i)

    watched = workers.Watched(images, workers.cores(), 0)
    order = (list(range(i, min(i + 32, len(images)))) for i in range(0, len(images), 32))
    return timed(lambda: [*workers.batches(make, order, watched)])


def _forward(encoder: Encoder, batch: Tensor, precision: torch.dtype | None) -> None:
    enabled = precision is not None
    with evaluating(encoder), torch.autocast(batch.device.type, precision, enabled):
        for _ in range(8):
            found = encoder.features(normalise(batch), LAYERS)
        float(found[0, 0])


def _exhaust(batches: Iterator[Tensor], device: torch.device) -> None:
    for _ in batches:
        pass
    wait(device)


def _rate(name: str, images: int, seconds: Sequence[float]) -> Line:
    rates = sorted(images / s for s in seconds)
    middle_one = rates[len(rates) // 2]
    return {"bench": name, "images_per_s": round(middle_one, 1), "least": round(rates[0], 1)}
