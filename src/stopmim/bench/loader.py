"""Benchmarks reading images against the usual pipeline, and opening a source.

All variants take turns within one run, on generated photograph-like JPEGs, and are compared by
ratios, which cancel the load of the machine. "Usual" is the pipeline of torchvision: Pillow
decodes, crops, resizes and flips, and the worker normalises and batches a float tensor. Ours also
ends with the batch of a worker, as uint8: the GPU normalises.
"""

import io
import math
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from stopmim.base.console import say
from stopmim.base.errors import UserError
from stopmim.bench.timing import Line, machine, one_thread
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config, OptimConfig, RuntimeConfig
from stopmim.data.crops import crop_box, resized_crop
from stopmim.data.decode import decode
from stopmim.data.images import Images
from stopmim.data.index_cache import SETTLED_NS
from stopmim.data.loading import loader
from stopmim.data.pack import pack
from stopmim.data.pixels import MEAN, STD
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scenes import Scenes
from stopmim.data.workers import cores

FILES, BATCH, SIZE, SCALE, EPOCHS = 200, 40, 224, (0.3, 1.0), 4
PACKED = 256  # shorter side of the images that `stopmim pack --size` writes
INDEXED, RENDERED = 100_000, 4000  # files of a folder; scenes of 64 px
FED = ("vit_b16_stop", "vit_l16_stop", "vit_h14_stop")  # presets whose rate on one H200 is known
GPUS = 8  # of a large machine
PHOTOS = 64  # different photos in a large folder

Way = Callable[[bytes, np.random.Generator], Tensor]  # from a file to an image of a batch
Times = dict[str, list[float]]  # name of a variant -> seconds of each round


def bench_loader(*, rounds: int = 5, rate: float | None = None) -> Iterator[Line]:
    """Times reading and cropping.

    The last lines say how many such cores a GPU needs that takes `rate` images per second, or one
    H200 with the presets of the paper.
    """
    if rate is not None and not 0 < rate < math.inf:
        raise UserError(f"--rate {rate:g}: expected images per second, above 0")
    speed: Line = {}
    with tempfile.TemporaryDirectory() as folder, one_thread():
        for line in _measure(Path(folder), rounds):
            speed[line["bench"]] = line.get("images_per_s")
            yield line
    taken = {"a GPU": rate} if rate else {name: preset_rate(name) for name in FED}
    for name, one in taken.items():
        yield feeding(name, one, speed["loader, workers 1"])


def preset_rate(name: str) -> float:
    """Images per second of a preset on one H200, by the hours that it states."""
    preset = PRESETS[name]
    assert preset.cost.hours is not None
    return preset().optim.epochs * preset.cost.images / (3600 * preset.cost.hours)


def feeding(name: str, rate: float, one_worker: float) -> Line:
    """The cores that keep a GPU busy: one per worker, and one for the process that trains.

    On several GPUs each has its own; computed, as nothing is shared but disk and memory.
    """
    workers = math.ceil(rate / one_worker)
    about: Line = {"bench": f"cores for {name}", "of_gpu": round(rate, 1), "workers": workers}
    return about | {"cores": workers + 1, f"cores_for_{GPUS}_gpus": GPUS * (workers + 1)}


