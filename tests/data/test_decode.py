import io
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pillow_heif
import pytest
import simplejpeg
from PIL import Image

from hostile_data import pages, scans
from stopmim.data import decode as module
from stopmim.data.decode import MAX_PIXELS, BadImageError, decode, format_of, one_reason


def picture(height: int = 47, width: int = 61) -> Image.Image:
    """A smooth picture without symmetry, so that every rotation and flip can be told apart."""
    coarse = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    if kind == "HEIF":  # without Pillow's help: reading has to register the format by itself
        pillow_heif.from_pillow(image).save(file, **options)
    else:
        image.save(file, kind, **options)
    return file.getvalue()


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png_of_size(width: int, height: int) -> bytes:
    """69 bytes that claim any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 9) + b"\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(float) - b.astype(float)).mean())


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("PPM", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 6),
        ("JPEG", {"quality": 98}, 3),
        ("JPEG", {"quality": 98, "progressive": True}, 3),
        ("MPO", {"quality": 98}, 3),
        ("GIF", {}, 12),
    ],
)
def test_every_format_gives_contiguous_rgb(
    kind: str, options: dict[str, object], tolerance: float
) -> None:
    pixels = decode(encoded(picture(), kind, **options))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert difference(pixels, np.asarray(picture())) <= tolerance


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 6000)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_extreme_shapes_decode(shape: tuple[int, int], kind: str) -> None:
    assert decode(encoded(picture(*shape), kind)).shape == (*shape, 3)


def test_simplejpeg_and_pillow_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        encoded(picture(), "JPEG", quality=q, subsampling=s, progressive=p)
        for q, s, p in [(40, 2, False), (75, 1, True), (95, 0, False)]
    ]
    files += [encoded(picture().convert("L"), "JPEG"), encoded(picture(7, 9), "JPEG")]
    fast = [module._decode_plain_jpeg(file, MAX_PIXELS) for file in files]
    monkeypatch.setattr(module, "simplejpeg", None)
    for pixels, file in zip(fast, files, strict=True):
        assert pixels is not None
        assert difference(pixels, decode(file)) < 1


def test_a_stray_byte_gives_the_same_verdict_with_and_without_simplejpeg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = encoded(picture(), "JPEG")
    stray = file[:-2] + b"\0\0" + file[-2:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(stray)
    cut = file[: len(file) // 2]

    def verdict(data: bytes) -> bool:
        try:
            return decode(data).shape == (47, 61, 3)
        except BadImageError:
            return False

    fast = [verdict(data) for data in (stray, cut, file + b"tail")]
    monkeypatch.setattr(module, "simplejpeg", None)
    assert fast == [verdict(data) for data in (stray, cut, file + b"tail")]
    assert fast == [True, False, True]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    methods = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    image = picture()
    upright = image.transpose(methods[orientation]) if orientation in methods else image
    pixels = decode(encoded(image, kind, exif=oriented(orientation)))
    assert difference(pixels, np.asarray(upright)) < 8
    assert pixels.flags.c_contiguous


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_in_either_byte_order_keeps_a_jpeg_from_the_fast_path(order: str) -> None:
    def with_orientation(value: int) -> bytes:
        head = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HI", 42, 8)
        entry = struct.pack(order + "HHHIHHI", 1, 0x0112, 3, 1, value, 0, 0)
        return encoded(picture(), "JPEG", exif=b"Exif\0\0" + head + entry)

    assert decode(with_orientation(6)).shape == (61, 47, 3)
    assert decode(with_orientation(1)).shape == (47, 61, 3)
    assert module._decode_plain_jpeg(with_orientation(6), MAX_PIXELS) is None
    assert module._decode_plain_jpeg(with_orientation(1), MAX_PIXELS) is not None


def test_damaged_exif_does_not_make_the_pixels_bad() -> None:
    file = encoded(picture(), "PNG", exif=b"Exif\0\0MM garbage that is not a directory")
    np.testing.assert_array_equal(decode(file), np.asarray(picture()))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_and_not_clipped(kind: str) -> None:
    values = np.array([[257, 20_000, 40_000, 60_000]], np.uint16)
    pixels = decode(encoded(Image.fromarray(values), kind))
    assert pixels[0, :, 0].tolist() == [1, 78, 156, 233]
    assert (pixels == pixels[:, :, :1]).all()


def test_32_bit_integers_and_floats_are_scaled_by_their_own_range() -> None:
    wide = np.array([[-100_000, 0, 100_000]], np.int32)
    assert decode(encoded(Image.fromarray(wide), "TIFF"))[0, :, 0].tolist() == [0, 128, 255]
    unit = np.array([[0.25, 0.5, 0.75]], np.float32)
    assert decode(encoded(Image.fromarray(unit), "TIFF"))[0, :, 0].tolist() == [0, 128, 255]
    flat = np.full((2, 2), 0.5, np.float32)
    assert not decode(encoded(Image.fromarray(flat), "TIFF")).any()
    holes = np.array([[np.nan, 1.0, np.inf, 3.0]], np.float32)
    assert decode(encoded(Image.fromarray(holes), "TIFF"))[0, :, 0].tolist() == [0, 0, 255, 255]
    with pytest.raises(BadImageError, match="finite"):
        decode(encoded(Image.fromarray(np.full((2, 2), np.nan, np.float32)), "TIFF"))


def test_transparency_shows_white() -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = 0, 128, 255
    assert decode(encoded(Image.fromarray(rgba), "PNG"))[0, :, 0].tolist() == [255, 127, 0]
    assert decode(encoded(Image.fromarray(rgba).convert("LA"), "PNG"))[0, 0].tolist() == [255] * 3
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    palette.putpixel((1, 0), 1)
    assert decode(encoded(palette, "PNG"))[0].tolist() == [[200, 0, 0], [0, 0, 200]]
    for kind, transparency in [("PNG", b"\0\xff"), ("PNG", 0), ("GIF", 0)]:
        pixels = decode(encoded(palette, kind, transparency=transparency))
        assert pixels[0].tolist() == [[255, 255, 255], [0, 0, 200]]


def test_cmyk_and_one_bit_pictures_become_rgb() -> None:
    cmyk = encoded(picture().convert("CMYK"), "JPEG", quality=98)
    assert difference(decode(cmyk), np.asarray(picture())) < 4
    bits = np.array([[True, False, True]])
    assert decode(encoded(Image.fromarray(bits), "PNG"))[0, :, 1].tolist() == [255, 0, 255]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_the_first_picture_of_many_is_taken(kind: str) -> None:
    first, second = Image.new("RGB", (8, 8), (250, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 250))
    pixels = decode(encoded(first, kind, save_all=True, append_images=[second]))
    assert difference(pixels, np.asarray(first)) < 8


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"hello\nworld\n", b"GIF89a", bytes(5000)]
)
def test_what_is_no_image_has_a_short_reason(data: bytes) -> None:
    with pytest.raises(BadImageError) as caught:
        decode(data)
    assert 0 < len(str(caught.value)) < 150
    assert str(caught.value).isprintable()
    assert "0x" not in str(caught.value)  # an address would differ from run to run


def test_the_reason_for_a_truncated_file_says_so() -> None:
    for kind in ("JPEG", "PNG"):
        data = encoded(picture(), kind)
        with pytest.raises(BadImageError, match=r"(?i)truncated|broken"):
            decode(data[: len(data) // 2])


def test_postscript_is_never_run() -> None:
    with pytest.raises(BadImageError, match="known format"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")


@pytest.mark.parametrize(
    ("width", "height"),
    [(30_000, 30_000), (MAX_PIXELS + 1, 1), (10_000, 10_000), (2**31 - 1, 2**31 - 1)],
)
def test_a_tiny_file_that_claims_many_pixels_is_refused_at_once(width: int, height: int) -> None:
    data = png_of_size(width, height)
    assert len(data) == 69
    start = time.thread_time()
    with pytest.raises(BadImageError):
        decode(data)
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_max_pixels_is_inclusive(kind: str) -> None:
    data = encoded(picture(), kind)
    assert decode(data, max_pixels=47 * 61).shape == (47, 61, 3)
    with pytest.raises(BadImageError, match="61x47 is more than 2866 pixels"):
        decode(data, max_pixels=47 * 61 - 1)


def damaged(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return data[: rng.randrange(len(data))]
    body = bytearray(data)
    end = rng.choice([len(body), min(len(body), 200)])  # headers deserve more than their share
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        body[rng.randrange(end)] = rng.choice([0, 255, rng.randrange(256)])
    if rng.random() < 0.05:
        at = rng.randrange(len(body))
        body[at:at] = body[: rng.randrange(len(body))]
    return bytes(body)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_pictures_of_phones_are_upright(kind: str, orientation: int) -> None:
    options = {"quality": 95, "chroma": 444} if kind == "HEIF" else {"quality": 95}
    file = encoded(picture(), kind, exif=oriented(orientation), **options)
    upright = decode(encoded(picture(), "PNG", exif=oriented(orientation)))
    assert difference(decode(file), upright) < 5
    assert module.format_of(file) == f"{kind} RGB"
    with pytest.raises(BadImageError, match=r"61x47|47x61"):
        decode(file, max_pixels=2000)


def test_heic_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READS_HEIC", False)
    with pytest.raises(BadImageError, match=r'HEIC: needs pip install "stopmim\[heic\]"'):
        decode(encoded(picture(), "HEIF"))


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF"]
)
def test_damaged_files_are_bad_images_or_images_and_nothing_else(kind: str) -> None:
    rng = random.Random(0)
    palette = picture().convert("P")
    sources = [
        encoded(picture(), kind),
        encoded(picture(), kind, exif=oriented(6)),
        encoded(palette if kind in ("PNG", "GIF", "TIFF") else picture(200, 200), kind),
    ]
    refused = 0
    for i in range(300):
        try:
            pixels = decode(damaged(sources[i % 3], rng), max_pixels=10**6)
        except BadImageError as error:
            refused += str(error).isprintable()
        else:
            assert pixels.dtype == np.uint8
            assert pixels.ndim == 3
            assert pixels.shape[2] == 3
    assert 30 < refused < 300


def test_threads_decode_alike_and_leave_the_warning_filters_alone() -> None:
    files = [encoded(picture(20 + i, 30), kind) for i in range(20) for kind in ("PNG", "JPEG")]
    filters = list(warnings.filters)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or a thread would often finish before the next begins
    try:
        with ThreadPoolExecutor(8) as pool:
            shapes = [pixels.shape for pixels in pool.map(decode, files * 10)]
    finally:
        sys.setswitchinterval(interval)
    assert shapes == [(20 + i // 2, 30, 3) for i in range(40)] * 10
    assert warnings.filters == filters


def test_pillow_decodes_in_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits within Pillow for the other, which a lock around it would keep out."""
    both, load = threading.Barrier(2, timeout=10), module._decode_with_pillow

    def meet(data: bytes, max_pixels: int, enough: int | None) -> np.ndarray:
        both.wait()
        return load(data, max_pixels, enough)

    monkeypatch.setattr(module, "_decode_with_pillow", meet)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(decode, [encoded(picture(), "PNG")] * 2))
    assert np.array_equal(found[0], found[1])


