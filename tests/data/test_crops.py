import math
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from stopmim.base.random_keys import numpy_generator
from stopmim.data.crops import (
    Mode,
    augment,
    center_crop,
    crop_box,
    draw_augmentation,
    normalise,
    resized,
    resized_crop,
)
from stopmim.data.pixels import MEAN, STD, PixelStats

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Blotches and grain: content at every scale, so that a shift or an alias shows."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    return (smooth + rng.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)


def to_tensor(*images: np.ndarray) -> Tensor:
    return torch.stack([torch.from_numpy(image.copy()).permute(2, 0, 1) for image in images])


def difference(tensor: Tensor, image: Image.Image | np.ndarray) -> float:
    """Mean absolute difference of (3, H, W) and (H, W, 3), of 255."""
    expected = np.asarray(image).astype(float)
    pixels = tensor.permute(1, 2, 0).double().numpy()
    assert pixels.shape == expected.shape
    return float(np.abs(pixels - expected).mean())


def boxes(height: int, width: int, scale: tuple[float, float], n: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([crop_box(rng, height, width, scale) for _ in range(n)])  # (n, 4)


def test_boxes_lie_within_the_image_and_have_the_area_and_ratio_asked_for() -> None:
    top, left, h, w = boxes(300, 400, (0.3, 1.0)).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= 300).all()
    assert (left + w <= 400).all()
    area = h * w / (300 * 400)
    assert 0.295 < area.min() < 0.31
    assert 0.95 < area.max() <= 1
    ratio = w / h
    assert 0.745 < ratio.min() < 0.77
    assert 1.30 < ratio.max() < 1.34
    _, _, h, w = crop_box(np.random.default_rng(0), 300, 400, (0.1, 0.2), ratio=(2.0, 3.0))
    assert 1.9 < w / h < 3.1


def test_small_areas_are_uniform_and_ratios_are_uniform_in_their_logarithm() -> None:
    # Small enough that no draw is refused, large enough that rounding does not matter.
    _, _, h, w = boxes(2000, 2000, (0.1, 0.2)).T
    area = h * w / 2000**2
    assert abs(area.mean() - 0.15) < 0.002
    assert abs(area.std() - 0.1 / math.sqrt(12)) < 0.002
    ratio = np.log(w / h)
    assert abs(ratio.mean()) < 0.01  # uniform in w / h itself it would be 0.013 up or down
    assert abs(ratio.std() - 2 * math.log(4 / 3) / math.sqrt(12)) < 0.005


def test_boxes_are_mirror_symmetric_and_touch_all_four_borders() -> None:
    top, left, h, w = boxes(24, 24, (0.3, 0.9), n=6000).T
    bottom, right = 24 - top - h, 24 - left - w
    for margin in (top, left, bottom, right):
        assert margin.min() == 0
    # An exclusive range never touches the lower right; both means would differ by about 1.
    assert abs(top.mean() - bottom.mean()) < 0.2
    assert abs(left.mean() - right.mean()) < 0.2
    assert abs(np.mean(top == 0) - np.mean(bottom == 0)) < 0.03


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (2, 6000, (0, 2998, 2, 3)),
        (6000, 2, (2998, 0, 3, 2)),
        (1, 1, (0, 0, 1, 1)),
        (1, 6000, (0, 2999, 1, 1)),
    ],
)
def test_an_extreme_image_gives_its_central_part(
    height: int, width: int, box: tuple[int, int, int, int]
) -> None:
    assert (boxes(height, width, (0.3, 1.0), n=20) == box).all()


def test_a_box_depends_on_the_generator_alone() -> None:
    def draw(*key: int) -> tuple[int, ...]:
        return crop_box(numpy_generator("crop", *key), 300, 400, (0.3, 1.0))

    assert draw(0, 1) == draw(0, 1)
    assert len({draw(0, i) for i in range(20)}) == 20
    assert all(type(number) is int for number in draw(0, 1))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("box", [(10, 20, 350, 340), (0, 0, 375, 500), (100, 120, 90, 110)])
