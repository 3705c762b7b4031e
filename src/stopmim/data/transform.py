"""The view of an image that encoders get, in evaluations, `encoder.features` and exports alike.

The shorter side is resized to 256/224 of the encoder's size (bilinear, antialiased), the middle cut
out as torchvision does, and normalised with the statistics of the encoder's training: ImageNet's
for ordinary pictures. decode.py says how files are opened.
"""

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stopmim.base.errors import DataError
from stopmim.base.files import read_regular
from stopmim.base.pictures import HIGHEST, Picture, Pictures
from stopmim.data.channels import as_kind
from stopmim.data.crops import center_crop, normalise
from stopmim.data.decode import BadImageError, decode, from_pillow, one_reason
from stopmim.data.pixels import RGB, PixelStats
from stopmim.data.rasters.open import open_raster
from stopmim.method.encoder import Encoder, ImageEncoder


def resize_for(size: int) -> int:
    """Length of the shorter side of a picture whose middle an encoder of `size` pixels sees."""
    resize = round(size * 256 / 224)
    # With a margin of 3, 7, 11... pixels, torchvision and transformers round differently.
    return resize - ((resize - size) % 4 == 3)


@dataclass(frozen=True)
class Transform:
    """Prepares images for an encoder of `size` pixels that was trained with `stats`.

    Ordinary pictures are paths, PIL images or pixels of 0 to 255. Images of other channels or
    another type are paths or arrays.
    """

    size: int
    stats: PixelStats = RGB

    @property
    def resize(self) -> int:
        return resize_for(self.size)

    @property
    def highest(self) -> float:
        """A number that is far above any normalised pixel."""
        stats = self.stats
        if stats.is_picture:
            return HIGHEST
        if stats.per_image or stats.high is None:
            return math.inf
        each = zip(stats.high, stats.mean, stats.std, strict=True)
        return max(HIGHEST, *(4 * (high - mean) / std for high, mean, std in each))

    def __call__(self, pictures: Pictures) -> Tensor:
        """Maps one image to (C, S, S), several to (B, C, S, S), float32 and normalised.

        Pixels have the type of `stats`, as tensors (C, H, W) or (B, C, H, W) or arrays (H, W, C).
        """
        several = isinstance(pictures, list | tuple)
        if isinstance(pictures, Tensor) and pictures.ndim == 4:
            several, pictures = True, list(pictures)
        every: Any = pictures if several else [pictures]
        if not every:
            return torch.empty(0, self.stats.channels, self.size, self.size)
        shown = [
            center_crop(pixels_of(picture, self.stats), self.size, self.resize) for picture in every
        ]
        found = normalise(torch.stack(shown), self.stats)
        return found if several else found[0]


def pixels_of(picture: Picture, stats: PixelStats = RGB) -> np.ndarray:
    """Pixels (H, W, C) of a path, a PIL image, an array, or a tensor (C, H, W)."""
    if isinstance(picture, Image.Image):
        if not stats.is_picture:
            wanted = f"this encoder takes {stats.describe()}"
            raise ValueError(f"a PIL image is 8-bit RGB; {wanted}: give {_pixels_wanted(stats)}")
        return from_pillow(picture)
    if isinstance(picture, Tensor):
        pixels = picture.detach().cpu().movedim(0, -1).numpy() if picture.ndim == 3 else None
    elif isinstance(picture, np.ndarray):
        plane = picture.ndim == 2 and stats.channels == 1
        pixels = picture[..., None] if plane else picture
    else:
        return _read(Path(picture), stats)
    pixels = None if pixels is None else as_kind(pixels)
    fits = pixels is not None and pixels.ndim == 3 and pixels.shape[2] == stats.channels
    if pixels is None or not fits or pixels.dtype != stats.kind:
        got = f"{tuple(picture.shape)} of {str(picture.dtype).removeprefix('torch.')}"
        pil = ", a PIL image" if stats.is_picture else ""
        raise ValueError(f"a picture must be a path{pil}, or {_pixels_wanted(stats)}; got {got}")
    return pixels


def _pixels_wanted(stats: PixelStats) -> str:
    """The arrays and tensors that an encoder takes, for a message."""
    kind = f"{stats.kind} pixels{' from 0 to 255' if stats.is_picture else ''}"
    return f"{kind}: a tensor ({stats.channels}, H, W) or an array (H, W, {stats.channels})"


def _read(path: Path, stats: PixelStats) -> np.ndarray:
    """Pixels (H, W, C) of a file: the one place where a path becomes an array."""
    try:
        if stats.is_picture:
            return decode(read_regular(path))
        raster = open_raster(os.fsencode(path))
        if (raster.shape[2], raster.kind) != (stats.channels, stats.kind):
            wanted = f"this encoder takes {stats.describe()}"
            raise BadImageError(f"{raster.shape[2]} channels of {raster.kind}; {wanted}")
        with one_reason():
            return raster.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except BadImageError as error:
        raise DataError(f"{path}: {error}") from None


def seeing(encoder: Encoder, stats: PixelStats | None = None) -> ImageEncoder:
    """`encoder`, with the transform for images of its size, so that it takes pictures.

    Without `stats`, three channels are those of ordinary pictures; other channels are unknown.
    """
    found: Any = encoder
    channels = getattr(encoder, "channels", 3)
    if stats is not None and stats.channels != channels:
        raise ValueError(f"statistics of {stats.channels} channels for an encoder of {channels}")
    if stats is not None or channels == 3:
        found.transform = Transform(found.side * found.patch, stats or RGB)
    else:
        found.transform = partial(_unknown_statistics, channels)
    return found


def _unknown_statistics(channels: int, pictures: Pictures) -> Tensor:
    """The transform of an encoder whose file does not say how its images were normalised."""
    wanted = f"floats (B, {channels}, H, W), normalised as in its training"
    raise ValueError(f"its file does not say how its {channels} channels are normalised: {wanted}")
