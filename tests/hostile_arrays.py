"""Hostile arrays and tables: a few bytes that claim to be gigabytes, in every format."""

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Write = Callable[[Path], object]

MOST = 2**29  # bytes of pixels that are held
SHRUNK = 2**32 - 2**24  # bytes of pixels that are shrunk while they are read
TILE = 1024


def folders() -> dict[str, Write]:
    """Folders of one image each."""
    half = int((MOST / 8) ** 0.5)  # side of an image of 64 bits that is MOST as it is stored
    contents: dict[str, tuple[str, Write]] = {
        "deflated zeros": ("a.tif", tiles(8, SHRUNK)),
        "deflated differences": ("a.tif", tiles(8, SHRUNK // 2, predictor=2)),
        "deflated floats": ("a.tif", tiles(8, SHRUNK // 2, bits=32, form=3, predictor=3)),
        "zeros of LZW": ("a.tif", tiles(5, SHRUNK)),
        "zeros of LZMA": ("a.tif", tiles(34925, SHRUNK // 4)),
        "JPEG 2000": ("a.tif", tiles(33003, SHRUNK // 4)),
        "missing chunks": ("a.zarr", chunks(SHRUNK, "|u1", None)),
        "equal chunks": ("a.zarr", chunks(SHRUNK // 4, "|u1", "bz2")),
        "chunks of 64 bits": ("a.zarr", chunks(MOST, "<f8", None)),
        "bytes in a map": ("a.npy", npy("|u1", int(SHRUNK**0.5))),
        "floats of 64 bits": ("a.npy", npy("<f8", int(2**0.5 * half))),
        "floats of 64 bits in one strip": ("a.tif", strip(64, 3, half)),
        "bytes with a sign": ("a.npy", npy("|i1", int((MOST / 2) ** 0.5))),
        "16 bits and 89 million pixels": ("a.png", deep_png(9459)),
        "floats": ("a.npy", npy("<f4", int((MOST / 4) ** 0.5))),
        "DICOM that is rescaled": ("a.dcm", dicom(int((MOST / 4) ** 0.5))),
    }
    return {f"an array of {k}": _alone(name, write) for k, (name, write) in contents.items()}


def _alone(name: str, write: Write) -> Write:
    def make(path: Path) -> None:
        path.mkdir()
        write(path / name)

    return make


def npy(dtype: str, side: int) -> Write:
    """A sparse .npy file of zeros."""

    def make(path: Path) -> None:
        about = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({side}, {side}), }}\n"
        with path.open("wb") as file:
            file.write(b"\x93NUMPY\x01\0" + struct.pack("<H", len(about)) + about.encode())
            file.truncate(file.tell() + side * side * np.dtype(dtype).itemsize)

    return make


def _entry(tag: int, values: list[int], at: int) -> bytes:
    kind = 16 if tag in (324, 325, 273, 279) else 4
    place = struct.pack("<Q", at if len(values) > 1 else values[0])
    return struct.pack("<HHQ", tag, kind, len(values)) + place


def _tiff(tags: dict[int, list[int]], data: bytes) -> bytes:
    """A BigTIFF with `data` at byte 16."""
    table, far, at = b"", b"", 16 + len(data)
    for tag, values in sorted(tags.items()):
        table += _entry(tag, values, at + len(far))
        if len(values) > 1:
            far += struct.pack(f"<{len(values)}{'Q' if tag in (324, 325) else 'I'}", *values)
    head = b"II+\0\x08\0\0\0" + struct.pack("<Q", at + len(far))
    return head + data + far + struct.pack("<Q", len(tags)) + table + bytes(8)


def tiles(
    compression: int, size: int, *, bits: int = 8, form: int = 1, predictor: int = 1
) -> Write:
    """A TIFF of `size` bytes, whose tiles all lie on the same few bytes."""

    def make(path: Path) -> None:
        zeros = np.zeros((TILE, TILE), np.dtype(f"u{bits // 8}"))
        if compression == 8:
            data = zlib.compress(zeros.tobytes(), 9)
        elif compression == 1:
            data = zeros.tobytes()
        else:
            import imagecodecs

            name = {5: "lzw", 34925: "lzma", 33003: "jpeg2k"}[compression]
            data = getattr(imagecodecs, f"{name}_encode")(zeros)
        across = int((size * 8 // bits) ** 0.5) // TILE
        n = across * across
        tags = {256: [across * TILE], 257: [across * TILE], 258: [bits], 259: [compression],
                262: [1], 277: [1], 317: [predictor], 322: [TILE], 323: [TILE], 324: [16] * n,
                325: [len(data)] * n, 339: [form]}  # fmt: skip
        path.write_bytes(_tiff(tags, data))

    return make


def strip(bits: int, form: int, side: int) -> Write:
    """A sparse uncompressed TIFF of one strip."""

    def make(path: Path) -> None:
        tags = {256: [side], 257: [side], 258: [bits], 259: [1], 262: [1], 273: [4096],
                277: [1], 278: [side], 279: [side * side * bits // 8], 339: [form]}  # fmt: skip
        with path.open("wb") as file:
            file.write(_tiff(tags, b""))
            file.truncate(4096 + side * side * bits // 8)

    return make


def chunks(size: int, dtype: str, codec: str | None) -> Write:
    """A zarr array of zeros: chunks that are left out, or links to the same few bytes."""

    def make(path: Path) -> None:
        path.mkdir()
        side = int((size / np.dtype(dtype).itemsize) ** 0.5) // 4096
        about = {"zarr_format": 2, "shape": [side * 4096] * 2, "chunks": [4096] * 2, "dtype": dtype,
                 "compressor": codec and {"id": codec}, "filters": None, "fill_value": 0,
                 "order": "C"}  # fmt: skip
        (path / ".zarray").write_text(json.dumps(about))
        if codec:
            import imagecodecs

            data = getattr(imagecodecs, f"{codec}_encode")(bytes(4096**2))
            (path / "0.0").write_bytes(data)
            for y in range(side):
                for x in range(side):
                    if x or y:
                        os.link(path / "0.0", path / f"{y}.{x}")

    return make


def deep_png(side: int) -> Write:
    """A PNG of one colour and 16 bits."""

    def make(path: Path) -> None:
        squeeze = zlib.compressobj(1)
        row = bytes(1 + 6 * side)
        data = b"".join(squeeze.compress(row) for _ in range(side)) + squeeze.flush()
        about = struct.pack(">2I5B", side, side, 16, 2, 0, 0, 0)
        every = [(b"IHDR", about), (b"IDAT", data), (b"IEND", b"")]
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + b"".join(
                struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d))
                for name, d in every
            )
        )

    return make


def dicom(side: int) -> Write:
    """A sparse DICOM of 16 bits with a slope of a half."""

    def element(group: int, number: int, kind: bytes, value: bytes) -> bytes:
        value += b" " * (len(value) % 2) if kind not in (b"UI", b"US") else b"\0" * (len(value) % 2)
        return struct.pack("<HH2sH", group, number, kind, len(value)) + value

    def make(path: Path) -> None:
        meta = element(2, 2, b"UI", b"1.2.840.10008.5.1.4.1.1.7")
        meta += element(2, 3, b"UI", b"1.2.3") + element(2, 16, b"UI", b"1.2.840.10008.1.2.1")
        short = partial(struct.pack, "<H")
        body = b"".join(
            [
                element(0x28, 2, b"US", short(1)),
                element(0x28, 4, b"CS", b"MONOCHROME2"),
                element(0x28, 0x10, b"US", short(side)),
                element(0x28, 0x11, b"US", short(side)),
                element(0x28, 0x100, b"US", short(16)),
                element(0x28, 0x101, b"US", short(16)),
                element(0x28, 0x102, b"US", short(15)),
                element(0x28, 0x103, b"US", short(0)),
                element(0x28, 0x1052, b"DS", b"0"),
                element(0x28, 0x1053, b"DS", b"0.5"),
                struct.pack("<HH2sHI", 0x7FE0, 0x10, b"OW", 0, 2 * side * side),
            ]
        )
        length = struct.pack("<HH2sHI", 2, 0, b"UL", 4, len(meta))
        with path.open("wb") as file:
            file.write(bytes(128) + b"DICM" + length + meta + body)
            file.truncate(file.tell() + 2 * side * side)

    return make


def archives() -> dict[str, Write]:
    """Archives that expand as far as they may, and further when their numbers are converted."""
    return {f"npz of many of {k}.npz": _archive(dtype, size) for k, dtype, size in (
        ("signed bytes", "|i1", MOST), ("bits", "|b1", MOST), ("halves", "<f2", MOST),
        ("doubles", "<f8", MOST), ("floats", "<f4", MOST), ("bytes", "|u1", MOST),
    )}  # fmt: skip


def _archive(dtype: str, size: int) -> Write:
    def make(path: Path) -> None:
        n = (size - 1000) // (np.dtype(dtype).itemsize * 3 * 1024**2)
        about = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({n}, 1024, 1024, 3), }}\n"
        header = b"\x93NUMPY\x01\0" + struct.pack("<H", len(about)) + about.encode()
        buffer: Any = io.BytesIO()
        each = np.dtype(dtype).itemsize * 3 * 1024**2
        with (
            zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out,
            out.open("images.npy", "w") as file,
        ):
            file.write(header)
            for _ in range(n):
                file.write(bytes(each))
        path.write_bytes(buffer.getvalue())

    return make


# ------------------------------------------------------------------------------ Parquet


def tables() -> dict[str, Write]:
    """Tables whose footer says that they hold next to nothing."""
    return {
        "table that lies about a page.parquet": lying(1, 7 * 10**8, 1),
        "table that lies about pages.parquet": lying(700, 10**6, 700),
        "table that lies about a dictionary.parquet": lying(100, 10**6, 20_000),
        "table that lies about its rows.parquet": many_as_few,
    }


def many_as_few(path: Path, pages: str = "1.0") -> None:
    """Two million rows without an image or a label, of which the footer counts forty."""
    import pyarrow as pa

    count = 2_000_000
    none = pa.StructArray.from_arrays([pa.nulls(count, pa.binary())], ["bytes"])
    table = pa.table({"image": none, "label": pa.array(np.zeros(count, np.int64))})
    _write_lie(path, table, {count: 40}, data_page_version=pages)


def lying(values: int, size: int, rows: int) -> Write:
    """So many images of `size` bytes in as many rows or more."""

    def make(path: Path) -> None:
        import pyarrow as pa

        each = pa.array([i.to_bytes(2, "big") * (size // 2) for i in range(values)], pa.binary())
        if rows > values:
            index = np.arange(rows, dtype=np.int32) % values
            each = pa.DictionaryArray.from_arrays(index, each)
        table = pa.table({"image": pa.StructArray.from_arrays([each], ["bytes"])})
        _write_lie(path, table, use_dictionary=rows > values, dictionary_pagesize_limit=2**30)

    return make


def _write_lie(path: Path, table: Any, lies: dict[int, int] | None = None, **options: Any) -> None:
    """A table of one row group with `lies` in its footer; by default its columns take one byte."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        table, path, row_group_size=len(table), compression="zstd", store_schema=False, **options
    )
    about, data = pyarrow.parquet.read_metadata(path).row_group(0), path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    if lies is None:
        sizes = [about.column(i).total_uncompressed_size for i in range(about.num_columns)]
        lies = dict.fromkeys([about.total_byte_size, *sizes], 1)
    for number, lie in lies.items():
        true, false = _zigzag(number), _zigzag(lie)
        if more := len(true) - len(false):  # as many bytes, with zeros that mean nothing
            false = bytes([*false[:-1], false[-1] | 128]) + b"\x80" * (more - 1) + b"\0"
        footer = footer.replace(true, false)
    path.write_bytes(data[:start] + footer)


def _zigzag(value: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    value, found = 2 * value, b""
    while value > 127:
        value, found = value >> 7, found + bytes([value & 127 | 128])
    return found + bytes([value])
