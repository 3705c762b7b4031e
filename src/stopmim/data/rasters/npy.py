""".npy and .npz: arrays of NumPy, never pickles."""

import io
import math
import mmap
import tokenize
import zipfile

import numpy as np

from stopmim.data.decode import BadImageError
from stopmim.data.rasters.raster import MOST, Plain, Stored, channels_last

MAGIC = b"\x93NUMPY"
MAX_HEADER = 10_000  # bytes; NumPy's own limit

Header = tuple[tuple[int, ...], bool, np.dtype]  # shape, whether in Fortran's order, type


def open_npy(stored: Stored) -> Plain:
    """An array (H, W), (H, W, C) or (C, H, W); a large file is mapped, not read."""
    return Plain(channels_last(_array(stored.data)), stored=stored)


def open_npz(stored: Stored) -> Plain:
    """The only array of an archive with two axes or more; others, as of labels, are ignored."""
    with stored.stream() as stream, zipfile.ZipFile(stream) as archive:
        found = [member for member in archive.infolist() if _is_image(archive, member)]
        if len(found) != 1:
            raise BadImageError(f"{len(found)} arrays that may be the image; expected one")
        if found[0].file_size > MOST:
            raise BadImageError(f"{found[0].file_size >> 20} MiB unpacked; save it as .npy")
        with archive.open(found[0]) as file:
            return Plain(channels_last(_array(file.read(MOST))))


def _array(data: bytes | mmap.mmap) -> np.ndarray:
    start = io.BytesIO(data[:MAX_HEADER])
    shape, fortran, dtype = _header(start)
    if dtype.hasobject:
        raise BadImageError("objects of Python, which are never read: only arrays of numbers")
    at, size = start.tell(), math.prod(shape) * dtype.itemsize
    if not size or min(shape) < 0 or at + size > len(data):
        raise BadImageError(f"the header says {shape} of {dtype}, the file has {len(data)} bytes")
    return np.ndarray(shape, dtype, data, at, order="F" if fortran else "C")


def _header(start: io.BytesIO) -> Header:
    try:
        if np.lib.format.read_magic(start) == (1, 0):
            return np.lib.format.read_array_header_1_0(start, max_header_size=MAX_HEADER)
        return np.lib.format.read_array_header_2_0(start, max_header_size=MAX_HEADER)
    except (ValueError, SyntaxError, tokenize.TokenError, TypeError, RecursionError, MemoryError):
        raise BadImageError("not a .npy file with a valid header") from None


def _is_image(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    with archive.open(member) as file:
        start = io.BytesIO(file.read(MAX_HEADER))
    return start.getvalue().startswith(MAGIC) and len(_header(start)[0]) >= 2
