"""Benchmarks reading arrays: TIFF of many bands against NumPy, and crops of a large file.

"numpy" is `np.load` of the same pixels from a .npy file. The large file has tiles of deflate, as
most do; a few different tiles are stored, and each stands in many places: decoding them takes its
full time, and the disk does not matter.
"""

import resource
import struct
import tempfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stopmim.bench.loader import Lines, rate, ratio, take_turns
from stopmim.bench.timing import machine, record_lines
from stopmim.data.crops import Box, crop_box, resized
from stopmim.data.rasters.open import open_raster
from stopmim.data.rasters.raster import Raster
from stopmim.data.rasters.windows import read_view

FILES, SIDE, BANDS = 100, 256, 12
LARGE, TILE, TILES, CROPS, CROP = 20_000, 256, 16, 64, 224
STRIP = 8 * TILE  # rows of the large file that are decoded at a time


def bench_rasters(*, rounds: int = 5, out: Path | None = None) -> str:
    """Times reading arrays; returns JSON lines, with the ratios last."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            lines = [*_crops(Path(folder), rounds), *_bands(Path(folder), rounds)]
    finally:
        torch.set_num_threads(threads)
    about = {"bench": "rasters", "files": FILES, "side": SIDE, "bands": BANDS, "large": LARGE}
    return record_lines([about | machine(torch.device("cpu")), *lines], out, "rasters")


def _bands(root: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """TIFF in which pixels, or bands, or pages follow one another, against .npy."""
    rng = np.random.default_rng(0)
    kinds = ("pixels", "bands", "pages", "npy")
    paths: dict[str, list[Path]] = {kind: [] for kind in kinds}
    for i in range(FILES):
        image = rng.integers(0, 10_000, (SIDE, SIDE, BANDS), np.uint16)
        for kind in kinds:
            paths[kind].append(root / f"{i}_{kind}.{'npy' if kind == 'npy' else 'tif'}")
        np.save(paths["npy"][-1], image)
        paths["pixels"][-1].write_bytes(write_tiff([image]))
        planes = np.ascontiguousarray(image.transpose(2, 0, 1))
        paths["bands"][-1].write_bytes(write_tiff([planes], separate=True))
        paths["pages"][-1].write_bytes(write_tiff([plane[:, :, None] for plane in planes]))
    runs = {kind: partial(_read_all, paths[kind]) for kind in kinds}
    times = take_turns({**runs, "numpy": partial(_load_all, paths["npy"])}, rounds)
    megabytes = SIDE * SIDE * BANDS * 2 / 2**20
    for kind in times:
        yield rate(f"{kind}, {megabytes:g} MiB each", times[kind], FILES)
    for kind in kinds:
        yield ratio(f"{kind} / numpy", times[kind], times["numpy"])


def _read_all(paths: list[Path]) -> None:
    for path in paths:
        open_raster(bytes(path)).read()


def _load_all(paths: list[Path]) -> None:
    for path in paths:
        np.load(path)


def _crops(root: Path, rounds: int) -> Lines:
    """Crops of one to four times the size of a view, against decoding the whole file."""
    path = root / "large.tif"
    path.write_bytes(large_tiff())
    before = _peak()
    raster = open_raster(bytes(path))
    crops = take_turns({f"{CROPS} crops": partial(_crop, path)}, rounds)[f"{CROPS} crops"]
    peak = _peak() - before
    whole = take_turns({"whole": partial(_decode, raster)}, max(1, rounds // 5))["whole"]
    each = [seconds / CROPS for seconds in crops]
    return [
        rate(f"crops of {LARGE}x{LARGE}", crops, CROPS),
        {"bench": "whole", "seconds": round(min(whole), 3)},
        {"bench": "crop / whole", "speed": round(min(whole) / sorted(each)[len(each) // 2], 1)},
        {"bench": "memory of crops", "mebibytes": peak},
    ]


def _crop(path: Path) -> None:
    """As a worker does with `data.crops_per_image`: one opening, many boxes."""
    raster, rng = open_raster(bytes(path)), np.random.default_rng(0)
    scale = tuple((side / LARGE) ** 2 for side in (CROP, 4 * CROP))
    for _ in range(CROPS):
        box = crop_box(rng, LARGE, LARGE, (scale[0], scale[1]))
        resized(read_view(raster, box, CROP), CROP, CROP)


def _decode(raster: Raster) -> None:
    for top in range(0, LARGE, STRIP):
        raster.read(Box(top, 0, min(STRIP, LARGE - top), LARGE))


def _peak() -> int:
    """The largest memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