def bench_index(*, rounds: int = 5) -> Iterator[Line]:
    """Times the work before the first image: indexing a folder, and rendering scenes."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "images"
        for i in range(100):
            (root / f"{i:02}").mkdir(parents=True)
        for i in range(INDEXED):
            (root / f"{i % 100:02}" / f"{i}.jpg").touch()
        time.sleep(SETTLED_NS / 1e9)  # a folder that may still be changing is not cached
        yield {"bench": "index", "cores": cores(), **machine(torch.device("cpu"))}
        for name, cache in (("anew", ""), ("kept", str(Path(folder) / "cache"))):
            with mock.patch.dict(os.environ, STOPMIM_CACHE=cache):
                (seconds,) = take_turns({name: lambda: open_images(root)}, rounds).values()
            yield {"bench": f"{INDEXED} files, {name}"} | _summary("seconds", seconds, 2)
    (seconds,) = take_turns({"scenes": lambda: Scenes(RENDERED, 64)}, rounds).values()
    yield rate("scenes of 64 px", seconds, RENDERED)


def _measure(root: Path, rounds: int) -> Iterator[Line]:
    files = write_photos(root / "photos", FILES, FILES)
    with tarfile.open(root / "photos.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for file in files:
            tar.add(file, file.name)
    data = [path.read_bytes() for path in files]
    ways: dict[str, Way] = {"usual": _usual, "pillow": partial(_ours, fast=False)}
    if find_spec("simplejpeg"):
        ways["simplejpeg"] = partial(_ours, fast=True)
    kilobytes = round(sum(map(len, data)) / FILES / 1e3, 1)
    about = {"bench": "loader", "files": FILES, "kilobytes": kilobytes, "cores": cores()}
    yield about | {"pillow": PIL.__version__} | machine(torch.device("cpu"))
    # The clock of this thread's own work is less disturbed by other processes.
    pipelines = {name: partial(_read, data, way) for name, way in ways.items()}
    times = take_turns(pipelines, rounds, time.process_time)
    yield from (rate(f"one thread, {name}", seconds, FILES) for name, seconds in times.items())
    yield from (ratio(f"{name} / usual", times[name], times["usual"]) for name in [*times][1:])
    photos, archive = open_images(root / "photos"), open_images(root / "photos.tar")
    times = take_turns({f"workers {n}": partial(_load, photos, n) for n in (1, 2)}, rounds)
    for name, seconds in times.items():
        yield rate(f"loader, {name}", seconds, EPOCHS * FILES)
    yield ratio("two workers / one", times["workers 2"], times["workers 1"])
    single = {"single": partial(_load, photos, 1, batch=1), "whole": partial(_load, photos, 1)}
    times = take_turns(single, rounds)
    yield ratio(f"{BATCH} images per message / one", times["whole"], times["single"])
    both = {"tar": partial(_load, archive, 1), "folder": partial(_load, photos, 1)}
    times = take_turns(both, rounds)
    yield ratio("tar / folder", times["tar"], times["folder"])
    pack(photos, root / "packed", size=PACKED)
    small = open_images(root / "packed")
    both = {"packed": partial(_load, small, 1), "folder": partial(_load, photos, 1)}
    times = take_turns(both, rounds)
    yield rate(f"loader, packed at {PACKED} px", times["packed"], EPOCHS * FILES)
    yield ratio(f"packed at {PACKED} px / folder", times["packed"], times["folder"])


# ------------------------------------------------------------------------------ timed variants


def _read(files: list[bytes], way: Way) -> None:
    rng = np.random.default_rng(0)
    for start in range(0, FILES, BATCH):
        torch.stack([way(data, rng) for data in files[start : start + BATCH]])


def _usual(data: bytes, rng: np.random.Generator) -> Tensor:
    """Does step by step what torchvision's transforms do to a Pillow image."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width = crop_box(rng, image.height, image.width, SCALE)
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    pixels = pixels.to(torch.float32).div(255).clone()
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return pixels.sub_(mean).div_(std)


def _ours(data: bytes, rng: np.random.Generator, *, fast: bool) -> Tensor:
    image = decode(data, fast=fast)
    crop = resized_crop(image, crop_box(rng, image.shape[0], image.shape[1], SCALE), SIZE)
    crop = crop.flip(-1) if rng.random() < 0.5 else crop
    return crop.permute(1, 2, 0)


def _load(images: Images, workers: int, batch: int | None = None) -> None:
    """Reads several epochs through the real loader, to amortise the start of the workers.

    A worker sends a whole batch as one message.
    """
    optim = OptimConfig(epochs=EPOCHS, batch_size=batch or BATCH, warmup_epochs=0)
    config = Config(optim=optim, runtime=RuntimeConfig(workers=workers))
    for _ in loader(images, config, 0, device=torch.device("cpu")):
        pass


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds of each run in each round, after a warmup round."""
    say(f"{rounds} rounds of {', '.join(runs)}")
    times: Times = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn:
                times[name].append(clock() - begin)
    return times


def rate(name: str, seconds: list[float], images: int) -> Line:
    return {"bench": name} | _summary("images_per_s", [images / s for s in seconds], 1)


def ratio(name: str, ours: list[float], others: list[float]) -> Line:
    """Speed relative to `others`: ratio of the medians, and median of the per-round ratios."""
    speed = round(statistics.median(others) / statistics.median(ours), 3)
    ratios = [b / a for a, b in zip(ours, others, strict=True)]
    return {"bench": name, "speed": speed} | _summary("paired", ratios, 3)


def _summary(name: str, values: list[float], digits: int) -> Line:
    found = {name: statistics.median(values), "min": min(values), "max": max(values)}
    return {key: round(value, digits) for key, value in found.items()}


# ------------------------------------------------------------------------------ the images


def write_photos(folder: Path, count: int, different: int) -> list[Path]:
    """Writes JPEGs of 500x375 pixels and about 105 KB, with detail at every scale, like photos.

    After the first `different` ones come other names of the same files.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    paths = [folder / f"{i:05}.jpg" for i in range(count)]
    for path in paths[:different]:
        image = np.full((375, 500, 3), 128.0)
        for width in (4, 8, 16, 32, 64, 128, 250, 500):
            grain = rng.standard_normal((width * 3 // 4, width, 1))
            grain = grain + 0.5 * rng.standard_normal((width * 3 // 4, width, 3))
            for c in range(3):
                layer = Image.fromarray(grain[:, :, c].astype(np.float32))
                layer = layer.resize((500, 375), Image.Resampling.BICUBIC)
                image[:, :, c] += 60 / width**0.27 * np.asarray(layer)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    for i in range(different, count):
        os.link(paths[i % different], paths[i])
    return paths
