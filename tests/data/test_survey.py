"""Channels and types: found by looking, checked image by image, measured once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stopmim.base.errors import DataError, UserError
from stopmim.config.schema import Config
from stopmim.data.channels import Form, as_kind, fitting
from stopmim.data.decode import BadImageError
from stopmim.data.pixels import RGB, PixelStats
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.open import is_generated, open_images
from stopmim.data.subset import Selected, Subset, underlying
from stopmim.data.survey import PEAK, check_like, common_form, measure
from tiny import NoiseImages

INLINE = Config.model_validate({"runtime": {"workers": 0}})


def stack(n: int, channels: int, kind: Any = np.uint16, high: int = 4000) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high, (n, 20, 24, channels)).astype(kind)


def arrays(pixels: np.ndarray, **options: Any) -> Arrays:
    return Arrays(pixels, {}, [], "x", **options)


class Bare(NoiseImages):
    """Images that say nothing about themselves."""

    def __init__(self, pixels: list[np.ndarray], broken: tuple[int, ...] = ()) -> None:
        super().__init__(1, broken)
        self.images: Any = pixels


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.bool_, "uint8"), (np.int8, "int16"), (np.uint16, "uint16"), (">u2", "uint16"),
        (np.int32, "float32"), (np.uint32, "float32"), (np.float16, "float32"),
        (np.float64, "float32"), (np.complex64, None), (object, None),
    ],
)  # fmt: skip
def test_other_types_become_the_smallest_that_holds_them(given: Any, kept: str | None) -> None:
    found = as_kind(np.array([[[0], [1]]]).astype(given))
    assert (found is None) if kept is None else (found is not None and found.dtype.name == kept)


def test_values_keep_their_meaning_in_another_type() -> None:
    for values in (np.array([-128, 127], np.int8), np.array([2**31 - 1, -5], np.int32)):
        found = as_kind(values)
        assert found is not None
        np.testing.assert_allclose(found.astype(float), values.astype(float), rtol=1e-7)


def test_a_source_states_its_channels_or_they_are_looked_at() -> None:
    named = arrays(stack(4, 5), channel_names=list("abcde"))
    assert common_form(named) == Form(5, "uint16", tuple("abcde"))
    assert common_form(arrays(stack(4, 3, np.uint8, 255)[..., 0])) == Form()  # grey pictures
    assert common_form(arrays(stack(4, 3)[..., 0])) == Form(1, "uint16")
    assert common_form(NoiseImages()) == Form()
    floats = Bare([*stack(6, 7, np.float64)], broken=(0,))
    assert common_form(floats, INLINE) == Form(7, "float32")
    assert common_form(Bare([*stack(3, 7)], broken=(0, 1, 2)), INLINE) == Form()


def test_too_many_channels_are_refused() -> None:
    with pytest.raises(DataError, match="noise 0: 65 channels; expected 1 to 64"):
        common_form(Bare([*stack(3, 65)]), INLINE)


def test_an_image_unlike_the_others_says_so() -> None:
    stats = PixelStats((0.0,) * 12, (1.0,) * 12, kind="uint16")
    assert fitting(stack(1, 12)[0], stats).dtype == np.uint16
    for pixels, why in (
        (stack(1, 4)[0], "4 channels, 16 bit, where the others have 12 channels, 16 bit"),
        (stack(1, 12, np.uint8)[0], "12 channels, 8 bit, where the others have 12 channels, 16"),
        (stack(1, 3, np.uint8)[0], "3 channels, 8 bit, where the others have 12"),
        (stack(1, 1)[0, :, :, 0], "2 dimensions"),
        (stack(1, 12, np.complex64)[0], "12 channels, complex64, where"),
    ):
        with pytest.raises(BadImageError, match=why):
            fitting(pixels, stats)
    with pytest.raises(BadImageError, match="12 channels, 16 bit, where the others have 3"):
        fitting(stack(1, 12)[0], RGB)


def test_statistics_are_those_of_the_values_between_the_percentiles() -> None:
    pixels = np.random.default_rng(1).normal(1000, 100, (60, 40, 40, 2)).astype(np.float32)
    pixels[..., 1] = 5 - pixels[..., 1] / 1000
    pixels[0, :3, :3, 0] = 1e9  # a glint: 9 of 96,000 pixels
    pixels[:, 0, 0, 1] = np.nan
    stats, count = measure(arrays(pixels), Form(2, "float32"), INLINE)
    assert count == 60
    assert stats.low is not None
    assert stats.high is not None
    np.testing.assert_allclose(stats.mean, [1000, 4], rtol=0.01)
    np.testing.assert_allclose(stats.std, [100, 0.1], rtol=0.05)
    np.testing.assert_allclose(stats.low, [691, 3.69], rtol=0.02)  # 3.09 deviations below
    np.testing.assert_allclose(stats.high, [1309, 4.31], rtol=0.02)


def test_statistics_are_a_function_of_the_seed_and_the_images() -> None:
    images = arrays(stack(1500, 2))
    seen = common_form(images)
    first, count = measure(images, seen, INLINE)
    assert count == 1000
    workers = Config.model_validate({"runtime": {"workers": 2}})
    assert measure(images, seen, workers)[0] == first
    assert measure(images, seen, INLINE.model_copy(update={"seed": 1}))[0] != first


def test_empty_and_almost_empty_channels_are_safe() -> None:
    pixels = np.zeros((10, 64, 64, 3), np.float32)
    pixels[..., 1] = np.nan
    pixels[3, 5, 5, 2] = 700  # one pixel of 40,960: beyond every percentile
    stats, _ = measure(arrays(pixels), Form(3, "float32"), INLINE)
    assert (stats.low, stats.high) == ((0, 0, 0), (1, 1, 700))
    assert stats.std == (1 / PEAK, 1 / PEAK, 700 / PEAK)


def test_bounds_of_the_config_are_kept() -> None:
    config = Config.model_validate(
        {"runtime": {"workers": 0}, "data": {"channels": 2, "low": (0, 0), "high": (100, 9000)}}
    )
    stats, _ = measure(arrays(stack(50, 2)), Form(2, "uint16"), config)
    assert (stats.low, stats.high) == ((0, 0), (100, 9000))
    assert 90 < stats.mean[0] <= 100
    assert 1900 < stats.mean[1] < 2100


def test_images_for_another_encoder_are_refused_in_one_line() -> None:
    said = "the encoder takes images of 3 channels, 8 bit; x 0 has 12 channels, 16 bit; "
    with pytest.raises(DataError, match=said):
        check_like(arrays(stack(2, 12)), RGB)
    check_like(NoiseImages(), RGB)


def test_a_part_of_the_images_has_their_channels() -> None:
    images = arrays(stack(6, 4), channel_names=list("abcd"))
    assert common_form(Subset(images, [1, 3])) == (4, "uint16", tuple("abcd"))


# ----------------------------------------------------------------------- some of the channels


def test_channels_are_selected_by_number_or_name() -> None:
    images = arrays(stack(6, 4), channel_names=list("abcd"))
    for wanted in (["3", "1"], ["d", "b"]):
        some = Selected(images, wanted)
        assert common_form(some) == (2, "uint16", ("d", "b"))
        np.testing.assert_array_equal(some.read(2), images.pixels[2][..., [3, 1]])
        together = some.read_together(np.array([0, 5]))
        np.testing.assert_array_equal(together, images.pixels[[0, 5]][..., [3, 1]])
    prints = [Selected(images, wanted).fingerprint for wanted in (["0"], ["1"], ["1", "0"])]
    assert len({images.fingerprint, *prints}) == 4
    assert underlying(Subset(some, [0])) is images


def test_channels_of_images_that_say_nothing_are_found_as_they_are_read() -> None:
    some = Selected(Bare([*stack(3, 5)]), ["4", "0"])
    assert common_form(some, INLINE) == Form(2, "uint16")
    short = Selected(Bare([*stack(3, 3)]), ["4", "0"])
    with pytest.raises(BadImageError, match="3 channels; channel 4 is missing"):
        short.read(0)


def test_a_prefix_selects_channels_of_any_source(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=stack(6, 4), bands=np.array(["r", "g", "b", "nir"]))
    images = open_images(f"channels:nir,r:{tmp_path / 'a.npz'}")
    assert common_form(images) == (2, "uint16", ("nir", "r"))
    assert open_images("channels:0:scenes:4:16").read(1).shape == (16, 16, 1)
    assert is_generated("channels:0:scenes:4:16")
    assert is_generated("bands")
    assert not is_generated(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("text", ["channels:", "channels:0", "channels:0,0:scenes", "channels:,:x"])
def test_a_wrong_selection_is_explained(text: str) -> None:
    with pytest.raises(UserError, match="expected channels:0,3,5:DATA"):
        open_images(text)


def test_an_unknown_channel_is_named() -> None:
    with pytest.raises(UserError, match="channels:12: no such channel; there are red, green, blue"):
        open_images("channels:12:bands:2:8")
    with pytest.raises(UserError, match="channels:alpha: no such channel; there are 0 to 2"):
        open_images("channels:alpha:scenes:2:8")


# ----------------------------------------------------------------------- archives


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"x": stack(4, 12)}, (12, "uint16")),
        ({"x": stack(4, 1, np.uint8)}, (1, "uint8")),
        ({"x": stack(4, 3, np.float64)}, (3, "float32")),
        ({"x": stack(4, 3)[..., 0]}, (1, "uint16")),
        # Pictures win over what may be masks or depths, as they always did.
        ({"x": stack(4, 3, np.uint8), "depth": stack(4, 1)[..., 0]}, (3, "uint8")),
        ({"x": stack(4, 5), "mask": stack(4, 1)[..., 0]}, (5, "uint16")),
    ],
)
def test_an_archive_of_any_channels_is_opened(
    tmp_path: Path, given: dict[str, Any], seen: tuple[int, str]
) -> None:
    np.savez(tmp_path / "a.npz", **given, labels=np.arange(4))
    images = open_images(tmp_path / "a.npz")
    assert common_form(images)[:2] == seen
    assert images.labels["class"].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(images.read(2), given["x"][2].reshape(20, 24, -1))


def test_channels_before_height_and_width_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=stack(4, 12)[:, :20, :20].transpose(0, 3, 1, 2))
    with pytest.raises(DataError, match="0 arrays of images; looked for one"):
        open_images(tmp_path / "a.npz")


def test_channels_in_another_order_are_refused_with_the_order_to_give() -> None:
    pixels = np.zeros((2, 8, 8, 2), np.uint16)
    stats = PixelStats((0.0, 0.0), (1.0, 1.0), kind="uint16", names=("DAPI", "GFP"))
    check_like(Arrays(pixels, {}, [], "x", channel_names=["DAPI", "GFP"]), stats)
    with pytest.raises(DataError, match=r"in another order .* give channels:DAPI,GFP:DATA"):
        check_like(Arrays(pixels, {}, [], "x", channel_names=["GFP", "DAPI"]), stats)
