"""Zarr arrays of versions 2 and 3, and OME-Zarr: a folder `x.zarr` is one image.

A box reads the chunks that it touches, each decoded into memory of the size that it must have. Not
by the package `zarr`: it would start a thread with an event loop in each process, load the codecs
that a file names, one of which unpickles, and decompress a chunk to whatever size it turns out.
"""

import itertools
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError
from stopmim.data.rasters.raster import (
    MOST,
    SLOW,
    Raster,
    Stored,
    check_bytes,
    check_shape,
    check_tiles,
    decompressed,
    kind_of,
    paste,
    spatial_axes,
)

MAX_METADATA = 2**20
# Every chunk costs about 20 microseconds, even one that was left out and takes no space. Of an
# image with more than MANY of them, each must hold SMALL numbers or more.
MANY, SMALL = 100_000, 4096
MOST_CHUNKS = 2 * MANY  # of one box
CODECS = ("blosc", "bz2", "lz4", "lzma", "zstd")  # of imagecodecs; gzip and zlib are Python's own
SUFFIX = b".zarr"
METADATA = (b"zarr.json", b".zarray", b".zgroup")


def open_zarr(path: bytes) -> Raster:
    """The array in this folder, or the first image of an OME-Zarr group with its levels."""
    about = _about(path)
    attributes = about.get("attributes", {})
    attributes = attributes.get("ome", attributes)
    if about.get("shape") is not None:
        return Zarr(path, about, _axes(about, attributes))
    try:
        image = attributes["multiscales"][0]
        axes = [str(axis["name"] if isinstance(axis, dict) else axis) for axis in image["axes"]]
        folders = [str(level["path"]) for level in image["datasets"]]
    except (KeyError, IndexError, TypeError):
        raise BadImageError("a zarr group without an image; give the folder of an array") from None
    if any(os.path.isabs(name) or ".." in name.split("/") for name in folders) or not folders:
        raise BadImageError("a zarr group whose arrays lie elsewhere")
    places = [os.path.join(path, os.fsencode(name)) for name in folders]
    arrays = [Zarr(place, _about(place), axes) for place in places]
    arrays[0].levels = arrays[1:]
    return arrays[0]


