"""Hostile and odd files of arrays, and a process of little memory that opens them.

As a program: writes every file into the folder that it is given, opens each as an array, and prints
one JSON line for each: name, what happened, seconds of the processor.
"""

import gzip
import io
import json
import os
import pickle
import resource
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MEMORY = 2**30  # bytes of address space beyond those of the libraries
MARK = "executed"  # file that a hostile one would leave
BOMB = 2**29 + 2**24  # bytes, more than is ever held

Write = Callable[[Path], Any]


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path.parent / MARK), "w"))


def npy(header: str, data: bytes = b"", version: int = 1, length: int | None = None) -> Write:
    text = header.encode()
    form = "<H" if version == 1 else "<I"
    size = struct.pack(form, len(text) if length is None else length)
    return lambda path: path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + text + data)


def array(descr: str, shape: object, data: bytes = b"\0" * 64) -> Write:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape!r}}}\n", data)


def npz(**members: np.ndarray) -> Write:
    return lambda path: np.savez_compressed(path, **members)  # type: ignore[arg-type]


def zip_bomb(path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (BOMB // 2**15, 2**15)}
    )
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("image.npy", "w") as file,
    ):
        file.write(header.getvalue())
        for _ in range(BOMB // 2**24):
            file.write(bytes(2**24))


def tiff(
    *,
    size: tuple[int, int] = (16, 16),
    data: bytes = bytes(256),
    next_at: int = 0,
    **tags: Any,
) -> Write:
    """A TIFF of one strip; `tags` replace its entries, as t259=(3, [8]): type and values."""
    entries: dict[int, Any] = {
        **{256: (4, [size[1]]), 257: (4, [size[0]]), 258: (3, [8]), 259: (3, [1])},
        **{262: (3, [1]), 273: (4, [8]), 277: (3, [1]), 278: (4, [size[0]])},
        **{279: (4, [len(data)])},
    }
    entries |= {int(tag[1:]): value for tag, value in tags.items()}
    table = b""
    for tag, (kind, values) in sorted(entries.items()):
        if isinstance(values, bytes):  # raw: count and value
            table += struct.pack("<HH", tag, kind) + values
        else:
            inline = struct.pack({3: "<H", 4: "<I"}[kind], values[0]).ljust(4, b"\0")
            table += struct.pack("<HHI", tag, kind, len(values)) + inline
    at = 8 + len(data)
    whole = b"II*\0" + struct.pack("<I", at) + data + struct.pack("<H", len(entries)) + table
    return lambda path: path.write_bytes(whole + struct.pack("<I", next_at))


def pages(count: int) -> Write:
    def write(path: Path) -> None:
        import tifffile

        tifffile.imwrite(path, np.zeros((count, 16, 16), np.uint16), photometric="minisblack")

    return write


def cut(write: Write, keep: int) -> Write:
    def both(path: Path) -> None:
        write(path)
        path.write_bytes(path.read_bytes()[:keep])

    return both


def tiles(**options: Any) -> Write:
    def write(path: Path) -> None:
        import tifffile

        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        tifffile.imwrite(path, pixels, tile=(32, 32), photometric="rgb", **options)

    return write


def lying_jpeg(path: Path) -> None:
    """A tile of 32x32 pixels whose own header says 65500x65500."""
    tiles(compression="jpeg")(path)
    data = bytearray(path.read_bytes())
    for at in range(len(data) - 9):
        if data[at : at + 2] == b"\xff\xc0":
            data[at + 5 : at + 9] = struct.pack(">HH", 65500, 65500)
    path.write_bytes(bytes(data))


def zarr2(files: dict[str, bytes] | None = None, **changes: Any) -> Write:
    about: dict[str, Any] = {
        **{"zarr_format": 2, "shape": [64, 64], "chunks": [32, 32], "dtype": "<u2"},
        **{"compressor": None, "filters": None, "fill_value": 0, "order": "C"},
    }

    def write(path: Path) -> None:
        path.mkdir()
        (path / ".zarray").write_text(json.dumps(about | changes))
        for name, data in (files or {}).items():
            (path / name).write_bytes(data)

    return write


def zarr_files(**files: bytes) -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        for name, data in files.items():
            (
                path / {"json": "zarr.json", "group": ".zgroup", "attrs": ".zattrs"}[name]
            ).write_bytes(data)

    return write


def pipe_chunk(path: Path) -> None:
    zarr2()(path)
    os.mkfifo(path / "0.0")


def pickled_chunk(path: Path) -> None:
    write = zarr2(
        {"0.0": pickle.dumps(Evil(path))}, dtype="|O", filters=[{"id": "pickle", "protocol": 5}]
    )
    write(path)


def dicom(
    pixels: bytes | None = bytes(512), syntax: str = "1.2.840.10008.1.2.1", **about: Any
) -> Write:
    def write(path: Path) -> None:
        from pydicom import dcmwrite
        from pydicom.dataset import Dataset, FileMetaDataset
        from pydicom.uid import UID

        file = Dataset()
        file.file_meta = FileMetaDataset()
        file.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.2")
        file.file_meta.MediaStorageSOPInstanceUID = UID("1.2.3")
        file.file_meta.TransferSyntaxUID = UID("1.2.840.10008.1.2.1")
        stated: dict[str, Any] = {
            **{"Rows": 16, "Columns": 16, "SamplesPerPixel": 1, "BitsAllocated": 16},
            **{"BitsStored": 16, "HighBit": 15, "PixelRepresentation": 0},
            "PhotometricInterpretation": "MONOCHROME2",
        }
        for name, value in (stated | about).items():
            setattr(file, name, value)
        if pixels is not None:
            file.PixelData = pixels
            file["PixelData"].VR = "OW"
        dcmwrite(path, file, enforce_file_format=True)
        old = b"1.2.840.10008.1.2.1\0"
        path.write_bytes(
            path.read_bytes().replace(old, syntax.encode().ljust(len(old), b"\0")[: len(old)], 1)
        )

    return write


def deflated_dicom(before: int) -> Write:
    """What follows the header is a deflate stream, which pydicom unpacks whole.

    The header says so after an element of `before` bytes.
    """

    def element(number: int, value: bytes) -> bytes:
        return struct.pack("<HH2sH", 2, number, b"UI", len(value)) + value

    def write(path: Path) -> None:
        name, syntax = b"1.2.3".ljust(before, b"\0"), b"1.2.840.10008.1.2.1.99"
        header = element(2, b"1.2.3\0") + element(3, name) + element(0x10, syntax)
        length = struct.pack("<HH2sHI", 2, 0, b"UL", 4, len(header))
        squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
        block = squeeze.compress(bytes(2**24)) + squeeze.flush(zlib.Z_FULL_FLUSH)
        path.write_bytes(bytes(128) + b"DICM" + length + header + block * (2 * BOMB // 2**24))

    return write


def png(width: int, height: int, data: bytes = b"") -> Write:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data))
    return lambda path: path.write_bytes(whole + chunk(b"IEND", b""))


def raw(data: bytes) -> Write:
    return lambda path: path.write_bytes(data)


def ome_group(place: str) -> Write:
    image = {"axes": ["y", "x"], "datasets": [{"path": place}]}
    attributes = json.dumps({"multiscales": [image]}).encode()
    return zarr_files(group=b'{"zarr_format": 2}', attrs=attributes)


def array3(**changes: Any) -> Write:
    grid = {"name": "regular", "configuration": {"chunk_shape": [32, 32]}}
    about: dict[str, Any] = {
        **{"zarr_format": 3, "node_type": "array", "shape": [64, 64], "data_type": "uint16"},
        **{"chunk_grid": grid, "fill_value": 0, "codecs": [{"name": "bytes"}]},
        "chunk_key_encoding": {"name": "default"},
    }
    return zarr_files(json=json.dumps(about | changes).encode())


def pickled_npy(path: Path) -> None:
    np.save(path, np.array([[Evil(path)]]), allow_pickle=True)


def pickled_npz(path: Path) -> None:
    np.savez(path, np.array([[Evil(path)]]), allow_pickle=True)


NO_TILES: dict[str, Any] = {f"t{tag}": (4, [0]) for tag in range(322, 326)}
TURNED = {"name": "transpose", "configuration": {"order": [0, 0]}}
FLOATS = np.array([[np.nan, np.inf], [-np.inf, 1e38]], np.float32)

# Files that are refused, each with a part of the reason.
HOSTILE: dict[str, tuple[Write, str]] = {
    "pickled.npy": (pickled_npy, "objects of Python"),
    "absurd.npy": (array("'<f4'", (10**9, 10**9)), "the header says"),
    "overflowing.npy": (array("'<f4'", (2**62, 4)), "the header says"),
    "negative.npy": (array("'<f4'", (-4, -4)), "the header says"),
    "structure.npy": (array("[('a', '<f4')]", (4, 4)), "are not read"),
    "complex.npy": (array("'<c8'", (2, 4)), "are not read"),
    "text.npy": (array("'<U4'", (2, 2)), "are not read"),
    "cut.npy": (array("'<u2'", (64, 64)), "the header says"),
    "garbage.npy": (npy("{'descr': open('x')}"), "valid header"),
    "nested.npy": (npy("(" * 60000), "valid header"),
    "long.npy": (npy("{}", version=2, length=2**31), "valid header"),
    "line.npy": (array("'|u1'", (64,)), "not an image"),
    "five.npy": (array("'|u1'", (2, 2, 2, 2, 2)), "not an image"),
    "planes.npy": (array("'|u1'", (100, 100, 100), bytes(10**6)), "at most 64"),
    "bomb.npz": (zip_bomb, "MiB unpacked"),
    "two.npz": (npz(a=np.zeros((4, 4)), b=np.zeros((4, 4))), "2 arrays"),
    "none.npz": (npz(label=np.zeros(4)), "0 arrays"),
    "pickled.npz": (pickled_npz, "objects of Python"),
    "cut.npz": (cut(npz(a=np.arange(10000).reshape(100, 100)), 200), "zip"),
    "looping.tif": (tiff(next_at=8 + 256), "loop"),
    "beyond.tif": (raw(b"II*\0" + struct.pack("<I", 2**31)), "ends at byte"),
    "absurd.tif": (tiff(size=(2**31, 2**31)), "not an image"),
    "vast.tif": (tiff(size=(2**20, 2**20), t258=(3, [64]), t339=(3, [3])), "too large to be read"),
    "strip.tif": (tiff(t273=(4, [2**31])), "ends"),
    "short.tif": (tiff(data=bytes(100)), "expected 256"),
    "codec.tif": (tiff(t259=(3, [60000])), "compression 60000"),
    "lzw.tif": (tiff(t259=(3, [5]), data=b"\xff" * 99), "Error|expected 256"),
    "deflate.tif": (tiff(t259=(3, [8]), data=b"\xff" * 99), "Error"),
    "entries.tif": (raw(b"II*\0\x08\0\0\0\xff\xff" + bytes(99)), "entries"),
    "count.tif": (tiff(t273=(4, struct.pack("<II", 2**31 - 1, 8))), "a value of"),
    "tile.tif": (tiff(**NO_TILES), "tiles of 0x0"),
    "samples.tif": (tiff(t277=(3, [65535])), "at most 64"),
    "depths.tif": (tiff(t258=(3, struct.pack("<IHH", 2, 8, 16))), "different types"),
    "big.tif": (raw(b"II+\0\x08\0\0\0\x10"), "ends at byte"),
    "stack.tif": (pages(100), "at most 64"),
    "planes.tif": (cut(pages(4), 1200), "ends"),
    "jpeg.tif": (lying_jpeg, "Error"),
    "chunks.zarr": (zarr2(chunks=[10**6, 10**6]), "too large"),
    "no_chunks.zarr": (zarr2(chunks=[0, 0]), "in chunks of"),
    "tiny.zarr": (zarr2(shape=[20000, 20000], chunks=[1, 1]), "too many and too small"),
    "columns.zarr": (zarr2(shape=[4096, 300_000], chunks=[4096, 1]), "tiles of 4096 rows"),
    "shape.zarr": (zarr2(shape=[2**40, 2**40]), "not an image"),
    "holes.zarr": (zarr2(shape=[2**20] * 2, chunks=[4096] * 2), "2048 GiB, more than the 4 GiB"),
    "wide.zarr": (zarr2(shape=[4096, 4096], chunks=[1, 2**28]), "4096 tiles of .* too large"),
    "tall.zarr": (zarr2(shape=[2**16, 2**15], chunks=[2**16, 2**12]), "8 tiles of .* too large"),
    "low.zarr": (zarr2(shape=[2**16, 2**15], chunks=[2**16, 512]), "tiles of 65536 rows"),
    "pickled.zarr": (pickled_chunk, "filters|not read"),
    "objects.zarr": (zarr2(dtype="|O"), "not read"),
    "codec.zarr": (zarr2(compressor={"id": "pickle"}), "is not read"),
    "separator.zarr": (zarr2(dimension_separator="/../../"), "named with"),
    "cut.zarr": (zarr2({"0.0": bytes(7)}), "expected 2048"),
    "pipe.zarr": (pipe_chunk, "regular file"),
    "elsewhere.zarr": (ome_group("../../etc"), "elsewhere"),
    "root.zarr": (ome_group("/etc"), "elsewhere"),
    "nothing.zarr": (lambda path: path.mkdir(), "no zarr.json"),
    "text.zarr": (zarr_files(json=b"{"), "not JSON"),
    "nested.zarr": (zarr_files(json=b"[" * 10**5), "JSON"),
    "list.zarr": (zarr_files(json=b"[]"), "JSON object"),
    "grid.zarr": (array3(chunk_grid={"name": "rectilinear"}), "irregular"),
    "codec3.zarr": (array3(codecs=[{"name": "bytes"}, {"name": "evil"}]), "is not read"),
    "turned.zarr": (array3(codecs=[TURNED]), "permutation"),
    "bits.dcm": (dicom(BitsStored=64), "64 bits"),
    "absurd.dcm": (dicom(Rows=65535, Columns=65535), "more than the 4 GiB"),
    "frames.dcm": (dicom(NumberOfFrames=100000), "at most 64"),
    "pixels.dcm": (dicom(pixels=None), "cannot be decoded|Error"),
    "cut.dcm": (dicom(pixels=bytes(100)), "Error|cannot be decoded"),
    "syntax.dcm": (dicom(syntax="1.2.3.4.5"), "cannot be decoded|Error"),
    "jpeg.dcm": (dicom(syntax="1.2.840.10008.1.2.4"), "cannot be decoded|Error"),
    "deflated.dcm": (deflated_dicom(6), "deflated"),
    "far.dcm": (deflated_dicom(2000), "deflated"),
    "slope.dcm": (dicom(RescaleSlope="1e400", RescaleIntercept="0"), "rescaled|Error"),
    "marked.dcm": (raw(bytes(128) + b"DICM" + b"\xff" * 99), "Error|not"),
    "absurd.png": (png(2**30, 2**30), "not an image"),
    "vast.png": (png(2**16, 2**16), "more than"),
    "cut.png": (png(64, 64, bytes(99)), "Error"),
    "absurd.pgm": (raw(b"P5 9999999 9999999 65535\n"), "not an image"),
    "cut.pgm": (raw(b"P5 99 99 65535\n" + bytes(99)), "ends within"),
    "empty.npy": (raw(b""), "empty"),
    "folder.npy": (lambda path: path.mkdir(), "regular file|directory"),
}  # fmt: skip
# Files that are read all the same.
ODD: dict[str, Write] = {
    "nan.npy": lambda path: np.save(path, FLOATS),
    "big_endian.npy": lambda path: np.save(path, np.ones((8, 8), ">f8")),
    "bool.npy": lambda path: np.save(path, np.ones((8, 8), bool)),
    "padded.tif": tiff(data=bytes(999)),
    "bomb.tif": tiff(t259=(3, [8]), data=zlib.compress(bytes(2**25))),
    "subfile.tif": tiff(t330=(4, [8 + 256])),  # of itself
    "bomb.zarr": zarr2({"0.0": gzip.compress(bytes(2**25))}, compressor={"id": "gzip"}),
    "sparse.zarr": zarr2(shape=[1000, 1000]),
}


def main(folder: Path) -> None:
    import imagecodecs  # noqa: F401
    import pydicom  # noqa: F401

    from stopmim.data.decode import BadImageError
    from stopmim.data.rasters.open import open_raster
    from stopmim.data.rasters.windows import read_whole

    for name, write in {**{name: write for name, (write, _) in HOSTILE.items()}, **ODD}.items():
        write(folder / name)
    pages_used = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages_used * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name in [*HOSTILE, *ODD]:
        begin = time.process_time()
        try:
            raster = open_raster(os.fsencode(folder / name))
            found = f"read {read_whole(raster).shape}"
        except BadImageError as error:
            found = str(error)
        print(json.dumps([name, found, time.process_time() - begin]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
