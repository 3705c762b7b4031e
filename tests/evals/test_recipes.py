"""What an evaluation sees is what its protocol says, pixel by pixel where Pillow can tell."""

import numpy as np
import pytest
import torch
from PIL import Image
from test_crops import FILTERS, difference, photo

from stopmim.data.crops import Mode, resized
from stopmim.evals.views import FINETUNE, LOWSHOT_RELEASED, MAE_PROBE, TrainView, View, probe


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "shape", [(375, 500), (500, 375), (32, 32), (224, 224), (64, 61), (1200, 900), (7, 5)]
)
def test_resizing_is_pillows_up_and_down(shape: tuple[int, int], mode: Mode) -> None:
    image = photo(*shape)
    for height, width in [(224, 224), (256, 341), (64, 64)]:
        expected = Image.fromarray(image).resize((width, height), FILTERS[mode])
        assert difference(resized(image, height, width, mode), expected) < 0.3


@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (301, 299), (40, 30)])
def test_the_usual_test_view_is_resize_256_and_centre_crop_224(shape: tuple[int, int]) -> None:
    image = photo(*shape)
    height, width = shape
    short = min(shape)
    size = int(256 * width / short), int(256 * height / short)
    whole = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    expected = whole.crop((left, top, left + 224, top + 224))
    assert difference(probe("imagenet").test(image), expected) < 0.1


def test_the_filters_are_those_of_the_config_files() -> None:
    def filters(dataset: str) -> str:
        sizes = ("b", "l", "h", "g", "micro")
        views = [probe(dataset, size) for size in sizes]  # type: ignore[arg-type]
        assert all(view.train.mode == view.test.mode for view in views)
        return " ".join("c" if view.test.mode == "bicubic" else "l" for view in views)

    assert filters("imagenet") == "c c c c c"
    assert filters("cifar100") == "c c c c c"
    assert filters("places205") == "l l l c l"
    assert filters("inat18") == "l c l c l"
    assert filters("clevr") == "l l l l l"
    assert probe("places205", "b", class_token=True).test.mode == "bicubic"


def test_clevr_is_stretched_and_nothing_of_it_cut_off() -> None:
    image = photo(320, 480)
    expected = Image.fromarray(image).resize((224, 224), Image.Resampling.BILINEAR)
    views = probe("clevr")
    assert difference(views.test(image), expected) < 0.1
    seen = {
        tuple(views.train(image, np.random.default_rng(i)).flatten().tolist()) for i in range(8)
    }
    assert len(seen) == 2  # as it is, and mirrored
    mirrored = torch.stack([views.test(image), views.test(image).flip(-1)])
    assert seen == {tuple(x.flatten().tolist()) for x in mirrored}


def test_the_released_low_shot_view_is_not_the_intended_one() -> None:
    assert View(224, 224, "bilinear") == LOWSHOT_RELEASED
    image = photo(300, 400)
    assert not torch.equal(LOWSHOT_RELEASED(image), View(256, 224)(image))


def test_views_scale_with_the_model() -> None:
    assert probe("imagenet").at(64).test == View(73, 64, "bicubic")
    assert probe("imagenet").at(448).test == View(512, 448, "bicubic")
    assert probe("clevr").at(64).test == View((64, 64), None)
    assert FINETUNE.at(96).train.size == 96
    assert View(224, None).at(64)(photo(32, 32)).shape == (3, 64, 64)
    assert probe("inat18").at(48).train(photo(90, 50), np.random.default_rng(0)).shape == (
        3,
        48,
        48,
    )


def test_a_train_view_is_a_function_of_its_generator_and_flips_half_of_the_time() -> None:
    image = np.zeros((50, 60, 3), np.uint8)
    image[:, 30:] = 200
    view = TrainView(16, scale=None)
    flipped = [bool(view(image, np.random.default_rng(i))[0, 0, 0]) for i in range(400)]
    assert 160 < sum(flipped) < 240
    crop = TrainView(16)
    a, b = (crop(photo(50, 60), np.random.default_rng(3)) for _ in range(2))
    assert torch.equal(a, b)


def test_the_crop_of_maes_probe_is_cut_off_where_others_draw_again() -> None:
    """In a strip nearly every draw sticks out: cut off, it spans the height at any place."""
    strip = np.zeros((20, 200, 3), np.uint8)
    strip[:, :, 0] = np.arange(200)
    rngs = [np.random.default_rng(i) for i in range(60)]
    cut = [MAE_PROBE.train(strip, rng)[0].float().mean().item() for rng in rngs]
    assert max(cut) - min(cut) > 60
    assert MAE_PROBE.test == FINETUNE.test == View(256, 224, "bicubic")
    assert FINETUNE.train.retry
