"""The published protocols as data: how a linear classifier is trained on which data set.

The numbers are those of the VISSL configs behind the I-JEPA and StoP tables (commit 09270ed2,
configs/config/benchmark/linear_image_classification), and of MAE's main_linprobe.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from stopmim.base import schedules
from stopmim.config.architectures import SIZES
from stopmim.evals.views import MAE_PROBE, Dataset, Views, probe
from stopmim.method.encoder import Encoder

Norm = Literal["none", "bn", "fixed bn"]  # before the linear layer; fixed: without scale and shift


@dataclass(frozen=True)
class Recipe:
    """How heads are trained. The heads are `norms` x `lr_factors` x `weight_decays`."""

    epochs: int
    lr: float = 0.01  # for a batch of 256
    batch_size: int = 256
    optimizer: Literal["sgd", "lars"] = "sgd"  # sgd: with Nesterov momentum
    momentum: float = 0.9
    milestones: tuple[int, ...] = ()  # epochs at which the rate falls to a tenth; none: cosine
    final: float = 0.01  # last rate of the cosine, as a fraction of the first
    warmup: int | None = None  # epochs; a number makes rates change at every step, as MAE's do
    norms: tuple[Norm, ...] = ("bn", "none")
    lr_factors: tuple[float, ...] = (1.0,)
    weight_decays: tuple[float, ...] = (5e-4,)
    decay_bn: bool = False  # scale and shift of batch norm as well; biases always decay
    init_std: float | None = None  # of the weights, with biases 0; None: as nn.Linear

    def rate(self, epoch: float) -> float:
        """The learning rate (of factor 1) at a time that is measured in epochs, from 0."""
        peak = self.lr * self.batch_size / 256
        if self.milestones:
            # Not times 0.1: that would be 0.00010000000000000002 after the second milestone.
            return peak / 10 ** sum(epoch >= milestone for milestone in self.milestones)
        if self.warmup is None:
            epoch = math.floor(epoch)
        elif epoch < self.warmup:
            return peak * epoch / self.warmup
        warmup = self.warmup or 0
        return schedules.cosine(
            epoch - warmup, total=self.epochs - warmup, start=peak, final=self.final * peak
        )


@dataclass(frozen=True)
class Task:
    """A data set of the tables: its number of classes, its recipe, what is shown of an image."""

    classes: int
    recipe: Recipe
    dataset: Dataset

    def heads(self, encoder: Encoder) -> Recipe:
        """VISSL's vit_b16.yaml and vit_l16.yaml, of class tokens, decay batch norm as well."""
        return replace(
            self.recipe, decay_bn=encoder.pool == "cls" and self.recipe.optimizer == "sgd"
        )

    def views(self, encoder: Encoder) -> Views:
        """What VISSL shows to an encoder of that size, at its 224 pixels; see `recipes.probe`."""
        if self.recipe.init_std is not None:
            return MAE_PROBE
        arch = next((f"vit_{n}" for n, s in SIZES.items() if s.width == encoder.width), "vit_b")
        return probe(self.dataset, arch, class_token=encoder.pool == "cls")


def _tens(epochs: int, *milestones: int) -> Recipe:
    return Recipe(epochs, milestones=milestones)


TASKS = {
    "imagenet": Task(1000, _tens(28, 8, 16, 24), "imagenet"),
    "cifar100": Task(100, _tens(28, 8, 16, 24), "cifar100"),
    "places205": Task(205, _tens(14, 4, 8, 12), "places205"),
    "inat18": Task(8142, _tens(84, 24, 48, 72), "inat18"),
    "clevr_count": Task(8, Recipe(50), "clevr"),
    "clevr_dist": Task(6, Recipe(100), "clevr"),
    # ViT-H in vissl: sixteen heads with last and last four. Rates 6.4 and 0.64.
    "imagenet_lars": Task(
        1000,
        Recipe(
            50, lr=0.1, batch_size=16384, optimizer="lars", milestones=(15, 30, 45),
            lr_factors=(1.0, 0.1), weight_decays=(5e-4, 0.0),
        ),
        "imagenet",
    ),
    # MAE's own: 90 epochs for ViT-B, 50 for L and H.
    "imagenet_mae": Task(
        1000,
        Recipe(
            90, lr=0.1, batch_size=16384, optimizer="lars", warmup=10, final=0.0,
            norms=("fixed bn",), weight_decays=(0.0,), init_std=0.01,
        ),
        "imagenet",
    ),
}  # fmt: skip

# For data of your own, where nobody has found the rate yet: chosen from a grid, on a part of train.
OWN = Recipe(50, lr_factors=(0.1, 1.0, 10.0, 100.0))
