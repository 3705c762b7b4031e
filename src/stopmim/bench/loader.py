"""How fast images come from disk, against the usual pipeline, measured so that it can be believed.

Everything is timed in turn within one run, on photograph-like JPEGs made for the purpose, and told
as a ratio: a ratio is free of what the machine does to both. "Usual" is what torchvision users
have: Pillow decodes, crops, resizes and flips, then a float tensor is normalised and batched in the
worker. Ours ends where a worker ends too, with a uint8 batch: normalisation is the GPU's work.
"""

import contextlib
import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from stopmim.base.console import say
from stopmim.bench.step import machine, written
from stopmim.config.schema import Config, OptimConfig, RuntimeConfig
from stopmim.data.crops import MEAN, STD, crop_box, resized_crop
from stopmim.data.decode import decode
from stopmim.data.images import Images
from stopmim.data.index_cache import SETTLED_NS
from stopmim.data.loading import loader
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scenes import Scenes
from stopmim.data.workers import cores

FILES, BATCH, SIZE, SCALE = 200, 40, 224, (0.3, 1.0)
INDEXED, RENDERED = 100_000, 4000  # files of a folder; scenes of 64 px


def bench_loader(*, rounds: int = 5, out: Path | None = None) -> str:
    """Times reading and cropping; JSON lines, the last ones with the ratios."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            lines = _measure(Path(folder), rounds)
    finally:
        torch.set_num_threads(threads)
    return written(lines, out, "loader")


def bench_index(*, rounds: int = 5, out: Path | None = None) -> str:
    """Times what comes before the first image: the index of a folder, and rendered scenes."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "images"
        for i in range(100):
            (root / f"{i:02}").mkdir(parents=True)
        for i in range(INDEXED):
            (root / f"{i % 100:02}" / f"{i}.jpg").touch()
        time.sleep(SETTLED_NS / 1e9)  # no index is kept of a folder that may still be changing
        with _cache_at(""):
            anew = _in_turn({"anew": lambda: open_images(root)}, rounds)["anew"]
        with _cache_at(str(Path(folder) / "cache")):
            kept = _in_turn({"kept": lambda: open_images(root)}, rounds)["kept"]
    rendered = _in_turn({"scenes": lambda: Scenes(RENDERED, 64)}, rounds)["scenes"]
    about = {"bench": "index", "cores": cores(), **machine(torch.device("cpu"))}
    seconds = [
        {"bench": f"{INDEXED} files, {what}", "seconds": round(statistics.median(times), 2)}
        | {"min": round(min(times), 2), "max": round(max(times), 2)}
        for what, times in (("anew", anew), ("kept", kept))
    ]
    return written([about, *seconds, _line("scenes of 64 px", rendered, RENDERED)], out, "index")


@contextlib.contextmanager
def _cache_at(place: str) -> Iterator[None]:
    before = os.environ.get("STOPMIM_CACHE")
    os.environ["STOPMIM_CACHE"] = place
    try:
        yield
    finally:
        del os.environ["STOPMIM_CACHE"]
        if before is not None:
            os.environ["STOPMIM_CACHE"] = before


def _measure(root: Path, rounds: int) -> list[dict[str, Any]]:
    files = write_photos(root / "photos", FILES)
    write_tar(root / "photos.tar", root / "photos")
    data = [path.read_bytes() for path in files]
    pipelines: dict[str, Callable[[], object]] = {
        "usual": lambda: _usual(data),
        "pillow": lambda: _ours(data, fast=False),
    }
    if find_spec("simplejpeg"):
        pipelines["simplejpeg"] = lambda: _ours(data, fast=True)
    rates = _in_turn(pipelines, rounds, time.process_time)
    about = {
        "bench": "loader",
        "files": FILES,
        "kilobytes": round(sum(map(len, data)) / FILES / 1e3, 1),
        "cores": cores(),
        "pillow": PIL.__version__,
        **machine(torch.device("cpu")),
    }
    lines = [about]
    lines += [_line(f"one thread, {name}", rate) for name, rate in rates.items()]
    lines += [
        _ratio(f"{name} / usual", rates[name], rates["usual"]) for name in rates if name != "usual"
    ]
    photos = open_images(root / "photos")
    through = {n: (lambda n=n: _through_loader(photos, n)) for n in (1, 2)}
    rates = _in_turn({f"workers {n}": run for n, run in through.items()}, rounds)
    lines += [_line(f"loader, {name}", rate) for name, rate in rates.items()]
    lines.append(_ratio("two workers / one", rates["workers 2"], rates["workers 1"]))
    tar = open_images(root / "photos.tar")
    rates = _in_turn(
        {"tar": lambda: _through_loader(tar, 1), "folder": lambda: _through_loader(photos, 1)},
        rounds,
    )
    return [*lines, _ratio("tar / folder", rates["tar"], rates["folder"])]


