"""The k-NN protocol; evals/knn.py has the computation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stopmim.evals.protocols.protocol import Selecting
from stopmim.evals.results import Measured, graded

if TYPE_CHECKING:
    from stopmim.evals.inputs import Inputs


@dataclass(frozen=True)
class Knn(Selecting):
    """Vote of the most similar training images."""

    name = "knn"

    def measure(self, inputs: "Inputs", label: str) -> Iterator[Measured]:
        from stopmim.evals.knn import KS, choose_k, knn_predict

        y, test_y = (labels.to(inputs.device) for labels in inputs.labels_of(label))
        x, seed = inputs.last(inputs.train_x), inputs.seed
        ks = [k for k in KS if k < len(x)] or [1]
        right = (knn_predict(x, y, inputs.last(inputs.test_x), ks) == test_y).cpu()  # (len(ks), n)
        for reading in self.readings:
            if reading == "held-out":
                i = ks.index(choose_k(x, y, seed, ks))
            else:
                i = int(right.sum(dim=1).argmax())
            setting = f"k {ks[i]}"
            yield graded(
                self.name, label, right[i], selection=reading, seed=seed, train=len(x),
                setting=setting,
            )  # fmt: skip
