"""The k-NN protocol; evals/knn.py has the computation."""

from collections.abc import Iterator
from dataclasses import dataclass

from stopmim.evals.protocols.protocol import Inputs, Measured, Selecting


@dataclass(frozen=True)
class Knn(Selecting):
    """Vote of the most similar training images."""

    name = "knn"

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        from stopmim.evals.knn import KS, choose_k, knn_predict

        y, test_y = (labels.to(inputs.device) for labels in inputs.labels_of(label))
        x = inputs.last(inputs.train_x)
        ks = [k for k in KS if k < len(x)] or [1]
        right = (knn_predict(x, y, inputs.last(inputs.test_x), ks) == test_y).cpu()  # (len(ks), n)
        for reading in self.readings:
            if reading == "held-out":
                i = ks.index(choose_k(x, y, inputs.seed, ks))
            else:
                i = int(right.sum(dim=1).argmax())
            yield inputs.graded(self.name, label, right[i], reading, len(x), f"k {ks[i]}")