# ------------------------------------------------------------------------------ what is timed


def _usual(files: list[bytes]) -> None:
    """Step for step what torchvision's transforms do to a Pillow image."""
    rng = np.random.default_rng(0)
    for start in range(0, FILES, BATCH):
        batch = []
        for data in files[start : start + BATCH]:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            top, left, height, width = crop_box(rng, image.height, image.width, SCALE)
            image = image.crop((left, top, left + width, top + height))
            image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
            if rng.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
            pixels = pixels.to(torch.float32).div(255).clone()
            mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
            batch.append(pixels.sub_(mean).div_(std))
        torch.stack(batch)


def _ours(files: list[bytes], *, fast: bool) -> None:
    rng = np.random.default_rng(0)
    for start in range(0, FILES, BATCH):
        batch = []
        for data in files[start : start + BATCH]:
            image = decode(data, fast=fast)
            box = crop_box(rng, image.shape[0], image.shape[1], SCALE)
            crop = resized_crop(image, box, SIZE)
            crop = crop.flip(-1) if rng.random() < 0.5 else crop
            batch.append(crop.permute(1, 2, 0))
        torch.stack(batch).permute(0, 3, 1, 2)


def _through_loader(images: Images, workers: int) -> None:
    """Four epochs through the real loader, so that starting the workers is a small part."""
    optim = OptimConfig(epochs=4, batch_size=BATCH, warmup_epochs=0)
    config = Config(optim=optim, runtime=RuntimeConfig(workers=workers))
    for _ in loader(images, config, 0, device=torch.device("cpu")):
        pass


def _in_turn(
    runs: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each run in each round; the first round, which warms up, is not counted.

    For a single thread the clock is that of its own work, which others on the machine disturb less.
    """
    say(f"{rounds} rounds of {', '.join(runs)}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn:
                times[name].append(clock() - begin)
    return times


def _line(what: str, seconds: list[float], images: int | None = None) -> dict[str, Any]:
    images = images or FILES * (4 if what.startswith("loader") else 1)
    rates = sorted(images / s for s in seconds)
    return {
        "bench": what,
        "images_per_s": round(statistics.median(rates), 1),
        "min": round(rates[0], 1),
        "max": round(rates[-1], 1),
    }


def _ratio(what: str, ours: list[float], others: list[float]) -> dict[str, Any]:
    """How many times as fast: the ratio of the medians, and the median of the rounds' ratios."""
    ratios = sorted(b / a for a, b in zip(ours, others, strict=True))
    return {
        "bench": what,
        "speed": round(statistics.median(others) / statistics.median(ours), 3),
        "paired": round(statistics.median(ratios), 3),
        "min": round(ratios[0], 3),
        "max": round(ratios[-1], 3),
    }


# ------------------------------------------------------------------------------ the images


def write_photos(folder: Path, count: int) -> list[Path]:
    """JPEGs of 500x375 pixels and about 105 KB, with detail at every scale, as photographs have."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        image = np.full((375, 500, 3), 128.0)
        for width in (4, 8, 16, 32, 64, 128, 250, 500):
            grain = rng.standard_normal((width * 3 // 4, width, 1))
            grain = grain + 0.5 * rng.standard_normal((width * 3 // 4, width, 3))
            weight = 60 / width**0.27
            for c in range(3):
                layer = Image.fromarray(grain[:, :, c].astype(np.float32))
                image[:, :, c] += weight * np.asarray(
                    layer.resize((500, 375), Image.Resampling.BICUBIC)
                )
        paths.append(folder / f"{i:04}.jpg")
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


def write_tar(path: Path, folder: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, file.name)
