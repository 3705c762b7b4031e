"""Evaluations of images that are not 8-bit RGB, as the encoder was trained to see them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stopmim.base.errors import DataError
from stopmim.data.channels import Form
from stopmim.data.pixels import PixelStats
from stopmim.data.sources.arrays import Arrays
from stopmim.data.survey import measure
from stopmim.data.transform import seeing
from stopmim.evals import cache
from stopmim.evals.features import extract, frozen
from stopmim.evals.finetune import finetune
from stopmim.evals.inputs import Inputs
from stopmim.evals.recipes import Tuning
from stopmim.evals.request import ImageRequest
from stopmim.evals.showing import Showing
from stopmim.evals.views import View
from stopmim.method.encoder import VisionTransformer
from tiny import NoiseImages, tiny

CPU = torch.device("cpu")


def many(n: int = 24, channels: int = 5) -> Arrays:
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 2
    pixels = rng.integers(0, 9000, (n, 30, 30, channels)) + 20_000 * labels[:, None, None, None]
    return Arrays(pixels.astype(np.uint16), {"class": labels}, [], "many")


@pytest.fixture(scope="module")
def stats() -> PixelStats:
    return measure(many(), Form(5, "uint16"), tiny())[0]


@pytest.fixture
def encoder(stats: PixelStats) -> VisionTransformer:
    torch.manual_seed(0)
    found = VisionTransformer(24, 6, 48, 2, 2, channels=5).eval()
    seeing(found, stats)
    return found


def test_evaluations_show_an_encoder_what_its_transform_does(encoder: VisionTransformer) -> None:
    images = many()
    found = extract(encoder, images, size=24)
    with torch.no_grad():
        direct = encoder.features([images.read(i) for i in range(len(images))])
    torch.testing.assert_close(found, direct, atol=1e-5, rtol=1e-4)


def test_views_of_files_read_by_processes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneByOne(Arrays):
        def read_together(self, numbers: np.ndarray) -> np.ndarray | None:
            return None

    pixels, view = many(40).pixels, View(28, 24)
    together = Showing(Arrays(pixels, {}, [], "x"), view)
    apart = Showing(OneByOne(pixels, {}, [], "x"), view)
    monkeypatch.setattr("stopmim.evals.showing.FEW", 8)
    monkeypatch.setenv("STOPMIM_WORKERS", "2")
    first, second = (torch.cat([b.clone() for b in x.batches(CPU, 16)]) for x in (together, apart))
    assert first.shape == (40, 5, 24, 24)
    assert first.dtype == torch.float32
    assert torch.equal(first, second)


def test_an_image_of_other_channels_is_named_and_never_broadcast() -> None:
    class Mixed(NoiseImages):
        def read(self, i: int) -> np.ndarray:
            pixels = super().read(i)
            return pixels if i != 7 else pixels[..., :1]

    with pytest.raises(DataError, match="noise 7: 1 channel, 8 bit, where the others have 3 chan"):
        list(Showing(Mixed(), View(28, 24)).batches(CPU))


def test_statistics_are_part_of_the_cache_key(
    encoder: VisionTransformer, stats: PixelStats
) -> None:
    before, images = cache.of_encoder(encoder), many()
    view = View(28, 24)
    first = frozen(encoder, images, view)
    seeing(encoder, replace(stats, mean=tuple(x + 5000 for x in stats.mean)))
    assert cache.of_encoder(encoder) != before
    assert not torch.equal(frozen(encoder, images, view), first)


def test_images_of_other_channels_are_refused(encoder: VisionTransformer) -> None:
    with pytest.raises(DataError, match="images of 5 channels; these images have 3"):
        extract(encoder, NoiseImages(), size=24)


def test_finetuning_takes_any_channels_and_says_what_is_left_out(
    encoder: VisionTransformer, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ImageRequest(device="cpu")
    inputs = Inputs(encoder, many(), many(), request)
    recipe = Tuning(epochs=3, batch_size=8, lr=1e-3, warmup_epochs=0, erase=0.5)
    correct = finetune(inputs, "class", recipe)
    assert correct[-1] >= 20  # of 24, which differ in brightness
    assert "RandAugment is for 8-bit RGB" in capsys.readouterr().err
