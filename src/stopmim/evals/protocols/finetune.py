"""The fine-tuning protocol and its published recipes; evals/finetune.py has the computation."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from stopmim.base.errors import UserError
from stopmim.evals.protocols.protocol import FewLabels, Inputs, Measured, Selecting
from stopmim.evals.request import check_least


@dataclass(frozen=True)
class Tuning:
    """How an encoder is fine-tuned."""

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
RECIPES: dict[str, Tuning] = {
    "one-percent": Tuning(),  # ViT-L/16
    "one-percent-huge": Tuning(weight_decay=0.4),  # ViT-H/14, and ViT-H/16 at 448 px
    "mae-base": _mae(100, 5e-4, 0.65, 0.1),
    "mae-large": _mae(50, 1e-3, 0.75, 0.2),
    "mae-huge": _mae(50, 1e-3, 0.75, 0.3),
}


@dataclass(frozen=True)
class Finetune(FewLabels, Selecting):
    """Train the whole encoder on few labels."""

    name = "finetune"
    in_suite = False
    recipe: TuningName = "one-percent"
    """I-JEPA's recipe for 1 % of the labels, or MAE's"""
    selection: Literal["held-out", "paper", "both"] = "held-out"
    """held-out: report the last epoch; paper: the epoch that is best on test"""
    epochs: Annotated[int | None, "INT"] = None
    """default: the recipe's"""
    batch_size: Annotated[int | None, "INT"] = None
    """default: the recipe's"""
    lr: Annotated[float | None, "FLOAT"] = None
    """default: the recipe's"""
    weight_decay: Annotated[float | None, "FLOAT"] = None
    """default: the recipe's"""
    random_init: bool = False
    """also fine-tune from random weights, for comparison; doubles the time"""

    cacheable = False

    @property
    def tuning(self) -> Tuning:
        """The recipe with the changes that were asked for."""
        names = ("epochs", "batch_size", "lr", "weight_decay")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(RECIPES[self.recipe], **changes)

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        from stopmim.data.subset import Some
        from stopmim.evals.finetune import finetune
        from stopmim.method.encoder import VisionTransformer

        if not isinstance(inputs.encoder, VisionTransformer):
            raise UserError("finetune: only a Vision Transformer of ours can be fine-tuned")
        if inputs.untrained and not self.random_init:
            return
        chosen = ""
        if self.list is not None or self.per_class:
            index, how = self.choose(inputs, label)
            chosen = f"{how}, "
            inputs = dataclasses.replace(inputs, train=Some(inputs.train, index))
        correct = finetune(inputs, label, self.tuning, every_epoch="paper" in self.readings)
        n, best = len(inputs.train), correct.index(max(correct))
        for reading in self.readings:
            if reading == "held-out":  # nothing was chosen
                setting = f"{chosen}{len(correct)} epochs"
                yield inputs.graded(self.name, label, correct[-1], "none", n, setting)
            else:
                setting, name = f"{chosen}{best + 1} epochs", f"{self.name} best epoch"
                yield inputs.graded(name, label, correct[best], "paper", n, setting)
