"""Arrays in files: the same pixels whatever the format, whole and by the box."""

import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from odd_arrays import dicom
from PIL import Image

import hostile_arrays
from stopmim.data.channels import Form
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError, one_reason
from stopmim.data.rasters.open import open_raster
from stopmim.data.rasters.raster import MOST, Plain, Raster, form_of
from stopmim.data.rasters.windows import read_sample, read_view, read_whole

HEIGHT, WIDTH, BANDS = 100, 130, 12
BOX = Box(33, 5, 50, 90)
BAND_NAMES = [f"B{i:02}" for i in range(BANDS)]


def pixels(kind: str = "uint16", bands: int = BANDS) -> np.ndarray:
    """Random numbers (H, W, C) over the whole range of a type."""
    rng = np.random.default_rng(0)
    if kind == "float32":
        return rng.standard_normal((HEIGHT, WIDTH, bands)).astype(np.float32)
    ends = np.iinfo(kind)
    return rng.integers(ends.min, ends.max, (HEIGHT, WIDTH, bands), kind, endpoint=True)


def opened(path: Path) -> Raster:
    return open_raster(bytes(path))


def check_equal(raster: Raster, expected: np.ndarray) -> None:
    """Compares shape, type and every pixel, of the whole and of a box."""
    assert raster.shape == expected.shape
    whole = read_whole(raster)
    assert whole.dtype == expected.dtype == raster.kind
    np.testing.assert_array_equal(whole, expected)
    part = raster.read(BOX)
    assert part.dtype == expected.dtype
    np.testing.assert_array_equal(
        part, expected[BOX.top : BOX.top + BOX.height, BOX.left : BOX.left + BOX.width]
    )


# ------------------------------------------------------------------------------ formats


def geotiff(path: Path, image: np.ndarray, **options: Any) -> None:
    """As GDAL writes bands: one directory, one pixel after the other, with names."""
    items = "".join(
        f'<Item name="DESCRIPTION" sample="{i}" role="description">{name}</Item>'
        for i, name in enumerate(BAND_NAMES[: image.shape[2]])
    )
    tags = [(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)]
    planar: dict[str, Any] = {
        "planarconfig": "contig",
        "photometric": "minisblack",
        "metadata": None,
    }
    tifffile.imwrite(path, image, extratags=tags, **planar, **options)


def ome(path: Path, image: np.ndarray, **options: Any) -> None:
    about = {"axes": "CYX", "Channel": {"Name": BAND_NAMES[: image.shape[2]]}}
    tifffile.imwrite(path, image.transpose(2, 0, 1), ome=True, metadata=about, **options)


def write_zarr(path: Path, image: np.ndarray, *, planes_first: bool = True, **options: Any) -> None:
    values = image.transpose(2, 0, 1) if planes_first else image
    made = zarr.create_array(str(path), shape=values.shape, dtype=values.dtype, **options)
    made[:] = values


def write_npy(path: Path, image: np.ndarray) -> None:
    np.save(path, image)


WAYS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "geo.tif": geotiff,
    "ome.ome.tif": ome,
    "last.npy": write_npy,
    "first.npy": lambda path, image: np.save(path, image.transpose(2, 0, 1)),
    "fortran.npy": lambda path, image: np.save(path, np.asfortranarray(image)),
    "one.npz": lambda path, image: np.savez_compressed(path, image=image, label=3),
    "v2.zarr": lambda path, image: write_zarr(path, image, chunks=(5, 32, 32), zarr_format=2),
    "v3.zarr": lambda path, image: write_zarr(path, image, chunks=(12, 32, 32)),
    "last.zarr": lambda path, image: write_zarr(
        path, image, planes_first=False, chunks=(32, 32, 12)
    ),
    "sharded.zarr": lambda path, image: write_zarr(
        path, image, chunks=(4, 16, 16), shards=(12, 64, 64)
    ),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "float32"])
def test_every_format_has_the_same_pixels(name: str, kind: str, tmp_path: Path) -> None:
    image = pixels(kind)
    WAYS[name](tmp_path / name, image)
    check_equal(opened(tmp_path / name), image)


