"""How the evaluations of the paper see images: the sizes, crops and filters of each protocol.

All numbers are for models of 224 pixels; `Views.at` scales them. Normalisation is left to the
device, see transforms.py. Where they come from: VISSL's configs for I-JEPA (linear probes), StoP's
logistic_eval.py and MSN's (low-shot), MAE (its probe and fine-tuning). Frames of videos are resized
by evals/tracking.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import numpy as np
from torch import Tensor

from stopmim.data.crops import Box, Mode, center_crop, crop_box, resized, resized_crop

Dataset = Literal["imagenet", "places205", "inat18", "cifar100", "clevr"]


def _scaled(number: int, size: int) -> int:
    return round(number * size / 224)


@dataclass(frozen=True)
class View:
    """How a test image is seen: resized, then its middle square."""

    resize: int | tuple[int, int]  # the shorter side; a pair: height and width, whatever they were
    crop: int | None  # None: all that is there after the resize
    mode: Mode = "bilinear"

    @property
    def size(self) -> int:
        """Edge of what is seen; the shorter one, if it need not be a square."""
        return self.crop or (min(self.resize) if isinstance(self.resize, tuple) else self.resize)

    def __call__(self, image: np.ndarray, rng: np.random.Generator | None = None) -> Tensor:
        """(H, W, 3) to (3, S, S), both uint8; nothing here is random."""
        if isinstance(self.resize, tuple):
            return resized(image, *self.resize, self.mode)
        if self.crop is not None:
            return center_crop(image, self.crop, self.resize, self.mode)
        height, width = image.shape[:2]
        short = min(height, width)
        shape = int(self.resize * height / short), int(self.resize * width / short)
        return resized(image, *shape, self.mode)

    def at(self, size: int) -> Self:
        if isinstance(self.resize, tuple):
            return replace(
                self, resize=(_scaled(self.resize[0], size), _scaled(self.resize[1], size))
            )
        crop = None if self.crop is None else _scaled(self.crop, size)
        return replace(self, resize=_scaled(self.resize, size), crop=crop)


@dataclass(frozen=True)
class TrainView:
    """How a training image is seen: a random crop or all of it, flipped every second time."""

    size: int
    scale: tuple[float, float] | None = (0.08, 1.0)  # area of the crop; None: the whole image
    mode: Mode = "bilinear"
    retry: bool = True  # a crop that sticks out is drawn again; False: it is cut off

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> Tensor:
        """(H, W, 3) to (3, S, S), both uint8."""
        height, width = image.shape[:2]
        box = Box(0, 0, height, width)
        if self.scale is not None:
            box = (crop_box if self.retry else _cut_box)(rng, height, width, self.scale)
        crop = resized_crop(image, box, self.size, self.mode)
        return crop.flip(-1) if rng.random() < 0.5 else crop

    def at(self, size: int) -> Self:
        return replace(self, size=_scaled(self.size, size))


def _cut_box(rng: np.random.Generator, height: int, width: int, scale: tuple[float, float]) -> Box:
    """A random crop drawn once: what would stick out of the image is cut off."""
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
        """The same for a model of `size` pixels."""
        return Views(self.train.at(size), self.test.at(size))


def _usual(mode: Mode) -> Views:
    return Views(TrainView(224, mode=mode), View(256, 224, mode))


# The files of VISSL that set the filter to bicubic, by the size of the ViT. Without one the base
# file counts (bilinear). CIFAR-100's base file resizes the whole image, but every ViT's file crops.
_BICUBIC = {"imagenet": "blhg", "cifar100": "blhg", "inat18": "lg", "places205": "g"}
_BICUBIC_CLASS_TOKEN = "bl"  # DINO, iBOT, MAE: on all four


def probe(dataset: Dataset, arch: str = "vit_b16", *, class_token: bool = False) -> Views:
    """The linear probes of I-JEPA and StoP. Sizes that VISSL has no file for are taken as ViT-B."""
    if dataset == "clevr":  # the border matters for counting: stretched, never cropped
        return Views(TrainView(224, scale=None), View((224, 224), None))
    size = arch.removeprefix("vit_")[0] if arch.startswith(("vit_l", "vit_h", "vit_g")) else "b"
    sizes = _BICUBIC_CLASS_TOKEN if class_token else _BICUBIC[dataset]
    return _usual("bicubic" if size in sizes else "bilinear")


CIFAR100_BASE = Views(TrainView(224, scale=None), View(224, None))  # as I-JEPA's text describes it
MAE_PROBE = Views(TrainView(224, mode="bicubic", retry=False), View(256, 224, "bicubic"))
FINETUNE = _usual("bicubic")  # without RandAugment, which the fine-tuning adds

# One view for both splits. The released script meant 256 and resizes to 224.
LOWSHOT = {"released": View(224, 224), "msn": View(256, 224)}
