"""One file, one view: `features`, `eval`, and the libraries that exports are for."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_crops import photo
from torch import Tensor, nn

import stopmim
from stopmim.data import open_images
from stopmim.data.crops import normalise, resized
from stopmim.data.pixels import STD
from stopmim.data.transform import Transform, pixels_of
from stopmim.evals.adapter import Adapter
from stopmim.evals.feature_files import write_features
from stopmim.evals.inputs import Inputs
from stopmim.method.encoder import VisionTransformer
from stopmim.weights.card import card
from stopmim.weights.export import export
from stopmim.weights.formats.onnx import Onnx
from stopmim.weights.formats.timm import Timm
from stopmim.weights.inspect import identify
from stopmim.weights.vit import save_tagged, tags, weights_of

SIZE, RESIZE = 96, 110
# Width and height: upright and lying, small, square, and one as long as a panorama.
SHAPES = [(250, 187), (187, 250), (97, 333), (224, 224), (401, 107), (60, 41), (603, 64)]
SAVED: list[tuple[str, str, dict[str, Any]]] = [
    ("RGB", "jpg", {"quality": 90}),
    ("RGB", "png", {}),
    ("L", "jpg", {}),
    ("L", "png", {}),
    ("CMYK", "jpg", {}),
    ("RGBA", "png", {}),
    ("LA", "png", {}),
    ("P", "png", {}),
    ("P", "png", {"transparency": 3}),
    ("P", "gif", {}),
    ("1", "png", {}),
    ("I;16", "png", {}),
    ("I;16", "tif", {}),
    ("RGB", "webp", {}),
    *(("RGB", "jpg", {"exif": orientation}) for orientation in (2, 3, 5, 6, 8)),
    ("L", "jpg", {"exif": 6}),
    ("RGBA", "png", {"exif": 8}),
    ("I;16", "png", {"exif": 7}),
]


def in_mode(pixels: np.ndarray, mode: str) -> Image.Image:
    """A picture whose transparency and 16 bits matter."""
    picture = Image.fromarray(pixels)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 256 + pixels[..., 1])
    if mode in ("RGBA", "LA"):
        picture.putalpha(Image.fromarray(pixels[..., 2]))
    return picture.convert(mode)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty files of all sizes and modes."""
    folder = tmp_path_factory.mktemp("photographs")
    for i in range(50):
        mode, suffix, options = SAVED[i % len(SAVED)]
        width, height = SHAPES[i % len(SHAPES)]
        exif = Image.Exif()
        exif[0x0112] = options.get("exif", 1)
        picture = in_mode(photo(height + i % 5, width + i % 4, i), mode)
        picture.save(folder / f"{i:02}.{suffix}", **options | {"exif": exif})
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    encoder = VisionTransformer(SIZE, 48, 24, 1, 2).eval()
    file = tmp_path_factory.mktemp("source") / "encoder.safetensors"
    save_tagged(weights_of(encoder), file, tags(encoder))
    return file


@pytest.fixture(scope="module")
def views(photographs: Path, source: Path) -> Tensor:
    """What `encoder.transform` shows of each, (50, 3, S, S)."""
    shown = stopmim.load_encoder(source).transform(sorted(photographs.iterdir()))
    assert shown.shape == (50, 3, SIZE, SIZE)
    return shown


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.S)


def functions(text: str) -> dict[str, Any]:
    """`opened`, `middle` and `normalised`, as the README of an export has them."""
    names: dict[str, Any] = {}
    runner: Any = __builtins__["exec"] if isinstance(__builtins__, dict) else __builtins__.exec
    runner(next(block for block in blocks(text) if "def opened" in block), names)
    return names


def worst(found: Tensor, want: Tensor) -> float:
    """The largest difference of (B, 3, S, S), in levels of 255."""
    return float(((found - want).abs() * torch.tensor(STD).view(3, 1, 1)).max()) * 255


