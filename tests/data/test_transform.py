"""The transform of a loaded encoder: what it takes, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_crops import photo
from torch import Tensor

import stopmim
from stopmim.base.errors import DataError
from stopmim.data.transform import Transform, seeing
from stopmim.method.encoder import ImageEncoder, VisionTransformer

PIXELS = photo(60, 81)


@pytest.fixture
def encoder() -> ImageEncoder:
    torch.manual_seed(0)
    return seeing(VisionTransformer(48, 12, 24, 1, 2).eval())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_a_path_an_image_an_array_and_a_tensor_are_the_same_picture(
    encoder: ImageEncoder, path: Path
) -> None:
    tensor = torch.from_numpy(PIXELS).permute(2, 0, 1)
    want = encoder.transform(path)
    assert want.shape == (3, 48, 48)
    assert want.dtype == torch.float32
    for picture in (str(path), Image.open(path), PIXELS, tensor):
        assert torch.equal(encoder.transform(picture), want)
        assert torch.equal(encoder.features(picture), encoder.features(want[None]))
    several = encoder.transform([path, PIXELS])
    assert torch.equal(several, torch.stack([want, want]))
    assert torch.equal(encoder.transform(torch.stack([tensor, tensor])), several)
    assert encoder.features([path, PIXELS, tensor]).shape == (3, 24)
    assert encoder.transform([]).shape == (0, 3, 48, 48)


def test_an_image_is_turned_upright_and_laid_over_white_as_its_file_is(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.fromarray(PIXELS)
    picture.putalpha(Image.fromarray(PIXELS[..., 0]))
    picture.save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as opened:
        assert torch.equal(Transform(48)(opened), Transform(48)(tmp_path / "a.png"))
    with Image.open(tmp_path / "a.png") as opened:
        assert not torch.equal(Transform(48)(opened.convert("RGB")), Transform(48)(opened))


def test_encoders_of_files_and_of_runs_have_it(tmp_path: Path, path: Path) -> None:
    encoder = VisionTransformer(48, 12, 96, 1, 3)
    torch.save(encoder.state_dict(), tmp_path / "a.pth")
    loaded = stopmim.load_encoder(tmp_path / "a.pth")
    assert loaded.transform == Transform(48)
    assert loaded.features(path).shape == (1, 96)
    with pytest.raises(ValueError, match="not loaded"):
        encoder.features(path)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.rand(3, 60, 80) * 255,
        torch.zeros(60, 80, 3, dtype=torch.uint8),
        torch.zeros(60, 80, dtype=torch.uint8),
        PIXELS.astype(np.float32),
        PIXELS[..., 0],
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(wrong: Tensor | np.ndarray) -> None:
    with pytest.raises(ValueError, match="a path, a PIL image, or uint8 pixels") as caught:
        Transform(48)(wrong)
    assert len(str(caught.value).splitlines()) == 1


def test_floats_of_0_to_255_are_refused_and_those_of_0_to_1_are_doubted(
    encoder: ImageEncoder,
) -> None:
    pixels = torch.from_numpy(PIXELS[:48, :48]).permute(2, 0, 1)[None]
    with pytest.raises(ValueError, match=r"floats up to 2\d\d; expected .*uint8.* normalised"):
        encoder.features(pixels.float())
    with pytest.warns(UserWarning, match="not normalised"):
        encoder.features(pixels / 255)
    assert encoder.features(4 * torch.randn(1, 3, 48, 48).clamp(-2, 2)).isfinite().all()


def test_a_file_that_cannot_be_read_is_one_line(encoder: ImageEncoder, tmp_path: Path) -> None:
    (tmp_path / "b.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"absent\.jpg: cannot be read"):
        encoder.features(tmp_path / "absent.jpg")
    with pytest.raises(DataError, match=r"b\.jpg: not an image"):
        encoder.features([tmp_path / "b.jpg"])
