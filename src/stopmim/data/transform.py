"""The view of a picture that encoders get, in evaluations, `encoder.features` and exports alike.

Resize the shorter side to 256/224 of the encoder's size (bilinear, antialiased), cut out the middle
as torchvision does, normalise with ImageNet's statistics. decode.py says how files are opened.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stopmim.base.errors import DataError
from stopmim.base.files import read_regular
from stopmim.data.crops import center_crop, normalise
from stopmim.data.decode import BadImageError, decode, from_pillow
from stopmim.method.encoder import Encoder, ImageEncoder, Picture, Pictures


def resize_for(size: int) -> int:
    """Length of the shorter side of a picture whose middle an encoder of `size` pixels sees."""
    resize = round(size * 256 / 224)
    # Of a margin of 3, 7, 11... pixels, torchvision cuts off one more first than transformers does.
    return resize - ((resize - size) % 4 == 3)


@dataclass(frozen=True)
class Transform:
    """Shows pictures to an encoder of `size` pixels: paths, PIL images, or pixels of 0 to 255."""

    size: int

    @property
    def resize(self) -> int:
        return resize_for(self.size)

    def __call__(self, pictures: Pictures) -> Tensor:
        """Maps one picture to (3, S, S), several to (B, 3, S, S), float32 and normalised.

        Pixels are uint8, as tensors (3, H, W) or (B, 3, H, W) or as arrays (H, W, 3).
        """
        several = isinstance(pictures, list | tuple)
        if isinstance(pictures, Tensor) and pictures.ndim == 4:
            several, pictures = True, list(pictures)
        every: Any = pictures if several else [pictures]
        if not every:
            return torch.empty(0, 3, self.size, self.size)
        shown = [center_crop(pixels_of(picture), self.size, self.resize) for picture in every]
        found = normalise(torch.stack(shown))
        return found if several else found[0]


def pixels_of(picture: Picture) -> np.ndarray:
    """RGB pixels (H, W, 3), uint8, of a path, a PIL image, an array or a tensor (3, H, W)."""
    if isinstance(picture, Image.Image):
        return from_pillow(picture)
    if isinstance(picture, Tensor):
        pixels = picture.detach().cpu().movedim(0, -1).numpy() if picture.ndim == 3 else None
    elif isinstance(picture, np.ndarray):
        pixels = picture
    else:
        return _read(Path(picture))
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        got = f"{tuple(picture.shape)} of {str(picture.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"a picture must be a path, a PIL image, or uint8 pixels from 0 to 255: a tensor "
            f"(3, H, W) or an array (H, W, 3); got {got}"
        )
    return pixels


def _read(path: Path) -> np.ndarray:
    try:
        return decode(read_regular(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except BadImageError as error:
        raise DataError(f"{path}: {error}") from None


def seeing(encoder: Encoder) -> ImageEncoder:
    """`encoder`, with the transform for images of its size, so that it takes pictures."""
    found: Any = encoder
    found.transform = Transform(found.side * found.patch)
    return found
