"""The fine-tuning protocol; evals/finetune.py has the computation."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from stopmim.base.errors import UserError
from stopmim.config.architectures import SIZES
from stopmim.evals.protocols.protocol import FewLabels, Inputs, Measured, Selecting
from stopmim.evals.recipes import TUNINGS, Tuning, TuningName


@dataclass(frozen=True)
class Finetune(FewLabels, Selecting):
    """Train the whole encoder on few labels."""

    name = "finetune"
    in_suite = False
    recipe: Literal["auto", TuningName] = "auto"
    """I-JEPA's recipe for 1 % of the labels, or MAE's; auto: I-JEPA's for the encoder's size"""
    selection: Literal["held-out", "paper", "both"] = "held-out"
    """held-out: report the last epoch; paper: the epoch that is best on test"""
    epochs: Annotated[int | None, "INT"] = None
    """default: the recipe's"""
    batch_size: Annotated[int | None, "INT"] = None
    """default: the recipe's"""
    lr: Annotated[float | None, "FLOAT"] = None
    """peak learning rate; default: the recipe's"""
    weight_decay: Annotated[float | None, "FLOAT"] = None
    """default: the recipe's"""
    random_init: bool = False
    """also fine-tune from random weights, for comparison; doubles the time"""

    cacheable = False

    @property
    def compared(self) -> bool:
        return self.random_init

    def recipe_for(self, width: int) -> TuningName:
        """The recipe for an encoder of this width; ViT-H and larger ones have their own."""
        if self.recipe != "auto":
            return self.recipe
        return "one-percent-huge" if width >= SIZES["h"].width else "one-percent"

    def tuning(self, width: int) -> Tuning:
        """The recipe with the changes that were asked for."""
        names = ("epochs", "batch_size", "lr", "weight_decay")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(TUNINGS[self.recipe_for(width)], **changes)

    def obstacle(self, inputs: Inputs) -> str:
        self.tuning(inputs.encoder.width)  # a wrong option is an error before any work
        return super().obstacle(inputs)

    def facts(self, inputs: Inputs) -> dict[str, Any]:
        return {"recipe": self.recipe_for(inputs.encoder.width)}

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        from stopmim.data.subset import Subset
        from stopmim.evals.finetune import finetune
        from stopmim.method.encoder import VisionTransformer

        if not isinstance(inputs.encoder, VisionTransformer):
            raise UserError("finetune: only a Vision Transformer of ours can be fine-tuned")
        chosen, tuning = "", self.tuning(inputs.encoder.width)
        if self.list is not None or self.per_class:
            index, how = self.choose(inputs, label)
            chosen = f"{how}, "
            inputs = dataclasses.replace(inputs, train=Subset(inputs.train, index))
        correct = finetune(inputs, label, tuning, every_epoch="paper" in self.readings)
        n, best = len(inputs.train), correct.index(max(correct))
        for reading in self.readings:
            if reading == "held-out":  # nothing was chosen
                setting = f"{chosen}{len(correct)} epochs"
                yield inputs.graded(self.name, label, correct[-1], "none", n, setting)
            else:
                setting, name = f"{chosen}{best + 1} epochs", f"{self.name} best epoch"
                yield inputs.graded(name, label, correct[best], "paper", n, setting)