def test_a_resized_crop_is_pillows(mode: Mode, box: tuple[int, int, int, int]) -> None:
    image = photo(375, 500)
    top, left, height, width = box
    corners = (left, top, left + width, top + height)
    crop = resized_crop(image, box, 224, mode)
    assert crop.shape == (3, 224, 224)
    assert crop.dtype == torch.uint8
    whole = Image.fromarray(image)
    assert difference(crop, whole.crop(corners).resize((224, 224), FILTERS[mode])) < 0.05
    # Pillow's box lets the filter look past the border of the box; ours must not, as torchvision's.
    assert difference(crop, whole.resize((224, 224), FILTERS[mode], box=corners)) < 1
    other = FILTERS["bilinear" if mode == "bicubic" else "bicubic"]
    assert difference(crop, whole.crop(corners).resize((224, 224), other)) > 0.2


def test_downscaling_does_not_alias() -> None:
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    crop = resized_crop(stripes, (0, 0, 256, 256), 64).float()
    assert (crop[:, :, 1:-1] - 127.5).abs().max() < 1  # but for half a stripe at the border


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 6000), (1, 65_535)])
def test_extreme_shapes_pass_both_crops(shape: tuple[int, int]) -> None:
    image = np.full((*shape, 3), 77, np.uint8)
    box = crop_box(np.random.default_rng(0), *shape, (0.3, 1.0))
    for mode in FILTERS:
        assert (resized_crop(image, box, 32, mode) == 77).all()  # type: ignore[arg-type]
        assert (center_crop(image, 224, 256, mode) == 77).all()  # type: ignore[arg-type]


def test_an_image_that_may_not_be_written_is_cropped_without_a_warning() -> None:
    image = photo(40, 40)
    image.flags.writeable = False
    assert difference(resized_crop(image, (0, 0, 40, 40), 40), image) == 0


@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (256, 256), (333, 257), (120, 90)])
def test_a_centre_crop_is_resize_and_crop(shape: tuple[int, int]) -> None:
    image = photo(*shape)
    crop = center_crop(image, 224, 256)
    # torchvision: Resize(256), then CenterCrop(224), on a Pillow image.
    scale = 256 / min(shape)
    height, width = int(shape[0] * scale), int(shape[1] * scale)
    top, left = round((height - 224) / 2), round((width - 224) / 2)
    resized = Image.fromarray(image).resize((width, height), FILTERS["bilinear"])
    assert difference(crop, resized.crop((left, top, left + 224, top + 224))) < 0.05


def test_without_a_resize_the_shorter_side_fits_and_a_fitting_image_is_untouched() -> None:
    image = photo(64, 64)
    assert difference(center_crop(image, 64, None), image) == 0
    wide = photo(64, 96)
    assert difference(center_crop(wide, 64, None), wide[:, 16:80]) == 0
    small = center_crop(photo(90, 90), 64, None)
    assert (
        difference(small, Image.fromarray(photo(90, 90)).resize((64, 64), FILTERS["bilinear"]))
        < 0.05
    )
    with pytest.raises(ValueError, match="cannot crop 64"):
        center_crop(image, 64, 63)


def test_a_long_strip_is_cropped_at_its_middle() -> None:
    strip = np.zeros((10, 1001, 3), np.uint8)
    strip[:, 500:] = 200
    crop = center_crop(strip, 32, 32).float().mean(dim=(0, 1))  # (32,)
    assert crop[:13].max() < 1
    assert crop[19:].min() > 199


def test_augmentations_have_the_released_chances() -> None:
    rng = np.random.default_rng(0)
    numbers = np.stack([draw_augmentation(rng) for _ in range(20_000)])
    assert numbers.dtype == np.float32
    assert set(np.unique(numbers[:, :2])) == {0, 1}
    flip, grey, blur = (numbers > 0).mean(axis=0)
    assert abs(flip - 0.5) < 0.015
    assert abs(grey - 0.2) < 0.015
    assert abs(blur - 0.5) < 0.015
    radius = numbers[numbers[:, 2] > 0, 2]
    assert 0.1 <= radius.min() < 0.11
    assert 1.99 < radius.max() <= 2
    assert abs(radius.mean() - 1.05) < 0.02
    assert np.abs(np.corrcoef((numbers > 0).T) - np.eye(3)).max() < 0.03