# ------------------------------------------------------------------------------ the files


def write_tiff(pages: list[np.ndarray], *, separate: bool = False) -> bytes:
    """An uncompressed TIFF of uint16 pages (H, W, C), or (C, H, W) if they are `separate`."""
    data, starts = b"II*\0\0\0\0\0", list[int]()
    for page in pages:
        starts.append(len(data))
        data += page.tobytes()
    links = [4]  # where the offset of the next directory stands
    for page, start in zip(pages, starts, strict=True):
        bands, height, width = page.shape if separate else (page.shape[2], *page.shape[:2])
        count = bands if separate else 1
        size = page.nbytes // count
        data = _link(data, links[-1])
        table = len(data) + 2 + 12 * 11 + 4  # offsets, sizes and bits follow the directory
        offsets = struct.pack(f"<{count}I", *(start + i * size for i in range(count)))
        sizes = struct.pack(f"<{count}I", *[size] * count)
        bits = struct.pack(f"<{bands}H", *[16] * bands)
        entries = [
            _entry(256, 4, 1, width), _entry(257, 4, 1, height),
            _entry(258, 3, bands, 16 if bands == 1 else table + 8 * count),
            _entry(259, 3, 1, 1), _entry(262, 3, 1, 1),
            _entry(273, 4, count, start if count == 1 else table),
            _entry(277, 3, 1, bands), _entry(278, 4, 1, height),
            _entry(279, 4, count, size if count == 1 else table + 4 * count),
            _entry(284, 3, 1, 2 if separate else 1), _entry(339, 3, 1, 1),
        ]  # fmt: skip
        data += struct.pack("<H", len(entries)) + b"".join(entries)
        links.append(len(data))
        data += bytes(4) + offsets + sizes + bits
    return data


def large_tiff() -> bytes:
    """An RGB image of LARGE x LARGE pixels in tiles of deflate."""
    rng, each = np.random.default_rng(0), (-(-LARGE // TILE)) ** 2
    data, places = b"II*\0\0\0\0\0", list[tuple[int, int]]()
    for _ in range(TILES):
        coarse = rng.integers(0, 256, (TILE // 8, TILE // 8, 3)).repeat(8, 0).repeat(8, 1)
        tile = (coarse // 2 + rng.integers(0, 8, coarse.shape)).astype(np.uint8)
        packed = zlib.compress(tile.tobytes(), 6)
        places.append((len(data), len(packed)))
        data += packed
    chosen = [places[i] for i in rng.integers(0, TILES, each)]
    offsets = len(data)
    for values in zip(*chosen, strict=True):
        data += struct.pack(f"<{each}I", *values)
    bits = len(data)
    data = _link(data + struct.pack("<3H", 8, 8, 8), 4)
    entries = [
        _entry(256, 4, 1, LARGE), _entry(257, 4, 1, LARGE), _entry(258, 3, 3, bits),
        _entry(259, 3, 1, 8), _entry(262, 3, 1, 2), _entry(277, 3, 1, 3),
        _entry(322, 4, 1, TILE), _entry(323, 4, 1, TILE), _entry(324, 4, each, offsets),
        _entry(325, 4, each, offsets + 4 * each),
    ]  # fmt: skip
    return data + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)


def _entry(tag: int, kind: int, count: int, value: int) -> bytes:
    return struct.pack("<HHII", tag, kind, count, value)


def _link(data: bytes, at: int) -> bytes:
    """`data`, with its length at byte `at`: a directory comes next."""
    return data[:at] + struct.pack("<I", len(data)) + data[at + 4 :]