def test_features_and_evaluations_show_what_the_transform_shows(
    photographs: Path, views: Tensor, tmp_path: Path
) -> None:
    pixels = Adapter(nn.Flatten(), SIZE)  # its features are its view
    table = np.load(write_features(photographs, pixels, tmp_path / "table.npz"))
    assert torch.equal(torch.from_numpy(table["features"]), views.flatten(1))
    images = open_images(photographs)
    inputs = Inputs(pixels, images, images)
    assert torch.equal(inputs.test_x, views.flatten(1).half())
    shown = torch.stack([inputs.shown.test(images.read(i)) for i in range(50)])
    assert torch.equal(normalise(shown), views)
    paths = sorted(photographs.iterdir())
    with torch.no_grad():
        assert torch.equal(pixels.features(paths), views.flatten(1))
        assert torch.equal(pixels.features(paths[3]), views[3:4].flatten(1))


def test_the_config_for_timm_shows_it_to_within_rounding(
    photographs: Path, source: Path, views: Tensor, timm: Any, tmp_path: Path
) -> None:
    folder = export(source, "timm", tmp_path / "timm")
    text = (folder / "README.md").read_text()
    opened = functions(text)["opened"]
    cfg = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    settings = timm.data.resolve_data_config(pretrained_cfg=cfg)
    transform = timm.data.create_transform(**settings)
    found = torch.stack([transform(opened(path)) for path in sorted(photographs.iterdir())])
    assert worst(found, views) <= 1.001
    code = next(block for block in blocks(text) if "create_transform" in block)
    names: dict[str, Any] = {"opened": lambda _: opened(sorted(photographs.iterdir())[4])}
    runner: Any = __builtins__["exec"] if isinstance(__builtins__, dict) else __builtins__.exec
    runner(code, names)
    assert torch.equal(names["images"][0], found[4])


def test_the_processor_of_hugging_face_shows_it_to_within_rounding(
    photographs: Path, source: Path, views: Tensor, transformers: Any, tmp_path: Path
) -> None:
    folder = export(source, "hf", tmp_path / "hf")
    names = functions((folder / "README.md").read_text())
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    paths, moved = sorted(photographs.iterdir()), 0
    pictures = [names["opened"](path) for path in paths]
    exact = {"do_resize": False, "do_center_crop": False, "return_tensors": "pt"}
    shown = processor(images=[names["middle"](picture) for picture in pictures], **exact)
    assert worst(shown["pixel_values"], views) <= 1.001
    shown = processor(images=pictures, return_tensors="pt")["pixel_values"]
    for path, picture, found, view in zip(paths, pictures, shown, views, strict=True):
        # Half a pixel is rounded down there, to the even number in torchvision, timm and here.
        height, width = (int(RESIZE * side / min(picture.size)) for side in picture.size[::-1])
        top, left = (height - SIZE) // 2, (width - SIZE) // 2
        if (height - SIZE) % 4 == 3 or (width - SIZE) % 4 == 3:
            moved += 1
            whole = resized(pixels_of(path), height, width)
            view_there = normalise(whole[None, :, top : top + SIZE, left : left + SIZE])[0]
            assert worst(found, view_there) <= 1.001
        else:
            assert worst(found, view) <= 1.001
    assert 0 < moved < 25


def test_the_recipe_for_onnx_shows_it_to_within_rounding(
    photographs: Path, source: Path, views: Tensor
) -> None:
    contents = identify(source)
    assert isinstance(contents.encoder, VisionTransformer)
    names = functions(text := card(Onnx(), contents, contents.encoder, "target"))
    assert "normalised(middle(opened(" in text
    found = [
        names["normalised"](names["middle"](names["opened"](path)))
        for path in sorted(photographs.iterdir())
    ]
    assert found[0].dtype == np.float32
    assert worst(torch.from_numpy(np.stack(found)), views) <= 1.001


def test_every_size_has_a_margin_that_all_libraries_cut_off_alike() -> None:
    for size in range(16, 1025):
        resize = Transform(size).resize
        assert abs(resize - size * 256 / 224) <= 1.5
        assert round((resize - size) / 2) == (resize - size) // 2
        encoder: Any = SimpleNamespace(side=size, patch=1, channels=3)
        assert int(size / Timm().view(encoder)["crop_pct"]) == resize  # as timm computes it