def test_no_augmentation_changes_nothing() -> None:
    images = to_tensor(photo(20, 24), photo(20, 24, seed=1))
    out = augment(images, torch.zeros(2, 3))
    assert out.dtype == torch.float32
    assert torch.equal(out, images.float())


def test_each_image_gets_its_own_numbers() -> None:
    one = photo(20, 24)
    images = to_tensor(*[one] * 4)
    numbers = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.5]])
    plain, flipped, grey, blurred = augment(images, numbers)
    assert difference(plain, one) == 0
    assert difference(flipped, one[:, ::-1]) == 0
    luma = np.asarray(Image.fromarray(one).convert("L"))
    assert difference(grey, np.repeat(luma[:, :, None], 3, axis=2)) < 0.5  # Pillow rounds
    assert torch.equal(grey[0], grey[2])
    assert difference(blurred, one) > 3
    alone = augment(images[3:], numbers[3:])[0]
    torch.testing.assert_close(blurred, alone, rtol=0, atol=1e-3)


def test_flip_grey_and_blur_combine() -> None:
    one = photo(30, 24)
    all_three = augment(to_tensor(one), torch.tensor([[1, 1, 1.2]]))[0]
    grey = Image.fromarray(one[:, ::-1].copy()).convert("L").convert("RGB")
    expected = grey.filter(ImageFilter.GaussianBlur(1.2))
    assert difference(all_three, expected) < 2


@pytest.mark.parametrize("radius", [0.1, 0.5, 1.0, 2.0])
def test_the_radius_of_the_blur_is_pillows_standard_deviation(radius: float) -> None:
    one = photo(64, 96)  # not square: the axes have kernels of their own
    blurred = augment(to_tensor(one), torch.tensor([[0, 0, radius]]))[0]

    def pillow(radius: float) -> Image.Image:
        return Image.fromarray(one).filter(ImageFilter.GaussianBlur(radius))

    assert difference(blurred, pillow(radius)) < 1
    if radius >= 0.5:  # a variance, or the width of a box, would be as far off as this
        assert difference(blurred, pillow(radius)) < difference(blurred, pillow(radius * 1.3))
        assert difference(blurred, pillow(radius)) < difference(blurred, pillow(radius / 1.3))


def test_a_blurred_point_is_a_gaussian_and_a_blurred_plain_stays_plain() -> None:
    point = np.zeros((41, 41, 3), np.uint8)
    point[20, 20] = 255
    out = augment(to_tensor(point), torch.tensor([[0, 0, 2.0]]))[0, 0].double() / 255
    x = torch.arange(41).double() - 20
    assert out.sum().item() == pytest.approx(1, abs=1e-4)
    assert (out.sum(dim=0) @ x**2).item() == pytest.approx(4, abs=0.02)
    assert (out.sum(dim=1) @ x**2).item() == pytest.approx(4, abs=0.02)
    plain = torch.full((1, 3, 5, 9), 200, dtype=torch.uint8)  # smaller than the kernel
    out = augment(plain, torch.tensor([[0, 0, 2.0]]))
    torch.testing.assert_close(out, plain.float(), rtol=0, atol=1e-2)


def test_the_blur_keeps_its_precision_under_autocast() -> None:
    images, numbers = to_tensor(photo(32, 32)), torch.tensor([[0, 0, 1.0]])
    expected = augment(images, numbers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(augment(images, numbers), expected)


def test_normalised_images_have_imagenets_mean_and_deviation() -> None:
    images = to_tensor(photo(16, 20), photo(16, 20, seed=1))
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    out = normalise(images)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, (images.float() / 255 - mean) / std, rtol=0, atol=1e-5)
    assert torch.equal(normalise(images.float()), out)
    assert torch.equal(normalise(augment(images, torch.zeros(2, 3))), out)


# ----------------------------------------------------------------------- other channels and types


@pytest.mark.parametrize("channels", [1, 2, 4, 5, 12])
def test_any_number_of_channels_is_resized_as_each_alone(channels: int) -> None:
    pixels = np.concatenate([photo(60, 80, seed) for seed in range(4)], axis=2)[..., :channels]
    whole = resized(pixels, 24, 32)
    assert whole.dtype == torch.uint8
    for c in range(channels):
        alone = resized(np.repeat(pixels[..., [c]], 3, axis=2), 24, 32)
        assert (whole[c].int() - alone[0].int()).abs().max() <= 1


