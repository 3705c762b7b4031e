"""RandAugment as MAE uses it for fine-tuning: timm's ``rand-m9-mstd0.5-inc1``, on Pillow images.

Two of fifteen operations are drawn, each applied with probability 0.5 and a strength of about 9 of
10. "inc1": every operation gets stronger as the strength grows.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps
from PIL import ImageEnhance as Enhance

from stopmim.data.pixels import MEAN

OPERATIONS, CHANCE = 2, 0.5
STRENGTH, DEVIATION, MOST = 9.0, 0.5, 10.0
FILL = tuple(round(255 * mean) for mean in MEAN)  # colour of uncovered borders

Picture = Image.Image
Draw = np.random.Generator
Operation = Callable[[Picture, float, Draw], Picture]


def rand_augment(image: np.ndarray, rng: Draw) -> np.ndarray:
    """Augments `image` (H, W, 3) uint8 by draws from `rng`."""
    picture = Image.fromarray(image)
    for operation in rng.integers(len(ALL), size=OPERATIONS):
        if rng.random() < CHANCE:
            strength = float(np.clip(rng.normal(STRENGTH, DEVIATION), 0.0, MOST)) / MOST
            picture = ALL[operation](picture, strength, rng)
    return np.asarray(picture)


def _signed(value: float, rng: Draw) -> float:
    return value if rng.random() < 0.5 else -value


def _affine(picture: Picture, *numbers: float) -> Picture:
    how = {"resample": Image.Resampling.BICUBIC, "fillcolor": FILL}
    return picture.transform(picture.size, Image.Transform.AFFINE, numbers, **how)  # type: ignore[arg-type]


def _posterize(picture: Picture, s: float, rng: Draw) -> Picture:
    bits = 4 - int(4 * s)
    return ImageOps.posterize(picture, bits) if bits else picture.point(lambda _: 0)


def _solarize_add(picture: Picture, s: float, rng: Draw) -> Picture:
    add = min(128, int(110 * s))
    return picture.point([min(255, v + add) if v < 128 else v for v in range(256)] * 3)


def _enhance(kind: Callable[[Picture], Enhance._Enhance]) -> Operation:
    return lambda picture, s, rng: kind(picture).enhance(max(0.1, 1.0 + _signed(0.9 * s, rng)))


# s is the strength, from 0 to 1.
ALL: tuple[Operation, ...] = (
    lambda p, s, rng: ImageOps.autocontrast(p),
    lambda p, s, rng: ImageOps.equalize(p),
    lambda p, s, rng: ImageOps.invert(p),
    lambda p, s, rng: p.rotate(_signed(30 * s, rng), Image.Resampling.BICUBIC, fillcolor=FILL),
    _posterize,
    lambda p, s, rng: ImageOps.solarize(p, 256 - min(256, int(256 * s))),
    _solarize_add,
    *map(_enhance, (Enhance.Color, Enhance.Contrast, Enhance.Brightness, Enhance.Sharpness)),
    lambda p, s, rng: _affine(p, 1, _signed(0.3 * s, rng), 0, 0, 1, 0),  # shear
    lambda p, s, rng: _affine(p, 1, 0, 0, _signed(0.3 * s, rng), 1, 0),
    lambda p, s, rng: _affine(p, 1, 0, _signed(0.45 * s, rng) * p.width, 0, 1, 0),  # translate
    lambda p, s, rng: _affine(p, 1, 0, 0, 0, 1, _signed(0.45 * s, rng) * p.height),
)
