"""`data.decode: reduced`: large JPEGs are decoded at a fraction of their size."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from faulty_server import impatient, serving
from stopmim.config.schema import Config, override
from stopmim.data import decode as module
from stopmim.data.crops import crop_box, side_of_use
from stopmim.data.decode import BadImageError, decode
from stopmim.data.images import Images, read_image
from stopmim.data.loading import Crops
from stopmim.data.pack import pack
from stopmim.data.sources.open import open_images
from stopmim.data.subset import Selected, Subset

HEIGHT, WIDTH = 601, 805


def photograph(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(float) - b).mean())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("enough", "by"),
    [(75, 8), (76, 4), (150, 4), (151, 2), (300, 2), (301, 1), (9999, 1), (None, 1)],
)
def test_a_jpeg_is_reduced_as_far_as_both_sides_keep_enough(
    fast: bool, enough: int | None, by: int
) -> None:
    image = photograph()
    found = decode(encoded(image, quality=95), fast=fast, enough=enough)
    margin = [(0, -HEIGHT % by), (0, -WIDTH % by), (0, 0)]
    pixels = np.pad(np.asarray(image), margin, mode="edge")
    squares = pixels.reshape(-(-HEIGHT // by), by, -(-WIDTH // by), by, 3)
    assert difference(found, squares.mean(axis=(1, 3))) < 1


@pytest.mark.parametrize(
    "change",
    [
        lambda image: encoded(image.convert("L")),
        lambda image: encoded(image.convert("CMYK")),
        lambda image: encoded(image, progressive=True),
        lambda image: encoded(image, subsampling=0),
    ],
)
def test_both_decoders_reduce_alike(change: Callable[[Image.Image], bytes]) -> None:
    file = change(photograph())
    fast, pillow = (decode(file, fast=fast, enough=100) for fast in (True, False))
    assert fast.shape == (151, 202, 3)
    assert difference(fast, pillow) < 1


def test_a_turned_jpeg_is_reduced_and_turned() -> None:
    exif = Image.Exif()
    exif[module.ORIENTATION] = 6
    found = decode(encoded(photograph(), exif=exif.tobytes()), enough=100)
    assert difference(found, np.rot90(decode(encoded(photograph()), enough=100), -1)) < 1


def test_other_formats_stay_whole() -> None:
    assert decode(encoded(photograph(), "PNG"), enough=1).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("fast", [True, False])
def test_a_jpeg_that_is_cut_off_is_bad_at_any_size(fast: bool) -> None:
    cut = encoded(photograph())[:-2000]
    for enough in (None, 10):
        with pytest.raises(BadImageError):
            decode(cut, fast=fast, enough=enough)


def test_the_smallest_crop_keeps_two_pixels_for_each_of_its_own() -> None:
    config = override(Config(), {"data.decode": "reduced", "data.crop_scale": (0.1, 1.0)})
    enough, rng = side_of_use(config.data, 48), np.random.default_rng(0)
    assert enough is not None
    for shape in ((3 * enough, enough), (enough, 2 * enough), (enough, enough)):
        boxes = [crop_box(rng, *shape, (0.1, 0.1)) for _ in range(2000)]
        least = min(side for box in boxes for side in (box.height, box.width))
        assert least >= 2 * 48
    assert least < 2.1 * 48  # a square image: not more than needed


@pytest.mark.parametrize(
    "changes",
    [
        {"data.decode": "whole"},
        {"data.decode": "reduced", "data.crop_pixels": (48, 96)},  # pixels of the image itself
    ],
)
def test_nothing_is_reduced_unless_it_is_asked_for(changes: dict[str, Any]) -> None:
    assert side_of_use(override(Config(), changes).data, 48) is None


def source(folder: Path, kind: Any) -> Images:
    match kind:
        case "a subset":
            return Subset(open_images(f"folder:{folder}"), [1])
        case "channels":
            return Selected(open_images(f"folder:{folder}"), ["0", "1", "2"])
        case "a list":
            (folder / "list.txt").write_text("b.jpg\n")
            return open_images(str(folder / "list.txt"))
        case "tar" | "parquet":
            out = folder.parent / kind
            pack(f"folder:{folder}", out, kind=kind)
            return open_images(str(out))
        case "datasets":
            import datasets

            images = [{"bytes": x.read_bytes(), "path": None} for x in sorted(folder.glob("*.jpg"))]
            feature = datasets.Features({"image": datasets.Image(decode=False)})
            table = datasets.Dataset.from_dict({"image": images}, features=feature)
            table.save_to_disk(os.fspath(folder.parent / "saved"))
            return open_images(os.fspath(folder.parent / "saved"))
    return open_images(f"{kind}:{folder}")


@pytest.mark.parametrize(
    "kind", ["folder", "a subset", "channels", "a list", "tar", "parquet", "datasets"]
)
def test_every_source_of_jpegs_reduces_them(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    file = encoded(photograph())
    for name in "ab":
        (folder / f"{name}.jpg").write_bytes(file)
    images = source(folder, kind)
    np.testing.assert_array_equal(read_image(images, 0, 100), decode(file, enough=100))
    np.testing.assert_array_equal(read_image(images, 0, None), decode(file))


@pytest.mark.parametrize("kind", ["a list", "shards"])
def test_remote_jpegs_are_reduced_too(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    file = encoded(photograph())
    (folder / "a.jpg").write_bytes(file)
    (folder / "list.txt").write_text("a.jpg\n")
    pack(f"folder:{folder}", tmp_path / "shards")
    root, name = (folder, "/list.txt") if kind == "a list" else (tmp_path / "shards", "")
    with impatient(tmp_path / "cache"), serving(root) as server:
        images = open_images(server.url + name)
        np.testing.assert_array_equal(read_image(images, 0, 100), decode(file, enough=100))


class Photographs:
    """Two photographs in memory, and the sizes that were asked for."""

    labels: dict[str, np.ndarray] = {}  # noqa: RUF012
    fingerprint = "photographs"

    def __init__(self, height: int, width: int) -> None:
        self.file, self.asked = encoded(photograph(height, width), quality=95), list[int | None]()

    def __len__(self) -> int:
        return 2

    def name(self, i: int) -> str:
        return str(i)

    def read(self, i: int) -> np.ndarray:
        return self.read_reduced(i, None)

    def read_reduced(self, i: int, enough: int | None) -> np.ndarray:
        self.asked.append(enough)
        return decode(self.file, enough=enough)


@pytest.mark.parametrize(("side", "differs"), [(600, True), (300, False)])
def test_crops_of_reduced_images_show_the_same(side: int, differs: bool) -> None:
    """Bit for bit, where an image is not large enough to be reduced."""
    crops = list[np.ndarray]()
    for how in ("whole", "reduced"):
        images = Photographs(side, 4 * side // 3)
        config = override(Config(), {"data.decode": how, "arch": "vit_micro8", "image_size": 48})
        made = Crops(images, config).batch([(epoch, i) for epoch in range(8) for i in range(2)])
        crops.append(made.images.numpy())
        assert all((enough is None) == (how == "whole") for enough in images.asked)
    assert np.array_equal(crops[0], crops[1]) != differs
    each = [difference(*pair) for pair in zip(*crops, strict=True)]
    assert np.median(each) < 1  # a box that is as high as its image is drawn with fewer numbers
