"""Opens an image as an array, and decides whether the files of a source are pictures or arrays."""

import os
from collections.abc import Callable
from typing import Protocol

import numpy as np

from stopmim.base.errors import DataError, UserError
from stopmim.data.channels import Form
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError
from stopmim.data.rasters import tiff_tags
from stopmim.data.rasters.dicom import Dicom, is_dicom
from stopmim.data.rasters.npy import MAGIC as NPY
from stopmim.data.rasters.npy import open_npy, open_npz
from stopmim.data.rasters.pictures import is_deep, open_picture
from stopmim.data.rasters.raster import (
    SMALL,
    MissingExtraError,
    Raster,
    Stored,
    form_of,
    one_reason,
)
from stopmim.data.rasters.tiff import is_picture, open_tiff
from stopmim.data.rasters.zarr import SUFFIX as ZARR
from stopmim.data.rasters.zarr import open_zarr

# Files that are never pictures. TIFF, PNG and PGM may be either; all others are pictures.
EXTENSIONS = ["npy", "npz", "zarr", "dcm", "dicom", "btf", "tf8"]
ARRAYS = tuple(f".{extension}".encode() for extension in EXTENSIONS)
EITHER = (b".tif", b".tiff", b".png", b".pgm", b".ppm")
ZIP = b"PK\3\4"
SAMPLE = 32  # files that are looked at
HEAD = 1024  # bytes that tell the format


def open_raster(path: bytes) -> Raster:
    """The image in a file, or in a folder of zarr; the format is detected from the content."""
    with one_reason():
        stored = load(path)
        return _open(stored) if isinstance(stored, Stored) else stored


def load(path: bytes, small: int = SMALL) -> Stored | Raster:
    """The bytes of a file, for `find_form`; or the array in a folder of zarr."""
    if path.lower().endswith(ZARR) and os.path.isdir(path):
        return open_zarr(path)
    return Stored.open(path, small)


def open_bytes(data: bytes) -> Raster:
    """The image in a file that was read already, as from a shard."""
    if not data:
        raise BadImageError("empty file")
    with one_reason():
        return _open(Stored(data))


def _open(stored: Stored) -> Raster:
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


class Names(Protocol):
    """Names of files, in a list or packed."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> bytes: ...


def find_form(
    source: str,
    names: Names,
    load: Callable[[int], Stored | Raster],
    *,
    arrays: bool | None = None,
    named: bool = True,
) -> Form | None:
    """The common form of the arrays `names`; None if they are ordinary pictures.

    `SAMPLE` files are looked at, evenly spaced. If at least half of them are pictures, all are read
    as pictures: then the others are unusual ones, or broken. `arrays` decides instead of looking.
    `named`: a file that is called x.jpg is a picture, and need not be opened.
    """
    if arrays is False:
        return None
    found: list[tuple[str, Form | None]] = []
    for i in np.unique(np.linspace(0, len(names) - 1, SAMPLE).astype(int)).tolist():
        if named and not arrays and not names[i].lower().endswith((*EITHER, *ARRAYS)):
            found.append((os.fsdecode(names[i]), None))
            continue
        try:
            with one_reason():
                found.append((os.fsdecode(names[i]), _form(load(i), bool(arrays))))
        except MissingExtraError as error:
            raise UserError(f"{source}: {error}") from None
        except BadImageError:  # reading it will say why
            continue
    if 2 * sum(form is None for _, form in found) >= len(found):
        return None
    first, form = next((name, form) for name, form in found if form is not None)
    for name, other in found:
        if other is None or not other.is_like(form):
            what = f"has {other}" if other else "is an ordinary picture"
            raise DataError(
                f"{source}: {first} has {form}, but {name} {what}; "
                f"put images of one kind in a folder, or read all as pictures: pictures:FOLDER"
            )
    return form


def _form(loaded: Stored | Raster, arrays: bool) -> Form | None:
    if isinstance(loaded, Stored):
        if not arrays and is_ordinary(loaded):
            return None
        loaded = _open(loaded)
    loaded.read(Box(0, 0, 1, 1))  # a missing decoder is noticed at once
    return form_of(loaded)


def checked(raster: Raster, form: Form) -> Raster:
    """`raster`, if it is like the others of its source."""
    if not (own := form_of(raster)).is_like(form):
        raise BadImageError(f"{own}, where the others have {form}")
    return raster
