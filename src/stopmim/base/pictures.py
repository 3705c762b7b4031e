"""Pictures as an encoder takes them: files, images, pixels as stored, or normalised floats."""

import warnings
from collections.abc import Callable, Sequence
from os import PathLike

import numpy as np
from PIL import Image
from torch import Tensor

HIGHEST = 10.0  # white is 2.6 when normalised; test images with noise may be beyond that

# A file, an image, or its pixels as stored: (H, W, C) in an array, (C, H, W) in a tensor.
Picture = str | PathLike[str] | Image.Image | np.ndarray | Tensor
Pictures = Picture | Sequence[Picture]


def no_transform(pictures: Pictures) -> Tensor:
    """The transform of an encoder that was not loaded."""
    raise ValueError("an encoder that was not loaded takes only normalised floats (B, C, H, W)")


def as_input(images: Pictures, transform: Callable[[Pictures], Tensor]) -> Tensor:
    """Tensors of floats as they are, anything else by `transform`: (B, C, H, W)."""
    if not isinstance(images, Tensor) or not images.is_floating_point():
        images = transform(images)
        return images if images.ndim == 4 else images[None]
    if images.numel():
        low, high = images.detach().aminmax()
        if high > getattr(transform, "highest", HIGHEST):
            what = f"floats up to {float(high):.0f}; expected pixels in their stored type (uint8)"
            raise ValueError(f"features: {what}, or floats normalised as by encoder.transform")
        if low >= 0 and 0.5 < high <= 1:
            what = "all floats are in 0..1, which is not normalised: see encoder.transform"
            warnings.warn(f"features: {what}", stacklevel=3)
    return images