@pytest.mark.parametrize("name", ["geo.tif", "ome.ome.tif"])
def test_names_of_bands_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    WAYS[name](tmp_path / name, pixels())
    assert opened(tmp_path / name).names == BAND_NAMES


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("tile", [None, (32, 48)])
@pytest.mark.parametrize("codec", [None, "zlib", "lzw", "zstd", "packbits", "lzma"])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
def test_compressed_tiff(
    planar: str, tile: tuple[int, int] | None, codec: str | None, kind: str, tmp_path: Path
) -> None:
    image = pixels(kind, 5)
    predictor = codec not in (None, "packbits")
    stored = image if planar == "contig" else image.transpose(2, 0, 1)
    options: dict[str, Any] = {"tile": tile} if tile else {"rowsperstrip": 24}
    tifffile.imwrite(
        tmp_path / "x.tif", stored, planarconfig=planar, photometric="minisblack",
        compression=codec, predictor=predictor, **options,
    )  # fmt: skip
    check_equal(opened(tmp_path / "x.tif"), image)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("codec", [None, "zlib"])
def test_tiff_of_either_byte_order_and_size(
    order: Any, big: bool, codec: str | None, tmp_path: Path
) -> None:
    image = pixels("int16")
    tifffile.imwrite(
        tmp_path / "x.tif", image.transpose(2, 0, 1), byteorder=order, bigtiff=big,
        compression=codec, predictor=bool(codec),
    )  # fmt: skip
    check_equal(opened(tmp_path / "x.tif"), image)


@pytest.mark.parametrize("codec", ["jpeg", "jpeg2000", "webp", "jpegxl", "png"])
def test_tiff_of_tiles_that_are_pictures(codec: str, tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH, 1)
    image = (smooth + np.array([0, 20, 40])).clip(0, 255).astype(np.uint8)
    tifffile.imwrite(tmp_path / "x.tif", image, photometric="rgb", tile=(32, 32), compression=codec)
    check_equal(opened(tmp_path / "x.tif"), tifffile.imread(tmp_path / "x.tif"))


@pytest.mark.parametrize("codec", ["Blosc", "Zlib", "GZip", "Zstd", "LZ4", "BZ2", "LZMA", None])
def test_zarr_2_codecs(codec: str | None, tmp_path: Path) -> None:
    import numcodecs

    image = pixels("int16")
    packed = codec and getattr(numcodecs, codec)()
    write_zarr(
        tmp_path / "x.zarr", image, chunks=(5, 32, 48), zarr_format=2, compressors=packed, order="F"
    )
    check_equal(opened(tmp_path / "x.zarr"), image)


@pytest.mark.parametrize("codec", ["BloscCodec", "GzipCodec", "ZstdCodec", None])
def test_zarr_3_codecs(codec: str | None, tmp_path: Path) -> None:
    from zarr import codecs

    image = pixels("float32")
    packed = codec and getattr(codecs, codec)()
    turned = [codecs.TransposeCodec(order=(2, 0, 1))]
    write_zarr(tmp_path / "x.zarr", image, chunks=(5, 32, 48), compressors=packed, filters=turned)
    check_equal(opened(tmp_path / "x.zarr"), image)


def test_axes_that_have_names_decide_the_layout(tmp_path: Path) -> None:
    image = pixels("uint16", 6)
    values = image.reshape(HEIGHT, WIDTH, 2, 3).transpose(2, 0, 3, 1)  # t, y, c, x
    made = zarr.create_array(
        str(tmp_path / "x.zarr"), shape=values.shape, dtype="uint16", chunks=(1, 40, 3, 40),
        dimension_names=["t", "y", "c", "x"],
    )  # fmt: skip
    made[:] = values
    check_equal(opened(tmp_path / "x.zarr"), image)