class Zarr(Raster):
    """An array of chunks."""

    def __init__(self, path: bytes, about: dict[str, Any], axes: Sequence[str]) -> None:
        self.path, self.axes = path, list(axes)
        self.opened: tuple[bytes, Stored | None] = b"", None  # the file that was read last
        try:
            self.layout = _Layout(about)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BadImageError(f"not the metadata of a zarr array: {error!r:.80}") from None
        self.kind = kind_of(self.layout.dtype)
        shape = self.layout.shape
        self.y, self.x = spatial_axes(shape, self.axes)
        planes = math.prod(shape) // (shape[self.y] * shape[self.x])
        self.shape = check_shape(shape[self.y], shape[self.x], planes)
        pairs = list(zip(shape, self.layout.chunks, strict=True))
        count, each = math.prod(-(-a // n) for a, n in pairs), math.prod(map(min, pairs))
        if count > MANY and each < SMALL:
            raise BadImageError(
                f"{count} zarr chunks of {each} numbers are too many and too small; write chunks "
                f"of {SMALL} or more"
            )
        self.tall = self.layout.chunks[self.y]
        self.slow = max([1, *(SLOW.get(codec, 1) for codec in self.layout.packed)])
        self.tile = math.prod(self.layout.chunks) * self.layout.dtype.itemsize
        check_tiles(self, count)

    def read(self, box: Box | None = None) -> np.ndarray:
        check_bytes(self, box)
        box = box or Box(0, 0, *self.shape[:2])
        layout = self.layout
        begin, end = [0] * len(layout.shape), list(layout.shape)
        begin[self.y], end[self.y] = box.top, box.top + box.height
        begin[self.x], end[self.x] = box.left, box.left + box.width
        steps = zip(begin, end, layout.chunks, strict=True)
        ranges = [range(a // n, -(-b // n)) for a, b, n in steps]
        if (count := math.prod(map(len, ranges))) > MOST_CHUNKS:
            raise BadImageError(f"{count} zarr chunks of {layout.chunks} are too many to be read")
        found = np.full([b - a for a, b in zip(begin, end, strict=True)], layout.fill, self.kind)
        for number in itertools.product(*ranges):
            if (chunk := self._chunk(number)) is not None:
                start = [i * n - a for i, n, a in zip(number, layout.chunks, begin, strict=True)]
                paste(found, chunk, start)
        pixels = np.moveaxis(found, (self.y, self.x), (0, 1))
        return pixels.reshape(box.height, box.width, -1)

    def _chunk(self, number: tuple[int, ...]) -> np.ndarray | None:
        """One chunk; None if it was left out, being all `fill`."""
        layout = self.layout
        data: Any = self._stored(number)
        if data is None:
            return None
        size = math.prod(layout.chunks) * layout.dtype.itemsize
        for codec in reversed(layout.packed):
            data = data[:-4] if codec == "crc32c" else decompressed(codec, data, size, "zarr")
        if len(data) != size:
            raise BadImageError(f"chunk {number} has {len(data)} bytes, expected {size}")
        pixels = np.frombuffer(data, layout.dtype)
        return pixels.reshape([layout.chunks[i] for i in layout.order]).transpose(layout.undo)

    def _stored(self, number: tuple[int, ...]) -> bytes | None:
        """The bytes of a chunk, in a file of its own or in a shard of many."""
        per_shard = self.layout.per_shard
        shard = tuple(i // n for i, n in zip(number, per_shard, strict=True))
        key = os.path.join(self.path, os.fsencode(self.layout.key(shard)))
        if key != self.opened[0]:
            try:
                self.opened = key, Stored.open(key)
            except FileNotFoundError:
                self.opened = key, None
        if (stored := self.opened[1]) is None:
            return None
        if not self.layout.sharded:
            return stored.part(0, len(stored))
        # A table of offsets and sizes at the end of the shard, and its checksum.
        place = np.ravel_multi_index(
            [i % n for i, n in zip(number, per_shard, strict=True)], per_shard
        )
        table = len(stored) - self.layout.checked - 16 * math.prod(per_shard)
        at, size = np.frombuffer(stored.part(table + 16 * int(place), 16), "<u8").tolist()
        return None if at == size == 2**64 - 1 else stored.part(at, size)


class _Layout:
    """The parts of the metadata that are needed to find a number, of either version."""

    chunks: list[int]
    per_shard: list[int]  # chunks of a file along each axis; 1 if it is no shard
    sharded = False
    checked = 0  # bytes of the checksum at the end of a shard
    dtype: np.dtype
    order: list[int]  # of the axes in a chunk
    packed: list[str]  # codecs, in the order of writing

    def __init__(self, about: dict[str, Any]) -> None:
        self.shape = _sides(about["shape"])
        if about.get("zarr_format") == 2:
            self._read_version_2(about)
        else:
            self._read_version_3(about)
        sides = [*self.shape, *self.chunks]
        if len(self.chunks) != len(self.shape) or not self.shape or min(sides) < 1:
            raise BadImageError(f"zarr array {self.shape} in chunks of {self.chunks}")
        if len(self.shape) > 6 or math.prod(self.chunks) * self.dtype.itemsize > MOST:
            raise BadImageError(f"zarr chunks of {self.chunks} are too large to be read")
        self.undo = [self.order.index(axis) for axis in range(len(self.order))]
        kind_of(self.dtype)

    def _read_version_2(self, about: dict[str, Any]) -> None:
        self.chunks = _sides(about["chunks"])
        self.per_shard = [1] * len(self.chunks)
        self.dtype = np.dtype(str(about["dtype"]))
        axes = range(len(self.shape))
        self.order = list(reversed(axes)) if about.get("order") == "F" else list(axes)
        if about.get("filters"):
            raise BadImageError("zarr with filters is not read; write it without")
        compressor = about.get("compressor")
        self.packed = [_codec(compressor["id"])] if compressor else []
        self.prefix: list[str] = []
        self.separator = about.get("dimension_separator", ".")
        self.fill = _fill(about.get("fill_value"))

    def _read_version_3(self, about: dict[str, Any]) -> None:
        grid, keys = about["chunk_grid"], about["chunk_key_encoding"]
        if grid["name"] != "regular" or about.get("storage_transformers"):
            raise BadImageError("zarr of an irregular grid is not read")
        self.chunks, codecs = _sides(grid["configuration"]["chunk_shape"]), about["codecs"]
        self.per_shard = [1] * len(self.chunks)
        if codecs[0]["name"] == "sharding_indexed":
            codecs = self._read_shards(codecs)
        self.order, self.packed, endian = list(range(len(self.shape))), [], "<"
        for codec in codecs:
            name, options = codec["name"], codec.get("configuration", {})
            if name == "transpose":
                self.order = [self.order[int(axis)] for axis in options["order"]]
            elif name == "bytes":
                endian = ">" if options.get("endian") == "big" else "<"
            else:
                self.packed.append(_codec(name))
        if sorted(self.order) != list(range(len(self.shape))):
            raise BadImageError("zarr whose axes are no permutation")
        self.dtype = np.dtype(endian + np.dtype(str(about["data_type"])).str[1:])
        default = keys["name"] == "default"
        self.prefix = ["c"] if default else []
        self.separator = keys.get("configuration", {}).get("separator", "/" if default else ".")
        self.fill = _fill(about.get("fill_value"))

    def _read_shards(self, codecs: list[Any]) -> list[Any]:
        """Takes the layout of shards from the only codec; returns those of a chunk."""
        options, outer = codecs[0]["configuration"], self.chunks
        self.sharded, self.chunks = True, _sides(options["chunk_shape"])
        self.per_shard = [a // max(b, 1) for a, b in zip(outer, self.chunks, strict=True)]
        index = [codec["name"] for codec in options["index_codecs"]]
        self.checked = 4 * ("crc32c" in index)
        end = options.get("index_location", "end") == "end"
        if len(codecs) > 1 or not end or not {*index} <= {"bytes", "crc32c"} or 0 in self.per_shard:
            raise BadImageError("zarr with shards of an unusual layout is not read")
        return options["codecs"]

    def key(self, number: tuple[int, ...]) -> str:
        if self.separator not in (".", "/"):
            raise BadImageError(f"zarr chunks named with {self.separator!r:.20}")
        return self.separator.join([*self.prefix, *map(str, number)])


def metadata_size(path: bytes) -> int:
    """Bytes of the metadata of an array or a group; -1 if there are none."""
    sizes = [os.stat(os.path.join(path, name)).st_size for name in METADATA
             if os.path.isfile(os.path.join(path, name))]  # fmt: skip
    return sizes[0] if sizes else -1


def _about(path: bytes) -> dict[str, Any]:
    """The metadata of an array or a group, with its attributes."""
    for name in METADATA:
        if os.path.isfile(place := os.path.join(path, name)):
            about = _json(place)
            attributes = os.path.join(path, b".zattrs")
            if name != b"zarr.json" and os.path.isfile(attributes):
                about["attributes"] = _json(attributes)
            if not isinstance(about.get("attributes", {}), dict):
                about["attributes"] = {}
            return about
    raise BadImageError("no zarr.json and no .zarray in this folder")


def _json(path: bytes) -> dict[str, Any]:
    stored = Stored.open(path)
    if len(stored) > MAX_METADATA:
        raise BadImageError(f"zarr metadata of {len(stored)} bytes")
    try:
        found = json.loads(bytes(stored.data))
    except (ValueError, RecursionError):
        raise BadImageError("zarr metadata that are not JSON") from None
    if not isinstance(found, dict):
        raise BadImageError("zarr metadata that are not a JSON object")
    return found


def _axes(about: dict[str, Any], attributes: dict[str, Any]) -> list[str]:
    names = about.get("dimension_names") or attributes.get("_ARRAY_DIMENSIONS") or []
    return [str(name).lower() for name in names] if isinstance(names, list) else []


def _codec(name: str) -> str:
    if name not in (*CODECS, "gzip", "zlib", "crc32c"):
        raise BadImageError(f"zarr compressed by {name!r:.40} is not read; use zstd or blosc")
    return name


def _sides(values: list[Any]) -> list[int]:
    return [int(side) for side in values]


def _fill(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
