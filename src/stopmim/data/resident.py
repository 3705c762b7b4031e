"""Small data sets that live on the GPU and are cropped there.

Reading, cropping and copying 64 px images needs a dozen cores to keep one GPU busy. A data set that
fits is copied once; after that workers only draw the order of images and boxes, from the same
random keys as `loading.Crops`: a run sees the same crops either way.

Shapes: N images, B of a batch, S pixels along one edge of a crop.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stopmim.base.random_keys import numpy_generator
from stopmim.config.schema import Config
from stopmim.data.crops import crop_box, crop_scale, draw_augmentation
from stopmim.data.images import Images, InMemory

# float32 may hold NaN, which is replaced on the CPU alone; torch lacks most operations on uint16.
RESIDENT = ("uint8", "int16")
SHARE = 0.25  # of the free GPU memory that the images may take


def pixels_for(images: Images, device: torch.device) -> Tensor | None:
    """All images (N, H, W, C) on the GPU; None on a CPU, or if they are on disk or too many."""
    if device.type != "cuda" or not isinstance(images, InMemory):
        return None
    pixels = images.resident_pixels()
    if pixels is None or pixels.nbytes > SHARE * torch.cuda.mem_get_info(device)[0]:
        return None
    if pixels.dtype.name not in RESIDENT:
        return None
    return torch.from_numpy(np.ascontiguousarray(pixels)).to(device)


def plan(
    config: Config, shape: Sequence[int], keys: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The random draws of `loading.Crops` for images (H, W), without the crops themselves.

    Returns image numbers (B,) int64, boxes (B, 4) int64, and augmentations (B, 3) float32.
    """
    rngs = [numpy_generator("crop", config.seed, *key) for key in keys]
    scale = crop_scale(config.data, shape[0], shape[1])
    boxes = np.array([crop_box(rng, shape[0], shape[1], scale) for rng in rngs])
    augmentation = np.stack([draw_augmentation(rng) for rng in rngs])
    return np.array([number for _, number in keys]), boxes, augmentation


def crops(pixels: Tensor, numbers: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Crops resized as by `crops.resized_crop`: (B, C, S, S) float32, in stored units.

    Takes pixels (N, H, W, C); image numbers (B,); boxes (B, 4): top, left, height, width.
    """
    images = pixels[numbers].permute(0, 3, 1, 2).float()  # (B, C, H, W)
    top, left, height, width = boxes.float().unbind(1)
    rows = _weights(top, height, images.shape[2], size)  # (B, 1, S, H)
    columns = _weights(left, width, images.shape[3], size)  # (B, 1, S, W)
    with torch.autocast(images.device.type, enabled=False):
        return rows @ images @ columns.mT


def _weights(start: Tensor, length: Tensor, total: int, size: int) -> Tensor:
    """Weight of each of `total` old pixels in each of `size` new ones, (B, 1, S, total).

    The antialiased bilinear filter of Pillow and torch: a triangle around the source position of a
    new pixel, widened when the image shrinks, and cut off at the edge of the crop.
    """
    scale = (length / size)[:, None, None]  # (B, 1, 1) old pixels per new one
    old = torch.arange(total, device=start.device) - start[:, None]  # (B, total), in the crop
    new = torch.arange(size, device=start.device)[:, None] + 0.5  # (S, 1)
    distance = ((old + 0.5)[:, None, :] - new * scale).abs() / scale.clamp(min=1)  # (B, S, total)
    inside = (old >= 0) & (old < length[:, None])
    weights = (1 - distance).clamp(min=0) * inside[:, None, :]
    return (weights / weights.sum(dim=2, keepdim=True))[:, None]
