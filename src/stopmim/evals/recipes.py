"""The published protocols as data: linear probes, fine-tuning, and the tracking of objects.

Linear probes come from the VISSL configs behind the I-JEPA and StoP tables (commit 09270ed2,
configs/config/benchmark/linear_image_classification) and from MAE's main_linprobe.py, fine-tuning
from I-JEPA (see finetune.py) and MAE, tracking from DINO.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from stopmim.base import schedules
from stopmim.base.errors import UserError, check_least
from stopmim.config.architectures import SIZES

if TYPE_CHECKING:  # the command line reads the names of recipes, and torch is slow to import
    from stopmim.evals.views import Dataset, Views
    from stopmim.method.encoder import Encoder

Norm = Literal["none", "bn", "fixed bn"]  # before the linear layer; fixed: no scale and shift
TaskName = Literal[
    "imagenet", "imagenet_lars", "imagenet_mae", "cifar100", "places205", "inat18", "clevr_count",
    "clevr_dist",
]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Training of linear heads: a grid of `norms` x `lr_factors` x `weight_decays`."""

    epochs: int
    lr: float = 0.01  # for a batch of 256
    batch_size: int = 256
    optimizer: Literal["sgd", "lars"] = "sgd"  # sgd: with Nesterov momentum
    momentum: float = 0.9
    milestones: tuple[int, ...] = ()  # epochs at which the rate drops to a tenth; none: cosine
    final: float = 0.01  # last rate of the cosine, as a fraction of the first
    warmup: int | None = None  # epochs; a number updates the rate at every step, as MAE does
    norms: tuple[Norm, ...] = ("bn", "none")
    lr_factors: tuple[float, ...] = (1.0,)
    weight_decays: tuple[float, ...] = (5e-4,)
    decay_bn: bool = False  # decay scale and shift of batch norm as well; biases always decay
    init_std: float | None = None  # of the weights, with zero biases; None: as nn.Linear

    def rate(self, epoch: float) -> float:
        """Learning rate (for factor 1) at a time in epochs, from 0."""
        peak = self.lr * self.batch_size / 256
        if self.milestones:
            # Not times 0.1: that would be 0.00010000000000000002 after the second milestone.
            return peak / 10 ** sum(epoch >= milestone for milestone in self.milestones)
        if self.warmup is None:
            epoch = math.floor(epoch)
        elif epoch < self.warmup:
            return peak * epoch / self.warmup
        warmup, final = self.warmup or 0, self.final * peak
        return schedules.cosine(epoch - warmup, total=self.epochs - warmup, start=peak, final=final)


@dataclass(frozen=True)
class Task:
    """A data set of the tables: number of classes, recipe, and which crops are shown."""

    classes: int
    recipe: Recipe
    dataset: "Dataset"
    epochs_of_large: int | None = None  # of ViT-L and larger, if they are trained for fewer

    def heads(self, encoder: "Encoder") -> Recipe:
        """Recipe for `encoder`: VISSL's configs for class tokens also decay batch norm."""
        decays = encoder.pool == "cls" and self.recipe.optimizer == "sgd"
        large = encoder.width > SIZES["b"].width
        epochs = (self.epochs_of_large if large else None) or self.recipe.epochs
        return replace(self.recipe, decay_bn=decays, epochs=epochs)

    def views(self, encoder: "Encoder") -> "Views":
        """Crops that VISSL shows to an encoder of this width, at 224 pixels; see `probe`."""
        from stopmim.evals.views import MAE_PROBE, probe

        if self.recipe.init_std is not None:
            return MAE_PROBE
        size = next((name for name, s in SIZES.items() if s.width == encoder.width), "b")
        return probe(self.dataset, size, class_token=encoder.pool == "cls")


