"""Crops on the CPU, one image at a time; flip, grey, blur and normalisation on the device.

Shapes: B images, C channels, S pixels along one edge of a crop. Before the device images are in
memory order H, W, C, whatever their shape. Resizing keeps uint8, and makes other types float32 in
stored units; `augment` and `normalise` return float32. Nothing here synchronises with the device.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.config.data import DataConfig
from stopmim.data.pixels import RGB, PixelStats

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as Pillow's convert("L")

Mode = Literal["bilinear", "bicubic"]
FLAT = 1e-2  # share of the data set's deviation; an image with less has no contrast to stretch
# Aspect ratio above which `center_crop` cuts a strip before it resizes it, which moves pixels by a
# fraction: no photograph is that long, and others would crop them differently.
LONGEST = 64
RATIO = 3 / 4, 4 / 3  # of the width of a crop to its height
SPARE = 2  # pixels per pixel of a crop that are read at least, so that resizing still filters them
# Bytes of an image above which squares of its pixels are averaged before it is resized, as floats,
# and about how many are left. A photograph of 8 bits that can be decoded is smaller.
HELD, LEFT = 2**28, 2**26
FLOATS = 2**24  # numbers of an image above which it becomes floats by the strip


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
    ratio: tuple[float, float] = RATIO,
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


def crop_scale(data: DataConfig, height: int, width: int) -> tuple[float, float]:
    """Range of the area of a random crop as a fraction of an image, as the config states it."""
    if data.crop_pixels is None:
        return data.crop_scale
    least, most = (min(1.0, side**2 / (height * width)) for side in data.crop_pixels)
    return least, most


def side_of_use(data: DataConfig, size: int) -> int | None:
    """The shorter side below which an image is not reduced before its crops are; None: never.

    The smallest crop keeps `SPARE` pixels for each of the `size` that it is resized to.
    """
    if data.decode == "whole" or data.crop_pixels is not None:
        return None
    least = math.sqrt(data.crop_scale[0] * RATIO[0])  # share of the shorter side, see `crop_box`
    return math.ceil(SPARE * size / least)


def resized(image: np.ndarray, height: int, width: int, mode: Mode = "bilinear") -> Tensor:
    """Resizes `image` (H, W, C) to (C, height, width), antialiased as by Pillow.

    uint8 stays uint8; other types become float32. Several at once, (B, H, W, C), have the same
    pixels in a third of the time, if they are small.
    """
    if image.nbytes > HELD and image.ndim == 3:
        spare = image.shape[0] // (2 * height), image.shape[1] // (2 * width)
        if (by := min(math.ceil(math.sqrt(image.nbytes / LEFT)), *spare)) > 1:
            image = averaged(image, by)
    if image.dtype != np.uint8:
        if image.ndim == 3 and image.size > FLOATS:
            image = _narrowed(image, width, mode)
        image = finite(image).astype(np.float32, copy=False)
    # A contiguous copy in memory order H, W, C, viewed as a batch: torch then resizes the three
    # channels together, in two thirds of the time of a strided view or of 3, H, W.
    pixels = torch.from_numpy(np.require(image, requirements=["C", "W"]))
    batch = (pixels if pixels.ndim == 4 else pixels[None]).permute(0, 3, 1, 2)
    found = F.interpolate(batch, (height, width), mode=mode, antialias=True)
    return found if pixels.ndim == 4 else found[0]


def _narrowed(image: np.ndarray, width: int, mode: Mode) -> np.ndarray:
    """`image` (H, W, C) resized to (H, width, C), float32, by strips: the filter does rows first.

    Whole, it would be held three times as floats.
    """
    height, channels = image.shape[0], image.shape[2]
    found = np.empty((height, width, channels), np.float32)
    least = _least(image) if image.dtype.kind == "f" else None
    rows = max(1, FLOATS // (4 * image[0].size))
    for top in range(0, height, rows):
        part = image[top : top + rows]
        if least is not None:
            part = np.where(np.isfinite(part), part, least)
        pixels = torch.from_numpy(part.astype(np.float32, order="C"))[None].permute(0, 3, 1, 2)
        strip = F.interpolate(pixels, (len(part), width), mode=mode, antialias=True)
        found[top : top + rows] = strip[0].permute(1, 2, 0)
    return found


def averaged(image: np.ndarray, by: int) -> np.ndarray:
    """`image` (H, W, C) with the mean of each square of `by` pixels, in little memory."""
    height, width = image.shape[0] // by, image.shape[1] // by
    found = np.empty((height, width, image.shape[2]), image.dtype)
    rows = max(1, LEFT // (image[0].nbytes * by))  # of the result
    for top in range(0, height, rows):
        n = min(rows, height - top)
        part = image[top * by : (top + n) * by, : width * by]
        if image.dtype == np.float32:
            found[top : top + n] = part.reshape(n, by, width, by, -1).mean(axis=(1, 3))
            continue
        # Whole rows first, which is several times as fast; the sums are exact.
        sums = part.reshape(n, by, -1).sum(axis=1, dtype=np.int32).reshape(n, width, by, -1)
        found[top : top + n] = np.rint(sums.sum(axis=2, dtype=np.float32) / (by * by))
    return found


def finite(image: np.ndarray) -> np.ndarray:
    """`image` (..., H, W, C), with the smallest finite value of a channel for NaN and infinity.

    Replaced before resizing, which would spread them; where a whole channel is missing, it is 0.
    """
    if image.dtype.kind != "f" or (known := np.isfinite(image)).all():
        return image
    return np.where(known, image, _least(image))


def _least(image: np.ndarray) -> np.ndarray:
    """The smallest finite value of each channel of `image` (..., H, W, C), or 0."""
    known = np.isfinite(image)
    least = image.min(axis=(-3, -2), keepdims=True, where=known, initial=np.inf)
    return np.where(np.isfinite(least), least, 0)


def resized_crop(
    image: np.ndarray, box: tuple[int, int, int, int], size: int, mode: Mode = "bilinear"
) -> Tensor:
    """Crops `box` (top, left, height, width) of `image` (H, W, C); resizes to (C, S, S)."""
    top, left, height, width = box
    return resized(image[top : top + height, left : left + width], size, size, mode)


def center_crop(
    image: np.ndarray, size: int, resize: int | None = None, mode: Mode = "bilinear"
) -> Tensor:
    """Resizes the shorter side of `image` (H, W, C) to `resize`; returns the centre (C, S, S).

    Without `resize` the shorter side becomes `size`: a square image is only resized. Several images
    of one size, (B, H, W, C), are treated alike.
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
    """Flips, greys and blurs, in this order: (B, C, H, W) to float32, in the same units.

    `numbers` (B, 3) has one row of `draw_augmentation` per image. Only three channels are greyed:
    others are not red, green and blue.
    """
    _, grey, radius = numbers.view(-1, 3, 1, 1, 1).unbind(1)  # 3 x (B, 1, 1, 1)
    images = flip(images, numbers)
    if images.shape[1] == 3:
        red, green, blue = images.unbind(1)  # 3 x (B, H, W)
        luma = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
        images = torch.where(grey > 0, luma[:, None], images)  # uint8 -> float32
    images = images.float()
    return torch.where(radius > 0, _blur(images, radius[:, 0]), images)


AUGMENT = {"flip": flip, "released": augment}  # data.augmentation -> function; "crop" has none


def _blur(images: Tensor, radius: Tensor) -> Tensor:
    """Gaussian blur of (B, C, H, W) with standard deviations (B, 1, 1), which Pillow calls radius.

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
    # Per channel with Python numbers: a tensor of constants would be copied to the device.
    channels = list(images.unbind(1))
    if stats.low is not None and stats.high is not None:
        bounds = zip(channels, stats.low, stats.high, strict=True)
        channels = [x.clamp(low, high) for x, low, high in bounds]
    each = zip(channels, stats.mean, stats.std, strict=True)
    found = torch.stack([(x - mean) / std for x, mean, std in each], dim=1)
    if stats.per_image:  # in units of the data set first: a plane that is almost constant stays so
        mean, std = found.mean((2, 3), keepdim=True), found.std((2, 3), keepdim=True, correction=0)
        found = (found - mean) / std.clamp(min=FLAT)
    return found
