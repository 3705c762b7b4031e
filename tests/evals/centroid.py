"""A protocol of your own: a file like this one, and a line in the list of protocols.

python centroid.py eval centroid ENCODER --data DATA --norm 1
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from stopmim.evals import protocols
from stopmim.evals.protocols.protocol import Inputs, Measured, Protocol


@dataclass(frozen=True)
class Centroid(Protocol):
    """Label of the nearest class mean."""

    name = "centroid"
    norm: float = 2.0
    """norm by which distances are measured"""

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        import torch  # here and not above, so that --help is quick

        y, test_y = inputs.labels_of(label)
        x, test_x = inputs.last(inputs.train_x), inputs.last(inputs.test_x)  # (N, D), (n, D)
        means = torch.stack([x[y == k].mean(dim=0) for k in y.unique()])
        nearest = torch.cdist(test_x, means, p=self.norm).argmin(dim=1).cpu()
        correct, setting = y.unique()[nearest] == test_y, f"norm {self.norm:g}"
        yield inputs.graded(self.name, label, correct, "none", len(y), setting)


if __name__ == "__main__":
    protocols.PROTOCOLS += (Centroid,)
    from stopmim.cli import main  # now: the command line is made from the list

    sys.exit(main())
