"""Crops on the device equal those on the CPU."""

import numpy as np
import pytest
import torch

from stopmim.data.crops import crop_box, resized_crop
from stopmim.data.images import InMemory
from stopmim.data.loading import Crops
from stopmim.data.resident import crops, pixels_for, plan
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import Subset
from tiny import NoiseImages, tiny


def test_they_are_those_of_the_cpu_to_half_a_grey_level() -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (6, 9, 11, 3), dtype=np.uint8)
    pixels = np.repeat(np.repeat(small, 8, axis=1), 8, axis=2)  # (6, 72, 88, 3), edges in it
    numbers = [3, 0, 5, 3, 1, 2, 4, 5]
    boxes = [crop_box(rng, 72, 88, (0.05, 1.0)) for _ in numbers]
    boxes[0] = boxes[0]._replace(top=0, left=0, height=72, width=88)
    for size in (24, 64, 80):  # smaller, larger and both
        found = crops(torch.from_numpy(pixels), torch.tensor(numbers), torch.tensor(boxes), size)
        for i, (number, box) in enumerate(zip(numbers, boxes, strict=True)):
            expected = resized_crop(pixels[number], box, size)
            assert (found[i] - expected.float()).abs().mean() < 0.5
            assert (found[i] - expected.float()).abs().max() < 2.0


def test_a_crop_does_not_see_what_lies_beside_it() -> None:
    pixels = np.zeros((1, 16, 16, 3), np.uint8)
    pixels[:, :, 8:] = 255
    left = crops(torch.from_numpy(pixels), torch.tensor([0]), torch.tensor([[0, 0, 16, 8]]), 16)
    assert left.max() == 0


def test_the_same_images_are_shown_in_the_same_way_as_by_workers_that_crop() -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (5, 10, 12, 3), dtype=np.uint8)
    images = Arrays(np.repeat(np.repeat(small, 4, axis=1), 4, axis=2), {}, [], "noise")
    config = tiny()
    usual = Crops(images, config)
    for key in ((0, 3), (1, 3), (7, 0)):
        sample, parts = usual[key], plan(config, (40, 48), [key])
        assert sample.image is not None
        numbers, boxes, augmentation = map(torch.from_numpy, parts)
        crop = crops(torch.from_numpy(images.pixels), numbers, boxes, config.image_size)[0]
        assert (crop - sample.image.float()).abs().mean() < 0.5
        assert np.array_equal(augmentation[0], sample.augmentation)


def test_only_images_that_offer_their_pixels_move_to_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenes, grey = Scenes(2, 24), Arrays(np.zeros((2, 8, 8), np.uint8), {}, [], "grey")
    for images in (NoiseImages(), Subset(scenes, [0])):  # read one by one, as they like
        assert not isinstance(images, InMemory)
    assert pixels_for(scenes, torch.device("cpu")) is None
    free = scenes.pixels.nbytes * 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    found = pixels_for(scenes, torch.device("cuda"))
    assert found is not None
    assert np.array_equal(found.numpy(), scenes.pixels)
    assert pixels_for(grey, torch.device("cuda")) is None
    free -= 4
    assert pixels_for(scenes, torch.device("cuda")) is None
