"""DICOM images, by pydicom.

Stored values become measured ones by rescale slope and intercept, as Hounsfield units of CT: int16
if both are whole numbers and every possible value fits, otherwise float32. MONOCHROME1, where low
values are bright, is turned round. Frames are channels, like the planes of other formats.
"""

from typing import Any, BinaryIO

import numpy as np

from stopmim.config.data import Kind
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError, quiet
from stopmim.data.rasters.raster import (
    STRIP,
    Raster,
    Stored,
    bytes_of,
    check_bytes,
    check_shape,
    cut,
    extra,
)

MARK = b"DICM"  # at byte 128


def is_dicom(start: bytes) -> bool:
    return start[128:132] == MARK


class Dicom(Raster):
    """An open file; its pixels are always decoded whole."""

    def __init__(self, stored: Stored) -> None:
        pydicom = extra("pydicom", "dicom", "DICOM")
        with quiet, stored.stream() as stream:
            # Without the marker pydicom would take any file for one.
            self.file = pydicom.dcmread(
                _Parts(stream), specific_tags=_TAGS, stop_before_pixels=True
            )
        self.stored = stored
        about = self.file
        self.bits, self.signed = int(about.get("BitsStored", 0)), about.get("PixelRepresentation")
        self.frames = int(about.get("NumberOfFrames") or 1)
        planes = int(about.get("SamplesPerPixel", 1)) * self.frames
        rows, columns = int(about.get("Rows", 0)), int(about.get("Columns", 0))
        self.shape = check_shape(rows, columns, planes)
        self.slope = float(about.get("RescaleSlope", 1))
        self.intercept = float(about.get("RescaleIntercept", 0))
        if not 0 < self.bits <= 16 or not np.isfinite([self.slope, self.intercept]).all():
            raise BadImageError(f"DICOM of {self.bits} bits, rescaled by {self.slope}, is not read")
        self.kind = self._kind()
        self.tall, self.tile = rows, bytes_of(self)

    def read(self, box: Box | None = None) -> np.ndarray:
        check_bytes(self, None)
        pydicom = extra("pydicom", "dicom", "DICOM")
        with quiet, self.stored.stream() as stream:
            file = pydicom.dcmread(_Parts(stream))
            try:
                pixels = np.asarray(file.pixel_array)
            except (NotImplementedError, RuntimeError, AttributeError):
                raise BadImageError(_why_not(file)) from None
        del file  # with the bytes that the pixels were in
        height, width, channels = self.shape
        if pixels.size != height * width * channels:
            raise BadImageError(f"{pixels.shape} pixels, expected {self.shape}")
        if self.frames == 1:
            pixels = pixels.reshape(self.shape)
        else:  # (F, H, W) or (F, H, W, S)
            pixels = np.moveaxis(pixels.reshape(self.frames, height, width, -1), 0, 2)
            pixels = pixels.reshape(self.shape)
        return self._measured(cut(pixels, box))

    def _range(self) -> tuple[int, int]:
        """Smallest and largest stored value."""
        if self.signed:
            return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        return 0, 2**self.bits - 1

    @property
    def _rescaled(self) -> bool:
        return (self.slope, self.intercept) != (1, 0)

    def _kind(self) -> Kind:
        if not self._rescaled:
            return "int16" if self.signed else "uint8" if self.bits <= 8 else "uint16"
        ends = [self.slope * value + self.intercept for value in self._range()]
        whole = self.slope.is_integer() and self.intercept.is_integer()
        fits = min(ends) >= -(2**15) and max(ends) < 2**15
        return "int16" if whole and fits else "float32"

    def _measured(self, stored: np.ndarray) -> np.ndarray:
        turned = self.file.get("PhotometricInterpretation") == "MONOCHROME1"
        if not turned and not self._rescaled:
            return stored.astype(self.kind, copy=False)
        found = np.empty(stored.shape, self.kind)
        rows = max(1, STRIP // (8 * stored[:1].size))  # as floats of 64 bits on the way
        for top in range(0, len(stored), rows):
            part = stored[top : top + rows]
            if turned:
                part = sum(self._range()) - part.astype(np.int32)
            if self._rescaled:
                part = part * self.slope + self.intercept
            found[top : top + rows] = part
        return found


class _Parts:
    """A stream that is read in parts of a stated size, for pydicom.

    Only to inflate a file, to any size, does it ask for the rest as a whole. This notices whatever
    makes pydicom take the file for a deflated one, and wherever in the file that is.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise BadImageError("deflated DICOM is not read; decompress it first")
        return self.stream.read(size)


_TAGS = ["BitsStored", "PixelRepresentation", "SamplesPerPixel", "NumberOfFrames", "Rows",
         "Columns", "RescaleSlope", "RescaleIntercept", "PhotometricInterpretation"]  # fmt: skip


def _why_not(file: Any) -> str:
    syntax = getattr(getattr(file, "file_meta", None), "TransferSyntaxUID", None)
    name = getattr(syntax, "name", None) or "unknown"
    return f"DICOM with pixels that cannot be decoded ({name}); decompress it first"
