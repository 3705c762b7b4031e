"""Images that are either pictures, or arrays of one form: the base of folders, lists and shards."""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from stopmim.base.errors import DataError, UserError
from stopmim.data.channels import Form
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError, decode, one_reason
from stopmim.data.rasters.open import ARRAYS, is_ordinary, open_bytes, open_stored
from stopmim.data.rasters.raster import MissingExtraError, Raster, Stored, form_of
from stopmim.data.rasters.windows import read_whole

SAMPLE = 32  # files that are looked at
EITHER = (b".tif", b".tiff", b".png", b".pgm", b".ppm")  # pictures or arrays


class FileImages:
    """Images in files; if they are arrays, their common form is part of the fingerprint."""

    fingerprint: str
    form: Form | None = None  # of the arrays; None: ordinary pictures, decoded to RGB

    def detect_form(
        self, source: str, names: Sequence[bytes], *, arrays: bool | None = None
    ) -> None:
        """Finds the common form of the images `names`, unless they are ordinary pictures.

        `SAMPLE` files are looked at, evenly spaced. If at least half of them are pictures, all are
        read as pictures: then the others are unusual ones, or broken. `arrays` decides instead of
        looking. A file that is called x.jpg is a picture, and need not be opened; names may be b"".
        """
        if arrays is False:
            return
        found: list[tuple[str, Form | None]] = []
        for i in np.unique(np.linspace(0, len(names) - 1, SAMPLE).astype(int)).tolist():
            if names[i] and not arrays and not names[i].lower().endswith((*EITHER, *ARRAYS)):
                found.append((os.fsdecode(names[i]), None))
                continue
            try:
                with one_reason():
                    found.append((os.fsdecode(names[i]), _form(self._glance(i), bool(arrays))))
            except MissingExtraError as error:
                raise UserError(f"{source}: {error}") from None
            except BadImageError:  # reading it will say why
                continue
        if 2 * sum(form is None for _, form in found) < len(found):
            self.form = _common_form(source, found)
            self.channels, self.kind = self.form.channels, self.form.kind
            self.channel_names = list(self.form.names)
            text = f"{self.fingerprint} {self.channels} {self.kind}"
            self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def open(self, i: int) -> Raster | None:
        if self.form is None:
            return None
        raster = self._raster(i)
        if not (own := form_of(raster)).is_like(self.form):
            raise BadImageError(f"{own}, where the others have {self.form}")
        return raster

    def read(self, i: int) -> np.ndarray:
        return self.read_reduced(i, None)

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        raster = self.open(i)
        return read_whole(raster) if raster else decode(self._data(i), enough=enough)

    def _data(self, i: int) -> bytes:
        """The file of image `i`; raises BadImageError if it cannot be read."""
        raise NotImplementedError

    def _raster(self, i: int) -> Raster:
        return open_bytes(self._data(i))

    def _glance(self, i: int) -> Stored | Raster:
        """Image `i`, to look at its header."""
        return Stored(self._data(i))


def _form(loaded: Stored | Raster, arrays: bool) -> Form | None:
    """The form of an array; None for an ordinary picture, if it need not be an array."""
    if isinstance(loaded, Stored):
        if not arrays and is_ordinary(loaded):
            return None
        loaded = open_stored(loaded)
    loaded.read(Box(0, 0, 1, 1))  # a missing decoder is noticed at once
    return form_of(loaded)


def _common_form(source: str, found: list[tuple[str, Form | None]]) -> Form:
    """The form of the first array, which all files must have."""
    first, form = next((name, form) for name, form in found if form is not None)
    for name, other in found:
        if other is None or not other.is_like(form):
            what = f"has {other}" if other else "is an ordinary picture"
            raise DataError(
                f"{source}: {first} has {form}, but {name} {what}; "
                f"put images of one kind in a folder, or read all as pictures: pictures:FOLDER"
            )
    return form
