"""Opens an image as an array, whatever its format."""

import os

from stopmim.data.decode import BadImageError, one_reason
from stopmim.data.rasters import tiff_tags
from stopmim.data.rasters.dicom import Dicom, is_dicom
from stopmim.data.rasters.npy import MAGIC as NPY
from stopmim.data.rasters.npy import open_npy, open_npz
from stopmim.data.rasters.pictures import is_deep, open_picture
from stopmim.data.rasters.raster import SMALL, Raster, Stored
from stopmim.data.rasters.tiff import is_picture, open_tiff
from stopmim.data.rasters.zarr import SUFFIX as ZARR
from stopmim.data.rasters.zarr import open_zarr

# Files that are never pictures. TIFF, PNG and PGM may be either; all others are pictures.
EXTENSIONS = ["npy", "npz", "zarr", "dcm", "dicom", "btf", "tf8"]
ARRAYS = tuple(f".{extension}".encode() for extension in EXTENSIONS)
ZIP = b"PK\3\4"
HEAD = 1024  # bytes that tell the format


def open_raster(path: bytes) -> Raster:
    """The image in a file, or in a folder of zarr; the format is detected from the content."""
    with one_reason():
        stored = load(path)
        return open_stored(stored) if isinstance(stored, Stored) else stored


def load(path: bytes, small: int = SMALL) -> Stored | Raster:
    """The bytes of a file, not parsed yet; or the array in a folder of zarr."""
    if path.lower().endswith(ZARR) and os.path.isdir(path):
        return open_zarr(path)
    return Stored.open(path, small)


def open_bytes(data: bytes) -> Raster:
    """The image in a file that was read already, as from a shard."""
    if not data:
        raise BadImageError("empty file")
    with one_reason():
        return open_stored(Stored(data))


def open_stored(stored: Stored) -> Raster:
    start = bytes(stored.data[:HEAD])
    if start[:4] in tiff_tags.MAGIC:
        return open_tiff(stored)
    if start.startswith(NPY):
        return open_npy(stored)
    if start.startswith(ZIP):
        return open_npz(stored)
    if is_dicom(start):
        return Dicom(stored)
    return open_picture(stored)


def is_ordinary(stored: Stored) -> bool:
    """Whether a file is a picture of 8 bits, which decode.py reads."""
    start = bytes(stored.data[:HEAD])
    if start[:4] in tiff_tags.MAGIC:
        return is_picture(stored)
    return not (is_deep(start) or start.startswith((NPY, ZIP)) or is_dicom(start))