def test_a_damaged_deep_picture_costs_no_memory_for_good(tmp_path: Path) -> None:
    """The library keeps the array that it failed to fill: a folder of them filled memory."""
    import imagecodecs

    image = np.random.default_rng(0).integers(0, 2**16, (512, 512, 3), np.uint16)
    data = bytearray(imagecodecs.png_encode(image))
    data[len(data) // 2] ^= 1
    (tmp_path / "a.png").write_bytes(data)
    tracemalloc.start()
    try:
        for _ in range(4):
            with pytest.raises(BadImageError, match="CRC"), one_reason():
                opened(tmp_path / "a.png").read()
        assert tracemalloc.get_traced_memory()[0] < image.nbytes
    finally:
        tracemalloc.stop()


def test_deep_pictures_keep_their_bits(tmp_path: Path) -> None:
    import imagecodecs

    colours = pixels("uint16", 3)
    (tmp_path / "rgb.png").write_bytes(imagecodecs.png_encode(colours))
    check_equal(opened(tmp_path / "rgb.png"), colours)
    grey = colours[:, :, :1]
    Image.fromarray(grey[:, :, 0]).save(tmp_path / "grey.png")
    check_equal(opened(tmp_path / "grey.png"), grey)
    header = b"P6\n# a comment\n%d %d\n4095\n" % (WIDTH, HEIGHT)
    (tmp_path / "x.ppm").write_bytes(header + colours.astype(">u2").tobytes())
    check_equal(opened(tmp_path / "x.ppm"), colours)


@pytest.mark.parametrize(
    ("about", "kind", "measured"),
    [
        ({}, "uint16", lambda x: x),
        ({"BitsStored": 12, "HighBit": 11}, "uint16", lambda x: x),
        ({"RescaleSlope": 1, "RescaleIntercept": -1024, "BitsStored": 12, "HighBit": 11},
         "int16", lambda x: x.astype(int) - 1024),
        ({"RescaleSlope": 1, "RescaleIntercept": -1024}, "float32", lambda x: x.astype(int) - 1024),
        ({"RescaleSlope": 0.5, "RescaleIntercept": 3}, "float32", lambda x: x * 0.5 + 3),
        ({"PhotometricInterpretation": "MONOCHROME1", "BitsStored": 12, "HighBit": 11},
         "uint16", lambda x: 4095 - x),
    ],
)  # fmt: skip
def test_dicom_has_measured_values(
    about: dict[str, Any], kind: str, measured: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    stored = pixels("uint16", 1) & 4095
    size: dict[str, Any] = {"Rows": HEIGHT, "Columns": WIDTH}
    dicom(stored.tobytes(), **size, **about)(tmp_path / "x.dcm")
    check_equal(opened(tmp_path / "x.dcm"), measured(stored).astype(kind))


def test_frames_of_dicom_are_channels(tmp_path: Path) -> None:
    image = pixels("uint16", 4)
    size: dict[str, Any] = {"Rows": HEIGHT, "Columns": WIDTH, "NumberOfFrames": 4}
    dicom(image.transpose(2, 0, 1).tobytes(), **size)(tmp_path / "x.dcm")
    check_equal(opened(tmp_path / "x.dcm"), image)


def test_other_types_become_the_nearest_that_holds_them(tmp_path: Path) -> None:
    for dtype, kind in (("bool", "uint8"), ("int8", "int16"), ("f8", "float32"), ("u4", "float32")):
        np.save(tmp_path / "x.npy", np.ones((8, 8), dtype))
        assert form_of(opened(tmp_path / "x.npy")) == Form(1, kind)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ large images


def pyramid(path: Path, image: np.ndarray, levels: int = 2) -> None:
    with tifffile.TiffWriter(path) as file:
        options: dict[str, Any] = {"photometric": "minisblack", "tile": (32, 32)}
        file.write(image, subifds=levels, **options)
        for level in range(1, levels + 1):
            file.write(image[:: 2**level, :: 2**level], subfiletype=1, **options)


def test_a_view_is_read_from_the_smallest_copy_that_is_good_enough(tmp_path: Path) -> None:
    image = pixels("uint16", 1)[:96, :128, 0]
    pyramid(tmp_path / "x.tif", image)
    raster = opened(tmp_path / "x.tif")
    assert [level.shape for level in raster.levels] == [(48, 64, 1), (24, 32, 1)]
    box = Box(16, 32, 64, 64)
    np.testing.assert_array_equal(read_view(raster, box, 8)[:, :, 0], image[16:80:4, 32:96:4])
    np.testing.assert_array_equal(read_view(raster, box, 9)[:, :, 0], image[16:80:2, 32:96:2])
    np.testing.assert_array_equal(read_view(raster, box, 17)[:, :, 0], image[16:80, 32:96])


def test_an_image_beyond_memory_is_shrunk_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stopmim.data.rasters.windows.MOST", 2**16)
    monkeypatch.setattr("stopmim.data.rasters.windows.STRIP", 2**14)
    largest = list[int]()

    class Counted(Plain):
        def read(self, box: Box | None = None) -> np.ndarray:
            part = super().read(box)
            largest.append(part.nbytes)
            return part

    rows, columns = np.mgrid[:500, :300].astype(np.uint16)
    whole = read_whole(Counted((rows + 3 * columns)[:, :, None]))
    assert max(largest) <= 2**14
    by = 5  # the least whole number for 300,000 bytes in 2**14
    assert whole.shape == (100, 60, 1)
    means = (rows + 3 * columns).reshape(100, by, 60, by).mean((1, 3))
    np.testing.assert_allclose(whole[:, :, 0], means, atol=0.5)


def test_an_image_that_is_one_tile_is_decoded_once_for_its_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stopmim.data.rasters.windows.LARGE", 2**16)

    class Decoded(Plain):
        read_whole = 0

        def read(self, box: Box | None = None) -> np.ndarray:
            self.read_whole += self.tile > 0
            return super().read(box)

    pixels = np.random.default_rng(0).integers(0, 9, (600, 700, 1), np.uint8)
    one_tile, tiles = Decoded(pixels), Decoded(pixels)
    one_tile.tile = pixels.nbytes
    whole, parts = (read_sample(x, np.random.default_rng(1)) for x in (one_tile, tiles))
    np.testing.assert_array_equal(whole, parts)
    assert one_tile.read_whole == 1


def test_more_than_fits_into_memory_is_not_read_at_once() -> None:
    side = 2 * int(MOST**0.5)
    vast = Plain(np.broadcast_to(np.uint16(7), (side, side, 1)))
    with pytest.raises(BadImageError, match="more than the 512 MiB"):
        vast.read()


def test_what_is_slow_to_decode_is_bounded_sooner(tmp_path: Path) -> None:
    slow = {"plain": (1, 1), "deflate": (8, 1), "predicted": (8, 2), "lzma": (34925, 1)}
    found = {}
    for name, (codec, predictor) in slow.items():
        path = tmp_path / f"{name}.tif"
        hostile_arrays.tiles(codec, 2**22, predictor=predictor)(path)
        found[name] = opened(path).slow
    assert found == {"plain": 1, "deflate": 1, "predicted": 2, "lzma": 4}
    hostile_arrays.tiles(8, 2**32, predictor=2)(tmp_path / "large.tif")
    with pytest.raises(BadImageError, match="more than the 2 GiB that are shrunk"):
        read_whole(opened(tmp_path / "large.tif"))


def test_few_squares_are_read_of_tiles_that_are_large() -> None:
    class Rows(Plain):
        decoded = 0

        def read(self, box: Box | None = None) -> np.ndarray:
            self.decoded += self.tile * (-(-box.height // self.tall) + 1 if box else 1)
            return super().read(box)

    rows = Rows(np.broadcast_to(np.uint8(7), (4096, 2**20, 1)))
    rows.tall, rows.tile = 64, 2**26
    read_sample(rows, np.random.default_rng(0))
    assert rows.decoded <= 2**30  # 5 GiB of 16 squares


def test_a_map_of_numbers_to_convert_does_not_stay_in_memory(tmp_path: Path) -> None:
    path, held = tmp_path / "a.npy", list[int]()
    np.save(path, np.arange(2**25, dtype=np.float64).reshape(2**12, 2**13, 1))
    raster = opened(path)
    base = resident()
    found = raster.read()
    held.append(resident() - base)
    assert held[0] < found.nbytes + 2**26  # and not 256 MiB more
    np.testing.assert_array_equal(found.ravel()[:: 2**20], np.arange(0, 2**25, 2**20))


def resident() -> int:
    """Bytes of this process in memory, with pages of files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
