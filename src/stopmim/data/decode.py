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
import traceback
import warnings
from collections.abc import Iterator
from functools import partial

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from stopmim.base.errors import setting
from stopmim.base.memory import give_back

try:
    import simplejpeg
except ImportError:  # the extra `fast`
    simplejpeg = None

# Pillow warns of a decompression bomb above this; 358 MB when decoded.
MAX_PIXELS = int(setting("STOPMIM_MAX_PIXELS", 89_478_485, "pixels"))
if "STOPMIM_MAX_PIXELS" in os.environ:
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# A file is read whole. No image within MAX_PIXELS needs more, and a mistaken one may be a disk.
MAX_BYTES = 2**30
LARGE = 2**27  # bytes of pixels, beyond which freed memory is worth a call
STRIP = 2**20  # pixels converted at a time: otherwise a large image takes several times its size
# Every scan of a progressive JPEG is a pass over all pixels, at about 10 ** 8 a second, and ten
# to 18 are usual: more than FEW_SCANS may not pass over more pixels than SCANNED.
FEW_SCANS, SCANNED = 20, 3 * 10**8

# Pillow would try every format, and run ghostscript for an EPS file named x.jpg.
FORMATS = ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP"]
EXTENSIONS = ["jpg", "jpeg", "jpe", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"]
if features.check("avif"):  # Pillow can be built without it
    FORMATS, EXTENSIONS = [*FORMATS, "AVIF"], [*EXTENSIONS, "avif"]
HEIC = ("heic", "heif", "hif")
READS_HEIC = importlib.util.find_spec("pillow_heif") is not None  # the extra `heic`
if READS_HEIC:
    EXTENSIONS = [*EXTENSIONS, *HEIC]
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
        """Resets the state in a forked child, which holds the lock but none of the threads."""
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


def decode(
    data: bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    fast: bool = True,
    enough: int | None = None,
) -> np.ndarray:
    """RGB pixels (H, W, 3), uint8, C-contiguous; not always writable, which would need a copy.

    `max_pixels` is checked against the header, before memory is allocated; beyond `MAX_PIXELS`,
    raise Pillow's own limit as well. `fast` allows simplejpeg. With `enough`, a JPEG is reduced to
    1/2, 1/4 or 1/8 while it is decoded, if both sides keep that many pixels: a third of the time.
    Any problem with the bytes raises `BadImageError`.
    """
    if (files := getattr(_collected, "files", None)) is not None:
        files.append(data)
    if not data:
        raise BadImageError("empty file")
    with one_reason():  # plugins raise almost anything on damaged files
        try:
            image = _decode_plain_jpeg(data, max_pixels, enough) if fast else None
            if image is None:
                with quiet:
                    image = _decode_with_pillow(data, max_pixels, enough)
        except UnidentifiedImageError:
            if data[4:12] in _HEIC and not READS_HEIC:
                raise BadImageError('HEIC: needs pip install "stopmim[heic]"') from None
            raise BadImageError("not an image of a known format") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            what = f"more than {max_pixels} pixels; STOPMIM_MAX_PIXELS can allow more"
            raise BadImageError(what) from None
    pixels = np.ascontiguousarray(image)
    if pixels.size > LARGE:
        give_back()  # what Pillow held meanwhile
    return pixels


@contextlib.contextmanager
def one_reason() -> Iterator[None]:
    """Turns whatever a library raises on damaged files into a `BadImageError` of one line."""
    try:
        yield
    except BadImageError:
        raise
    except Exception as error:
        # Pixels in the frames of libraries would stay until the next garbage collection.
        traceback.clear_frames(error.__traceback__)
        text, name = one_line(error), type(error).__name__
        if isinstance(error, OSError):
            raise BadImageError(error.strerror or text or name) from None
        raise BadImageError(f"{name}: {text}" if text else name) from None


def one_line(error: BaseException) -> str:
    """The message of a library's error, on one line of at most 100 characters."""
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
            # Not `n_frames`: that walks through all pages of a TIFF, and all frames of a GIF.
            several = " animated" if getattr(image, "is_animated", False) else ""
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
        raise BadImageError(
            f"{width}x{height} is more than {max_pixels} pixels; STOPMIM_MAX_PIXELS can allow more"
        )


def _check_scans(data: bytes, pixels: int) -> None:
    """Refuses a JPEG with so many scans that decoding would take minutes."""
    # An entropy-coded 255 is followed by 0: this counts markers, and a few of thumbnails in EXIF.
    scans = data.count(b"\xff\xda")
    if scans > FEW_SCANS and scans * pixels > SCANNED:
        raise BadImageError(f"{scans} scans of {pixels} pixels would take minutes")


def _reduction(height: int, width: int, enough: int | None) -> int:
    """The number by which a JPEG of this size may be divided: 1, 2, 4 or 8."""
    return next((n for n in (8, 4, 2) if enough and min(height, width) >= n * enough), 1)


def _decode_plain_jpeg(
    data: bytes, max_pixels: int, enough: int | None = None
) -> np.ndarray | None:
    """Decodes a JPEG by simplejpeg; None for anything unusual, which Pillow should decode."""
    if simplejpeg is None or data[:2] != b"\xff\xd8":
        return None
    at, planes = 2, b""  # number of colour planes, of a frame that is not progressive
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] not in (b"\xda", b"\xff"):
        if data[at + 1 : at + 2] in (b"\xc0", b"\xc1"):
            planes = data[at + 9 : at + 10]
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    if data[at : at + 2] != b"\xff\xda" or _ORIENTATION_TAG.search(data, 0, at):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("RGB", "YCbCr", "Gray"):
            return None
        _check_size(height, width, max_pixels)
        if data[at + 4 : at + 5] != planes:  # else the first scan has all of them, and is the last
            _check_scans(data, height * width)  # which reads the whole file: a tenth of the time
        by = _reduction(height, width, enough)
        return simplejpeg.decode_jpeg(data, min_height=-(-height // by), min_width=-(-width // by))
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


def _decode_with_pillow(data: bytes, max_pixels: int, enough: int | None = None) -> np.ndarray:
    with _open(data) as image:
        # The decoder of WebP holds four copies, the others at most two.
        limit = max_pixels // 2 if image.format == "WEBP" else max_pixels
        _check_size(image.height, image.width, limit)
        if image.format in ("JPEG", "MPO"):
            _check_scans(data, image.height * image.width)
            by = _reduction(image.height, image.width, enough)
            image.draft(None, (image.width // by, image.height // by))
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
    """Pixels (H, W, 3) of any image, by strips: whole copies would take gigabytes."""
    convert = _strip_to_rgb
    if image.mode == "F" or image.mode.startswith("I"):
        convert = partial(_strip_to_grey, *_range(image))
    if image.width * image.height <= STRIP:
        return convert(image)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, strip in _strips(image):
        pixels[top : top + strip.height] = convert(strip)
    return pixels


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yields whole rows of an image, and the number of the first."""
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _strip_to_rgb(image: Image.Image) -> np.ndarray:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _range(image: Image.Image) -> tuple[float, float]:
    """The values that become black and white in a picture of integers or floats."""
    strips = (np.asarray(strip) for _, strip in _strips(image))
    finite = (strip[np.isfinite(strip)] for strip in strips)
    ranges = [(float(x.min()), float(x.max())) for x in finite if x.size]
    if not ranges:
        raise BadImageError("no pixel has a finite value")
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if image.mode != "F" and low >= 0 and high <= 65535:
        return 0.0, 65535.0
    return low, high


def _strip_to_grey(low: float, high: float, image: Image.Image) -> np.ndarray:
    """Converts integers or floats to three equal channels of 8 bits; NaN becomes black."""
    scale = 255.0 / (high - low) if high > low else 0.0
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=low)
    grey = np.rint(((values - low) * scale).clip(0, 255)).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
