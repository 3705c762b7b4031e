"""Decodes image files to 8-bit RGB, however unusual or damaged.

EXIF orientation     applied
alpha, transparency  composited over white
CMYK, palette, 1-bit Pillow's conversion, without colour profiles
16-bit grey          65535 is white (Pillow's own `convert` makes 40000 white)
32-bit grey, float   values outside 0..65535, and all floats: scaled by their own range
animation, MPO       the first frame
"""

import contextlib
import importlib.util
import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, UnidentifiedImageError, features

try:
    import simplejpeg
except ImportError:  # the extra `fast`
    simplejpeg = None

# Pillow warns of a decompression bomb above this; 358 MB when decoded.
MAX_PIXELS = 89_478_485

# Pillow would try every format, and run ghostscript for an EPS file named x.jpg.
FORMATS = ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP"]
EXTENSIONS = ["jpg", "jpeg", "jpe", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"]
if features.check("avif"):  # Pillow can be built without it
    FORMATS, EXTENSIONS = [*FORMATS, "AVIF"], [*EXTENSIONS, "avif"]
READS_HEIC = importlib.util.find_spec("pillow_heif") is not None  # the extra `heic`
if READS_HEIC:
    EXTENSIONS = [*EXTENSIONS, "heic", "heif", "hif"]
# The start of such a file, after the length of its first box.
_HEIC = tuple(b"ftyp" + brand for brand in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"))

ORIENTATION = 0x0112
# The tag in either byte order, or in XMP. Orientation 1 needs no work.
_ORIENTATION_TAG = re.compile(
    rb"\x01\x12\x00[\x01-\x0d]\x00\x00\x00\x01(?!\x00\x01)"
    rb"|\x12\x01[\x01-\x0d]\x00\x01\x00\x00\x00(?!\x01\x00)"
    rb"|tiff:Orientation"
)


class _Quiet:
    """Silences Pillow while any thread is inside, except for decompression bombs, which raise.

    `warnings.catch_warnings` replaces a list of the whole process: the first thread to come does
    so, and the last to leave restores it. Pillow decodes without the GIL, thus in parallel.
    """

    def __init__(self) -> None:
        self.lock, self.threads, self.caught = threading.Lock(), 0, warnings.catch_warnings()

    def __enter__(self) -> None:
        with self.lock:
            if not self.threads:
                self.caught = warnings.catch_warnings()
                self.caught.__enter__()
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", Image.DecompressionBombWarning)
            self.threads += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.threads -= 1
            if not self.threads:
                self.caught.__exit__(None, None, None)

    def forked(self) -> None:
        """In a child, which was forked with the lock taken: the threads inside are not in it."""
        if self.threads:
            self.threads = 0
            self.caught.__exit__(None, None, None)
        self.lock.release()


quiet = _Quiet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=quiet.lock.acquire,
        after_in_parent=quiet.lock.release,
        after_in_child=quiet.forked,
    )

# Without a handler Pillow's complaints would go to stderr; the reason is in `BadImageError`.
# Configured logging still receives them.
logging.getLogger("PIL").addHandler(logging.NullHandler())

_collected = threading.local()


class BadImageError(Exception):
    """An image that cannot be used; the text is the reason, in one line."""


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS, fast: bool = True) -> np.ndarray:
    """RGB pixels (H, W, 3), uint8, C-contiguous; not always writable, which would need a copy.

    `max_pixels` is checked against the header, before memory is allocated; beyond `MAX_PIXELS`,
    raise Pillow's own limit as well. `fast` allows simplejpeg. Any problem with the bytes raises
    `BadImageError`.
    """
    if (files := getattr(_collected, "files", None)) is not None:
        files.append(data)
    if not data:
        raise BadImageError("empty file")
    try:
        image = _decode_plain_jpeg(data, max_pixels) if fast else None
        if image is None:
            with quiet:
                image = _decode_with_pillow(data, max_pixels)
    except BadImageError:
        raise
    except UnidentifiedImageError:
        if data[4:12] in _HEIC and not READS_HEIC:
            raise BadImageError('HEIC: needs pip install "stopmim[heic]"') from None
        raise BadImageError("not an image of a known format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImageError(f"more than {max_pixels} pixels") from None
    except Exception as error:  # plugins raise almost anything on damaged files
        text = one_line(error)
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise BadImageError(f"{kind}{text}" if text else type(error).__name__) from None
    return np.ascontiguousarray(image)


def one_line(error: BaseException) -> str:
    """The message of an error of some library, on one line of at most 100 characters."""
    return " ".join(str(error).split())[:100]


@contextlib.contextmanager
def collect_files() -> Iterator[list[bytes]]:
    """Collects the files that this thread decodes, whatever source they come from."""
    _collected.files = list[bytes]()
    try:
        yield _collected.files
    finally:
        del _collected.files


def format_of(data: bytes) -> str:
    """Format and mode of a file according to its header, as "JPEG RGB"."""
    try:
        with opened(data) as image:
            several = " animated" if getattr(image, "n_frames", 1) > 1 else ""
            return f"{image.format} {image.mode}{several}"
    except Exception:
        return "unknown"


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """A picture as Pillow opens it, by its header."""
    with quiet, _open(data) as image:
        yield image


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise BadImageError(f"{width}x{height} is more than {max_pixels} pixels")


def _decode_plain_jpeg(data: bytes, max_pixels: int) -> np.ndarray | None:
    """Decodes a JPEG by simplejpeg; None for anything unusual, which Pillow should decode."""
    if simplejpeg is None or data[:2] != b"\xff\xd8":
        return None
    at = 2
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] not in (b"\xda", b"\xff"):
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    if data[at : at + 2] != b"\xff\xda" or _ORIENTATION_TAG.search(data, 0, at):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("RGB", "YCbCr", "Gray"):
            return None
        _check_size(height, width, max_pixels)
        return simplejpeg.decode_jpeg(data)
    except ValueError:
        # Pillow tolerates a few stray bytes, and which files are bad must not depend on an extra.
        return None


def _open(data: bytes) -> Image.Image:
    """Opens a file of one of the formats by its header."""
    if READS_HEIC and data[4:12] in _HEIC:
        import pillow_heif  # a quarter of a second, for those who need it

        pillow_heif.register_heif_opener()
        return Image.open(io.BytesIO(data), formats=[*FORMATS, "HEIF"])
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _decode_with_pillow(data: bytes, max_pixels: int) -> np.ndarray:
    with _open(data) as image:
        _check_size(image.height, image.width, max_pixels)
        return from_pillow(image)


def from_pillow(image: Image.Image) -> np.ndarray:
    """RGB pixels (H, W, 3) of an open image, uint8, by the rules above."""
    image.load()
    pixels = _to_rgb(image)
    orientation = 1
    # Damaged EXIF does not make the pixels bad. After load(): PNG may store it at the end.
    with contextlib.suppress(Exception):
        orientation = image.getexif().get(ORIENTATION, 1)
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode == "F" or image.mode.startswith("I"):
        return np.repeat(_to_grey8(np.asarray(image))[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _to_grey8(values: np.ndarray) -> np.ndarray:
    """Converts integers or floats (H, W) to uint8; NaN becomes black."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise BadImageError("no pixel has a finite value")
    low, high = float(finite.min()), float(finite.max())
    if values.dtype.kind != "f" and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    scale = 255.0 / (high - low) if high > low else 0.0
    scaled = (np.nan_to_num(values.astype(np.float64), nan=low) - low) * scale
    return np.rint(scaled.clip(0, 255)).astype(np.uint8)
