"""Views: the sizes, crops and filters with which each protocol shows images to an encoder.

All numbers are for models of 224 pixels; `Views.at` scales them. Pixels are normalised on the
device, see data/crops.py. Sources: VISSL's configs for I-JEPA (linear probes), logistic_eval.py of
StoP and MSN (low-shot), MAE (its probe and fine-tuning). Frames of videos are resized in
evals/tracking.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import numpy as np
from torch import Tensor

from stopmim.data.crops import Box, Mode, center_crop, crop_box, resized, resized_crop
from stopmim.data.images import Images
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import underlying
from stopmim.data.transform import resize_for
from stopmim.method.encoder import Encoder

Dataset = Literal["imagenet", "places205", "inat18", "cifar100", "clevr"]


def _scaled(number: int, size: int) -> int:
    return round(number * size / 224)


@dataclass(frozen=True)
class View:
    """View of a test image: resize, then centre crop."""

    resize: int | tuple[int, int]  # the shorter side; a pair: height and width, stretched
    crop: int | None  # None: the whole resized image
    mode: Mode = "bilinear"

    @property
    def size(self) -> int:
        """Edge of the view; the shorter one, if it is not square."""
        return self.crop or (min(self.resize) if isinstance(self.resize, tuple) else self.resize)

    def __call__(self, image: np.ndarray) -> Tensor:
        """Maps (H, W, C) to (C, S, S), or a batch (B, H, W, C) of one size."""
        if isinstance(self.resize, tuple):
            return resized(image, *self.resize, self.mode)
        if self.crop is not None:
            return center_crop(image, self.crop, self.resize, self.mode)
        sides = image.shape[-3:-1]
        height, width = (int(self.resize * side / min(sides)) for side in sides)
        return resized(image, height, width, self.mode)

    def at(self, size: int) -> Self:
        if isinstance(self.resize, tuple):
            height, width = (_scaled(side, size) for side in self.resize)
            return replace(self, resize=(height, width))
        crop = None if self.crop is None else _scaled(self.crop, size)
        return replace(self, resize=_scaled(self.resize, size), crop=crop)


@dataclass(frozen=True)
class TrainView:
    """View of a training image: a random crop or the whole image, flipped half of the time."""

    size: int
    scale: tuple[float, float] | None = (0.08, 1.0)  # area of the crop; None: the whole image
    mode: Mode = "bilinear"
    retry: bool = True  # redraw a crop that exceeds the image; False: clip it

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Maps (H, W, C) to (C, S, S)."""
        height, width = image.shape[:2]
        box = Box(0, 0, height, width)
        if self.scale is not None:
            box = (crop_box if self.retry else _clipped)(rng, height, width, self.scale)
        crop = resized_crop(image, box, self.size, self.mode)
        return crop.flip(-1) if rng.random() < 0.5 else crop

    def at(self, size: int) -> Self:
        return replace(self, size=_scaled(self.size, size))


def _clipped(rng: np.random.Generator, height: int, width: int, scale: tuple[float, float]) -> Box:
    """Draws one random crop and clips it to the image."""
    area = height * width * rng.uniform(*scale)
    aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    h = max(1, min(height, round(math.sqrt(area / aspect))))
    w = max(1, min(width, round(math.sqrt(area * aspect))))
    top, left = rng.integers(0, (height - h, width - w), endpoint=True).tolist()
    return Box(top, left, h, w)


class Views(NamedTuple):
    train: TrainView
    test: View

    def at(self, size: int) -> "Views":
        """These views for a model of `size` pixels."""
        return Views(self.train.at(size), self.test.at(size))


def native_size(encoder: Encoder) -> int:
    """Image size that the encoder was made for; 224 if it does not say."""
    return getattr(encoder, "side", 14) * getattr(encoder, "patch", 16)


def middle(encoder: Encoder, images: Images, size: int | None = None) -> View:
    """The view of data/transform.py for photographs; all of a rendered scene."""
    size = size or native_size(encoder)
    return View(size if isinstance(underlying(images), Scenes) else resize_for(size), size)


def _usual(mode: Mode) -> Views:
    return Views(TrainView(224, mode=mode), View(256, 224, mode))


# ViT sizes whose VISSL file sets the filter to bicubic; others inherit bilinear from the base file.
# CIFAR-100's base file resizes the whole image, but every ViT's file crops.
_BICUBIC = {"imagenet": "blhg", "cifar100": "blhg", "inat18": "lg", "places205": "g"}
_BICUBIC_CLASS_TOKEN = "bl"  # DINO, iBOT, MAE: on all four


def probe(dataset: Dataset, size: str = "b", *, class_token: bool = False) -> Views:
    """Views of the linear probes of I-JEPA and StoP; sizes without a VISSL file count as ViT-B."""
    if dataset == "clevr":  # stretched, never cropped: objects at the border count
        return Views(TrainView(224, scale=None), View((224, 224), None))
    size = size if size in ("l", "h", "g") else "b"
    sizes = _BICUBIC_CLASS_TOKEN if class_token else _BICUBIC[dataset]
    return _usual("bicubic" if size in sizes else "bilinear")


MAE_PROBE = Views(TrainView(224, mode="bicubic", retry=False), View(256, 224, "bicubic"))
FINETUNE = _usual("bicubic")  # finetune.py adds RandAugment

# Low-shot, both splits: the released script intends 256, as MSN, but resizes to 224.
LOWSHOT_RELEASED = View(224, 224)
