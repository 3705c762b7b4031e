"""The 1 % protocol; evals/lowshot.py has the computation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stopmim.base.errors import DataError, UserError, check_least
from stopmim.evals.protocols.protocol import FewLabels, Inputs, Measured
from stopmim.evals.recipes import LAMBDA


@dataclass(frozen=True)
class Lowshot(FewLabels):
    """Logistic regression on few labels: the 1 % protocol."""

    name = "lowshot"
    own_view = True
    lambd: float = LAMBDA
    """L2 penalty, divided by the number of labelled images, as --lambd of the released code"""
    released: bool = False
    """as the released code: test features standardised by themselves, images resized to SIZE"""

    def __post_init__(self) -> None:
        if self.list is None:
            check_least(self, per_class=1)
        if not 1e-12 <= self.lambd <= 1e12:
            raise UserError(f"--lambd {self.lambd:g}: expected a number from 1e-12 to 1e12")

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        from stopmim.data.subset import Subset
        from stopmim.evals.lowshot import classify
        from stopmim.evals.views import LOWSHOT_RELEASED

        y, test_y = inputs.labels_of(label)
        index, chosen = self.choose(inputs, label)
        if len(y[index].unique()) < 2:
            raise DataError(f"{label}: the {len(index)} chosen images are all of one class")
        view = LOWSHOT_RELEASED.at(inputs.size) if self.released else inputs.usual
        shared = view == inputs.shown.test  # with the other protocols
        # If features of all training images were computed, these are among them.
        if shared and "train_x" in vars(inputs):
            x = inputs.train_x[index]
        else:
            x = inputs.features(Subset(inputs.train, index), view)
        test_x = inputs.test_x if shared else inputs.features(inputs.test, view)
        few = inputs.last(x), y[index].to(inputs.device)
        statistics: Literal["train", "test"] = "test" if self.released else "train"
        try:
            found = classify(*few, inputs.last(test_x), self.lambd, statistics)
        except ValueError as error:  # the smaller lambda, the harder the optimum is to find
            raise UserError(f"--lambd {self.lambd:g}: {error}") from None
        setting = f"{chosen}, lambda {self.lambd:g}{', released' if self.released else ''}"
        correct = found.cpu() == test_y
        yield inputs.graded(self.name, label, correct, "none", len(index), setting)
