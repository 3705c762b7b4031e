"""Benchmarks reading arrays: TIFF of many bands against NumPy, and crops of a large file.

"numpy" is `np.load` of the same pixels from a .npy file. The large file has tiles of deflate, as
most do; a few different tiles are stored, and each stands in many places: decoding them takes its
full time, and the disk does not matter.
"""

import resource
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stopmim.bench.loader import rate, ratio, take_turns
from stopmim.bench.timing import Line, machine, one_thread
from stopmim.data.crops import Box, crop_box, resized
from stopmim.data.rasters.open import open_raster
from stopmim.data.rasters.raster import Raster
from stopmim.data.rasters.windows import read_view

FILES, SIDE, BANDS = 100, 256, 12
LARGE, TILE, TILES, CROPS, CROP = 20_000, 256, 16, 64, 224
STRIP = 8 * TILE  # rows of the large file that are decoded at a time


def bench_rasters(*, rounds: int = 5) -> Iterator[Line]:
    """Times reading arrays; the ratios come last."""
    with tempfile.TemporaryDirectory() as folder, one_thread():
        about = {"bench": "rasters", "files": FILES, "side": SIDE, "bands": BANDS, "large": LARGE}
        yield about | machine(torch.device("cpu"))
        yield from _crops(Path(folder), rounds)
        yield from _bands(Path(folder), rounds)


def _bands(root: Path, rounds: int) -> Iterator[Line]:
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


def _crops(root: Path, rounds: int) -> Iterator[Line]:
    """Crops of one to four times the size of a view, against decoding the whole file."""
    path = root / "large.tif"
    path.write_bytes(large_tiff())
    before = _peak()
    raster = open_raster(bytes(path))
    crops = take_turns({f"{CROPS} crops": partial(_crop, path)}, rounds)[f"{CROPS} crops"]
    peak = _peak() - before
    whole = take_turns({"whole": partial(_decode, raster)}, max(1, rounds // 5))["whole"]
    each = [seconds / CROPS for seconds in crops]
    yield rate(f"crops of {LARGE}x{LARGE}", crops, CROPS)
    yield {"bench": "whole", "seconds": round(min(whole), 3)}
    yield {"bench": "crop / whole", "speed": round(min(whole) / sorted(each)[len(each) // 2], 1)}
    yield {"bench": "memory of crops", "mebibytes": peak}


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


HEADER = b"II*\0\0\0\0\0"  # little-endian; the offset of the first directory stands at byte 4


def write_tiff(pages: list[np.ndarray], *, separate: bool = False) -> bytes:
    """An uncompressed TIFF of uint16 pages (H, W, C), or (C, H, W) if they are `separate`."""
    data, link = HEADER + b"".join(page.tobytes() for page in pages), 4
    start = len(HEADER)
    for page in pages:
        bands, height, width = page.shape if separate else (page.shape[2], *page.shape[:2])
        count = bands if separate else 1
        size = page.nbytes // count
        tags = {256: [width], 257: [height], 258: [16] * bands, 259: [1], 262: [1]}
        tags |= {273: [start + i * size for i in range(count)], 277: [bands], 278: [height]}
        tags |= {279: [size] * count, 284: [2 if separate else 1], 339: [1]}
        data, link = _with_directory(data, link, tags)
        start += page.nbytes
    return data


def large_tiff() -> bytes:
    """An RGB image of LARGE x LARGE pixels in tiles of deflate."""
    rng, each = np.random.default_rng(0), (-(-LARGE // TILE)) ** 2
    data, places = HEADER, list[tuple[int, int]]()
    for _ in range(TILES):
        coarse = rng.integers(0, 256, (TILE // 8, TILE // 8, 3)).repeat(8, 0).repeat(8, 1)
        tile = (coarse // 2 + rng.integers(0, 8, coarse.shape)).astype(np.uint8)
        packed = zlib.compress(tile.tobytes(), 6)
        places.append((len(data), len(packed)))
        data += packed
    chosen = [places[i] for i in rng.integers(0, TILES, each)]
    offsets, lengths = zip(*chosen, strict=True)
    tags = {256: [LARGE], 257: [LARGE], 258: [8] * 3, 259: [8], 262: [2], 277: [3], 322: [TILE]}
    return _with_directory(data, 4, tags | {323: [TILE], 324: offsets, 325: lengths})[0]


def _with_directory(data: bytes, link: int, tags: Mapping[int, Sequence[int]]) -> tuple[bytes, int]:
    """`data` and a directory, to which byte `link` points, and where the link to the next is."""
    start = len(data)
    end = start + 2 + 12 * len(tags) + 4  # lists of values follow the directory
    entries, lists = struct.pack("<H", len(tags)), b""
    for tag, values in tags.items():
        packed = struct.pack(f"<{len(values)}I", *values)
        inside = packed if len(values) == 1 else struct.pack("<I", end + len(lists))
        lists += b"" if len(values) == 1 else packed
        entries += struct.pack("<HHI", tag, 4, len(values)) + inside  # all numbers have 32 bits
    data = data[:link] + struct.pack("<I", start) + data[link + 4 :]
    return data + entries + bytes(4) + lists, end - 4
