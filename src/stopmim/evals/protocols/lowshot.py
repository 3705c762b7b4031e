"""The 1 % protocol; evals/lowshot.py has the computation."""

from collections.abc import Iterator
from dataclasses import dataclass

from stopmim.base.errors import DataError
from stopmim.evals.protocols.protocol import FewLabels, Inputs, Measured


@dataclass(frozen=True)
class Lowshot(FewLabels):
    """Logistic regression on few labels: the 1 % protocol."""

    name = "lowshot"
    released: bool = False
    """as the released code: test features standardised by themselves, images resized to SIZE"""

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        from stopmim.data.subset import Subset
        from stopmim.evals.lowshot import LAMBDA, classify
        from stopmim.evals.views import LOWSHOT

        y, test_y = inputs.labels_of(label)
        index, chosen = self.choose(inputs, label)
        if len(y[index].unique()) < 2:
            raise DataError(f"{label}: the {len(index)} chosen images are all of one class")
        usual = inputs.shown.test
        view = LOWSHOT["released"].at(usual.size) if self.released else usual
        # If features of all training images were computed, these are among them.
        if view == usual and "train_x" in vars(inputs):
            x = inputs.train_x[index]
        else:
            x = inputs.features(Subset(inputs.train, index), view)
        test_x = inputs.test_x if view == usual else inputs.features(inputs.test, view)
        found = classify(
            inputs.last(x),
            y[index].to(inputs.device),
            inputs.last(test_x),
            statistics="test" if self.released else "train",
        )
        setting = f"{chosen}, lambda {LAMBDA}{', released' if self.released else ''}"
        correct = found.cpu() == test_y
        yield inputs.graded(self.name, label, correct, "none", len(index), setting)
