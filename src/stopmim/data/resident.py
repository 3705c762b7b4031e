"""Small images that live on the GPU: they are cropped there, and only numbers travel.

Reading, cropping and sending 64 px images keeps a dozen cores busy before it keeps a GPU busy. A
set that fits is sent once; after that workers draw which image and which part of it comes when, and
no more, from the same keys as always: a run sees the same crops either way.

Shapes: N images, B of a batch, S pixels along one edge of a crop.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stopmim.base.random_keys import numpy_generator
from stopmim.config.schema import Config
from stopmim.data.crops import Box, crop_box, draw_augmentation
from stopmim.data.images import Images, InMemory

SHARE = 0.25  # of the free memory of a GPU that the images may take


def pixels_for(images: Images, device: torch.device) -> Tensor | None:
    """All `images` (N, H, W, 3) on the device; None if they are not in memory, or too many."""
    if device.type != "cuda" or not isinstance(images, InMemory) or images.pixels.ndim != 4:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    if images.pixels.nbytes > SHARE * free:
        return None
    return torch.from_numpy(np.ascontiguousarray(images.pixels)).to(device)


class Part(NamedTuple):
    """Which part of which image is to be shown, and how: what `Crops` draws, without the crop."""

    number: int
    box: Box
    augmentation: np.ndarray  # (3,) float32


class Parts(NamedTuple):
    """A batch of them. Arrays: a tensor from another process costs a shared file, and so does the
    next; these few kilobytes come through the pipe in a seventh of the time."""

    numbers: np.ndarray  # (B,) int64
    boxes: np.ndarray  # (B, 4) int64
    augmentation: np.ndarray  # (B, 3) float32


class Drawn(Dataset[Part]):
    """Asked for by (epoch, image number)."""

    def __init__(self, height: int, width: int, config: Config) -> None:
        self.shape, self.seed, self.scale = (height, width), config.seed, config.data.crop_scale

    def __getitem__(self, key: tuple[int, int]) -> Part:
        epoch, number = key
        rng = numpy_generator("crop", self.seed, epoch, number)
        return Part(number, crop_box(rng, *self.shape, self.scale), draw_augmentation(rng))


def collate(parts: list[Part]) -> Parts:
    return Parts(
        np.array([part.number for part in parts]),
        np.array([part.box for part in parts]),
        np.stack([part.augmentation for part in parts]),
    )


def crops(pixels: Tensor, numbers: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Parts of images, resized as `transforms.resized_crop` does: (B, 3, S, S) float32, 0 to 255.

    Args:
        pixels: (N, H, W, 3) uint8.
        numbers: (B,) which images.
        boxes: (B, 4) top, left, height, width.
    """
    images = pixels[numbers].permute(0, 3, 1, 2).float()  # (B, 3, H, W)
    top, left, height, width = boxes.float().unbind(1)
    rows = _weights(top, height, images.shape[2], size)  # (B, 1, S, H)
    columns = _weights(left, width, images.shape[3], size)  # (B, 1, S, W)
    with torch.autocast(images.device.type, enabled=False):
        return rows @ images @ columns.mT


def _weights(start: Tensor, length: Tensor, total: int, size: int) -> Tensor:
    """How much each of `total` pixels adds to each of `size` new ones, (B, 1, S, total).

    The antialiased bilinear filter of Pillow and torch: a triangle around the place a new pixel
    comes from, as wide as that pixel where the image shrinks, cut off at the edge of the crop.
    """
    scale = (length / size)[:, None, None]  # (B, 1, 1) old pixels per new one
    old = torch.arange(total, device=start.device) - start[:, None]  # (B, total), in the crop
    new = torch.arange(size, device=start.device)[:, None] + 0.5  # (S, 1)
    distance = ((old + 0.5)[:, None, :] - new * scale).abs() / scale.clamp(min=1)  # (B, S, total)
    inside = (old >= 0) & (old < length[:, None])
    weights = (1 - distance).clamp(min=0) * inside[:, None, :]
    return (weights / weights.sum(dim=2, keepdim=True))[:, None]
