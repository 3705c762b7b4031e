"""Images that are either pictures, or arrays of one form: the base of folders, lists and shards."""

import hashlib

import numpy as np

from stopmim.data.channels import Form
from stopmim.data.decode import decode
from stopmim.data.rasters.open import Names, checked, find_form, open_bytes
from stopmim.data.rasters.raster import Raster, Stored
from stopmim.data.rasters.windows import read_whole


class FileImages:
    """Images in files; if they are arrays, their common form is part of the fingerprint."""

    fingerprint: str
    form: Form | None = None  # of the arrays; None: ordinary pictures, decoded to RGB

    def detect_form(
        self, name: str, names: Names, *, arrays: bool | None = None, named: bool = True
    ) -> None:
        """Infers the form of all images `names` from a few of them: see `find_form`."""
        self.form = find_form(name, names, self._glance, arrays=arrays, named=named)
        if self.form:
            self.channels, self.kind = self.form.channels, self.form.kind
            self.channel_names = list(self.form.names)
            text = f"{self.fingerprint} {self.channels} {self.kind}"
            self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def open(self, i: int) -> Raster | None:
        return self.form and checked(self._raster(i), self.form)

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
