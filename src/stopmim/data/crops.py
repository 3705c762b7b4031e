"""Crops on the CPU, one image at a time; flip, grey, blur and normalisation on the device.

Shapes: B images, S pixels along one edge of a crop. Before the device images are uint8 in memory
order H, W, 3, whatever their shape; `augment` and `normalise` return float32. Nothing here
synchronises with the device.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.data.pixels import RGB, PixelStats

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as Pillow's convert("L")

Mode = Literal["bilinear", "bicubic"]
# Aspect ratio above which `center_crop` cuts a strip before it resizes it, which moves pixels by a
# fraction: no photograph is that long, and others would crop them differently.
LONGEST = 64


class Box(NamedTuple):
    top: int
    left: int
    height: int
    width: int


def crop_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Draws a random box as torchvision's RandomResizedCrop does.

    `scale` is the range of the area as a fraction of the image; `ratio` that of width over height,
    uniform in its logarithm. If ten draws do not fit, takes the largest central box within it.
    """
    # Only `random`: the same draws as `uniform`, in a third of the time.
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.random())
        aspect = math.exp(low + (high - low) * rng.random())
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            top = int(rng.integers(height - h, endpoint=True))
            left = int(rng.integers(width - w, endpoint=True))
            return Box(top, left, h, w)
    h = min(height, round(width / ratio[0]))
    w = min(width, round(height * ratio[1]))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def resized(image: np.ndarray, height: int, width: int, mode: Mode = "bilinear") -> Tensor:
    """Resizes `image` (H, W, 3) uint8 to (3, height, width), antialiased as by Pillow.

    Several at once, (B, H, W, 3), have the same pixels in a third of the time, if they are small.
    """
    # A contiguous copy in memory order H, W, 3, viewed as a batch: torch then resizes the three
    # channels together, in two thirds of the time of a strided view or of 3, H, W.
    pixels = torch.from_numpy(np.require(image, requirements=["C", "W"]))
    batch = (pixels if pixels.ndim == 4 else pixels[None]).permute(0, 3, 1, 2)
    found = F.interpolate(batch, (height, width), mode=mode, antialias=True)
    return found if pixels.ndim == 4 else found[0]


def resized_crop(
    image: np.ndarray, box: tuple[int, int, int, int], size: int, mode: Mode = "bilinear"
) -> Tensor:
    """Crops `box` (top, left, height, width) of `image` (H, W, 3); resizes to (3, S, S) uint8."""
    top, left, height, width = box
    return resized(image[top : top + height, left : left + width], size, size, mode)


def center_crop(
    image: np.ndarray, size: int, resize: int | None = None, mode: Mode = "bilinear"
) -> Tensor:
    """Resizes the shorter side of `image` (H, W, 3) to `resize`; returns the centre (3, S, S).

    Without `resize` the shorter side becomes `size`: a square image is only resized. Several images
    of one size, (B, H, W, 3), are treated alike.
    """
    short = size if resize is None else resize
    if short < size:
        raise ValueError(f"cannot crop {size} pixels from a side resized to {short}")
    height, width = image.shape[-3:-1]
    # Resized whole, a strip of 1 x 65535 pixels would take 13 GB, most of it to be cut off.
    longest = LONGEST * min(height, width)
    top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
    image = image[..., top : top + longest, left : left + longest, :]
    height, width = image.shape[-3:-1]
    if height < width:
        height, width = short, int(short * width / height)
    else:
        height, width = int(short * height / width), short
    top, left = round((height - size) / 2), round((width - size) / 2)
    return resized(image, height, width, mode)[..., top : top + size, left : left + size]


def draw_augmentation(rng: np.random.Generator) -> np.ndarray:
    """Draws (3,) float32 for one image: flip (0 or 1), grey (0 or 1), blur radius (0 for none).

    Probabilities of the released StoP code (src/data_manager.py:92-126).
    """
    chance = rng.random(3)
    radius = rng.uniform(0.1, 2.0)
    return np.array([chance[0] < 0.5, chance[1] < 0.2, radius * (chance[2] < 0.5)], np.float32)


def flip(images: Tensor, numbers: Tensor) -> Tensor:
    """Flips the images that `draw_augmentation` chose, and does nothing else."""
    return torch.where(numbers[:, :1, None, None] > 0, images.flip(-1), images)


def augment(images: Tensor, numbers: Tensor) -> Tensor:
    """Flips, greys and blurs, in this order: (B, 3, H, W) uint8 to float32, still 0 to 255.

    `numbers` (B, 3) has one row of `draw_augmentation` per image.
    """
    _, grey, radius = numbers.view(-1, 3, 1, 1, 1).unbind(1)  # 3 x (B, 1, 1, 1)
    images = flip(images, numbers)
    red, green, blue = images.unbind(1)  # 3 x (B, H, W)
    luma = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    images = torch.where(grey > 0, luma[:, None], images)  # uint8 -> float32
    return torch.where(radius > 0, _blur(images, radius[:, 0]), images)


AUGMENT = {"flip": flip, "released": augment}  # data.augmentation -> function; "crop" has none


def _blur(images: Tensor, radius: Tensor) -> Tensor:
    """Gaussian blur of (B, 3, H, W) with standard deviations (B, 1, 1), which Pillow calls radius.

    One matrix per image and axis: row i weights the pixels by their distance from pixel i. The
    weights sum to one at the border too, so that borders do not darken.
    """

    def weights(n: int) -> Tensor:
        x = torch.arange(n, device=images.device)
        log_weight = (x[:, None] - x) ** 2 / (-2 * radius.clamp(min=0.1) ** 2)  # (B, n, n)
        # exp(-30) is negligible; below exp(-87) subnormal numbers triple the time on CPUs.
        return log_weight.clamp(min=-30).softmax(dim=-1)[:, None]  # (B, 1, n, n)

    # bfloat16 is as precise as one pixel; a sum of many needs more.
    with torch.autocast(images.device.type, enabled=False):
        return weights(images.shape[2]) @ images @ weights(images.shape[3]).mT


def normalise(images: Tensor, stats: PixelStats = RGB) -> Tensor:
    """Normalises (B, C, H, W) in stored units to float32, by the statistics of the channels."""
    if stats.per_image:
        x = images.float()
        mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True, correction=0)
        return (x - mean) / std.clamp(min=1e-6)
    # Per channel with Python numbers: a tensor of constants would be copied to the device.
    channels = list(images.unbind(1))
    if stats.low is not None and stats.high is not None:
        bounds = zip(channels, stats.low, stats.high, strict=True)
        channels = [x.clamp(low, high) for x, low, high in bounds]
    each = zip(channels, stats.mean, stats.std, strict=True)
    return torch.stack([(x - mean) / std for x, mean, std in each], dim=1)