TASKS: dict[str, Task] = {
    "imagenet": Task(1000, Recipe(28, milestones=(8, 16, 24)), "imagenet"),
    "cifar100": Task(100, Recipe(28, milestones=(8, 16, 24)), "cifar100"),
    "places205": Task(205, Recipe(14, milestones=(4, 8, 12)), "places205"),
    "inat18": Task(8142, Recipe(84, milestones=(24, 48, 72)), "inat18"),
    "clevr_count": Task(8, Recipe(50), "clevr"),
    "clevr_dist": Task(6, Recipe(100), "clevr"),
    # VISSL's for ViT-H: sixteen heads on last block and last four. Rates 6.4 and 0.64.
    "imagenet_lars": Task(
        1000,
        Recipe(
            50, lr=0.1, batch_size=16384, optimizer="lars", milestones=(15, 30, 45),
            lr_factors=(1.0, 0.1), weight_decays=(5e-4, 0.0),
        ),
        "imagenet",
    ),
    # MAE's own.
    "imagenet_mae": Task(
        1000,
        Recipe(
            90, lr=0.1, batch_size=16384, optimizer="lars", warmup=10, final=0.0,
            norms=("fixed bn",), weight_decays=(0.0,), init_std=0.01,
        ),
        "imagenet",
        epochs_of_large=50,
    ),
}  # fmt: skip

# lambda of the 1 % probe in the READMEs of StoP and MSN; their script defaults to a tenth of it.
LAMBDA = 0.0025

# For other data, whose best rate is unknown: chosen from a grid, on a part of train.
OWN = Recipe(50, lr_factors=(0.1, 1.0, 10.0, 100.0))


@dataclass(frozen=True)
class Tuning:
    """Hyperparameters of fine-tuning."""

    epochs: int = 50
    batch_size: int = 512
    lr: float = 3e-5
    weight_decay: float = 0.05
    layer_decay: float = 0.75
    warmup_epochs: float = 5
    final_lr: float = 1e-6
    smoothing: float = 0.1  # of labels
    drop_path: float = 0.0  # in the last block, rising linearly from 0 in the first
    mixup: float = 0.0  # alpha of its beta distribution; 0: off
    cutmix: float = 0.0
    erase: float = 0.0  # probability that a part of an image becomes noise

    def __post_init__(self) -> None:
        check_least(self, epochs=1, batch_size=1, lr=0, weight_decay=0)


def _mae(epochs: int, base: float, layer_decay: float, drop_path: float) -> Tuning:
    mixing = {"mixup": 0.8, "cutmix": 1.0, "erase": 0.25}
    return Tuning(epochs, 1024, base * 1024 / 256, 0.05, layer_decay, drop_path=drop_path, **mixing)


TuningName = Literal["one-percent", "one-percent-huge", "mae-base", "mae-large", "mae-huge"]
TUNINGS: dict[str, Tuning] = {
    "one-percent": Tuning(),  # ViT-L/16
    "one-percent-huge": Tuning(weight_decay=0.4),  # ViT-H/14, and ViT-H/16 at 448 px
    "mae-base": _mae(100, 5e-4, 0.65, 0.1),
    "mae-large": _mae(50, 1e-3, 0.75, 0.2),
    "mae-huge": _mae(50, 1e-3, 0.75, 0.3),
}


@dataclass(frozen=True)
class Propagation:
    """Options of propagating labels from frame to frame; the defaults are DINO's."""

    n_last_frames: int = 7
    """recent frames to take labels from, besides the first one"""
    neighbourhood: int = 12
    """radius in patches within which labels are taken; 0: any distance"""
    topk: int = 5
    """most similar patches that a patch takes its label from"""
    temperature: float = 0.1
    """of the softmax over their similarities"""
    compat: Annotated[Literal["released"] | None, "released"] = None
    """as DINO's code: do not resize frames to whole patches, divide red by 0.228"""

    def __post_init__(self) -> None:
        check_least(self, n_last_frames=0, neighbourhood=0, topk=1, temperature=1e-6)
        if self.compat not in (None, "released"):
            raise UserError(f'--compat {self.compat}: expected "released" or nothing')