def test_a_process_forked_while_a_thread_decodes_can_decode() -> None:
    file, filters = encoded(picture(200, 200), "PNG"), list(warnings.filters)
    done = threading.Event()

    def keep_decoding() -> None:
        while not done.is_set():
            decode(file)

    thread = threading.Thread(target=keep_decoding)
    thread.start()
    try:
        for _ in range(10):
            time.sleep(0.005)
            if not (child := os.fork()):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)  # a lock taken over from the thread would never be released
                decode(file)
                os._exit(warnings.filters != filters)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()


MODES = {
    "RGB": "PNG", "RGBA": "PNG", "LA": "PNG", "L": "PNG", "P": "PNG", "1": "PNG", "I;16": "PNG",
    "CMYK": "JPEG", "F": "TIFF", "I": "TIFF",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_large_image_is_converted_by_strips_with_the_same_result(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 256, (37, 23, 4), np.uint8)
    if mode in ("F", "I", "I;16"):
        kind = {"F": np.float32, "I": np.int32, "I;16": np.uint16}[mode]
        image = Image.fromarray((values[:, :, 0] * 300.0 - 20 * (mode != "I;16")).astype(kind))
    else:
        image = Image.fromarray(values, "RGBA" if mode != "CMYK" else "CMYK").convert(mode)
    buffer = io.BytesIO()
    options = {"transparency": 3} if mode == "P" else {}
    image.save(buffer, MODES[mode], **options)
    whole = decode(buffer.getvalue())
    monkeypatch.setattr(module, "STRIP", 100)  # four rows
    np.testing.assert_array_equal(decode(buffer.getvalue()), whole)


def test_a_jpeg_of_hundreds_of_scans_is_a_bad_image_at_once() -> None:
    with pytest.raises(BadImageError, match="400 scans of 16000000 pixels"):
        decode(scans(400))
    assert decode(scans(40, 64)).shape == (64, 64, 3)  # of a small one they take no time


def test_a_tiff_of_many_pages_costs_no_more_than_its_first() -> None:
    """Pillow takes seconds to count them, and four times as many for twice the pages."""
    assert format_of(pages(1)) == "TIFF L"
    many = pages(20_000)
    begin = time.process_time()
    assert format_of(many) == "TIFF L animated"
    assert decode(many).shape == (8, 8, 3)
    assert time.process_time() - begin < 0.5


HUGE = """
import io, threading
from pathlib import Path
from PIL import Image
from stopmim.data.decode import decode

file = io.BytesIO()
Image.new("F", (8000, 8000)).save(file, "TIFF", compression="tiff_deflate")

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def read():
    for _ in range(2):  # after the first one glibc keeps larger blocks
        before = resident()
        pixels = decode(file.getvalue())
        print(resident() - before)

thread = threading.Thread(target=read)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_a_huge_picture_costs_its_pixels_alone_once_it_is_read_in_a_thread_too() -> None:
    """192 MB; Pillow holds 256 meanwhile, which glibc would keep."""
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    assert [int(line) < 260 for line in done.stdout.split()] == [True, True], done.stdout


@pytest.mark.parametrize("error", [ValueError("damaged"), OSError(5, "Input/output error")])
def test_what_was_decoded_in_vain_is_let_go_of_at_once(error: Exception) -> None:
    """Not only when garbage is collected: half a gigabyte stayed beside the next attempt."""
    held = list[weakref.ref[np.ndarray]]()

    def library() -> None:
        pixels = np.empty(10)
        held.append(weakref.ref(pixels))
        raise error

    with pytest.raises(BadImageError), one_reason():
        library()
    assert held[0]() is None