@pytest.mark.parametrize("kind", [np.uint16, np.int16, np.float32, ">u2"])
def test_other_types_are_resized_in_stored_units(kind: str) -> None:
    eight = photo(60, 80)
    wide = (eight.astype(np.int32) * 100).astype(kind)
    found = resized_crop(wide, (5, 7, 40, 50), 16)
    assert found.dtype == torch.float32
    usual = resized_crop(eight, (5, 7, 40, 50), 16)
    assert (found / 100 - usual.float()).abs().max() <= 1  # uint8 is rounded
    together = resized(np.stack([wide, wide[::-1]]), 16, 16)
    assert together.shape == (2, 3, 16, 16)
    torch.testing.assert_close(together[0], resized(wide, 16, 16))


def test_missing_values_become_the_smallest_of_their_channel_and_do_not_spread() -> None:
    pixels = np.full((32, 32, 3), 300.0, np.float32)
    pixels[:, :, 1] = np.linspace(250, 350, 32)
    pixels[:16, :16, 0] = np.nan
    pixels[0, 0, 1] = -np.inf
    pixels[:, :, 2] = np.nan
    found = resized(pixels, 8, 8)
    assert found.isfinite().all()
    assert (found[0] == 300).all()  # 300 is the smallest that is known
    assert found[1].min() >= 250
    assert (found[2] == 0).all()
    assert np.isnan(pixels[0, 0, 0])  # the image itself stays as it is


def test_values_are_clipped_before_they_are_normalised() -> None:
    stats = PixelStats((10.0, 0.0), (5.0, 2.0), (0.0, -4.0), (20.0, 4.0), "int16")
    images = torch.tensor([-999.0, 0, 10, 20, 999]).expand(1, 2, 1, 5)
    first, second = normalise(images, stats)[0, :, 0].tolist()
    assert first == [-2, -2, 0, 2, 2]
    assert second == [-2, 0, 2, 2, 2]


def test_an_image_without_contrast_is_not_stretched() -> None:
    stats = PixelStats((0.0,), (100.0,), (-500.0,), (500.0,), "float32", per_image=True)
    noise = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert normalise(1e-3 * noise, stats).abs().max() < 0.01
    assert abs(float(normalise(50 * noise, stats).std()) - 1) < 0.01


def test_other_channels_are_flipped_and_blurred_but_not_greyed() -> None:
    images = to_tensor(photo(24, 24)).float().repeat(1, 4, 1, 1)
    grey = torch.tensor([[0.0, 1.0, 0.0]])
    assert torch.equal(augment(images, grey), images)
    flipped = torch.tensor([[1.0, 1.0, 0.0]])
    assert torch.equal(augment(images, flipped), images.flip(-1))
    blurred = augment(images, torch.tensor([[0.0, 0.0, 1.5]]))
    expected = augment(images[:, :3], torch.tensor([[0.0, 0.0, 1.5]]))
    torch.testing.assert_close(blurred[:, :3], expected)


def test_a_large_image_of_16_bits_is_averaged_before_it_becomes_floats() -> None:
    ramp = np.linspace(0, 60_000, 6000).astype(np.uint16)
    image = np.broadcast_to(ramp[:, None], (8000, 6000, 3))  # 275 MiB, if it were not a view
    tracemalloc.start()
    found = resized(image, 32, 32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**28  # as floats it would have twice the bytes
    plain = resized(image[:1000], 32, 32)
    torch.testing.assert_close(found, plain, rtol=0, atol=30)  # a pixel is 10 apart from the next


@pytest.mark.parametrize("kind", ["uint16", "int16", "float32"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_large_image_is_resized_by_strips_to_the_same_numbers(
    kind: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.random.default_rng(0).integers(0, 9000, (211, 157, 3)).astype(kind)
    if kind == "float32":
        image[40:90, 7, 1] = np.nan
    for size in ((20, 30), (300, 157), (211, 400)):
        whole = resized(image, *size, mode)
        monkeypatch.setattr("stopmim.data.crops.FLOATS", 2**13)
        assert torch.equal(resized(image, *size, mode), whole)
        monkeypatch.undo()
