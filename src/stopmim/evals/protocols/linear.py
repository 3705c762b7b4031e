"""The linear probe; evals/linear.py has the computation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stopmim.evals.protocols.protocol import Selecting
from stopmim.evals.recipes import OWN, TASKS, Recipe, TaskName
from stopmim.evals.request import check_least
from stopmim.evals.results import Measured, accuracy, graded

if TYPE_CHECKING:
    from stopmim.evals.inputs import Inputs

LAYERS = {"last": (1,), "last4": (4,), "both": (1, 4)}
QUICK = 10**9  # features x classes up to which logistic regression is solved: takes seconds


@dataclass(frozen=True)
class Linear(Selecting):
    """Linear classifiers on the last block and on the last four."""

    name = "linear"
    layers: Literal["last", "last4", "both"] = "both"
    """blocks whose features the classifier sees, side by side"""
    recipe: Literal["auto", "own", TaskName] = "auto"
    """published recipe to train classifiers by; own: a grid of learning rates; auto: the exact
    optimum where that takes seconds, else own"""
    views: int = 0
    """random views per training image, used in turn; published: one per epoch; 0: centre crop"""

    def __post_init__(self) -> None:
        check_least(self, views=0)

    @property
    def crops(self) -> str | None:
        return self.recipe if self.recipe in TASKS else None

    def measure(self, inputs: "Inputs", label: str) -> Iterator[Measured]:
        y, _ = inputs.labels_of(label)
        solvable = self.recipe == "auto" and not self.views
        if solvable and inputs.train_x.numel() * len(y.unique()) <= QUICK:
            yield from self._solved(inputs, label)
        elif self.recipe in TASKS:
            yield from self._trained(inputs, label, TASKS[self.recipe].heads(inputs.encoder))
        else:
            yield from self._trained(inputs, label, OWN)

    def _solved(self, inputs: "Inputs", label: str) -> Iterator[Measured]:
        from stopmim.evals.linear import depths, solve

        y, test_y = (labels.to(inputs.device) for labels in inputs.labels_of(label))
        width, seed = inputs.encoder.width, inputs.seed
        for reading in self.readings:
            for n in depths(LAYERS[self.layers], inputs.test_x, width):
                both = inputs.train_x, inputs.test_x
                x, test_x = (features[:, -n * width :].to(y.device) for features in both)
                right, l2 = solve(x, y, test_x, test_y, reading=reading, seed=seed)
                yield graded(
                    _protocol(n), label, right.cpu(), selection=reading, seed=seed, train=len(y),
                    setting=f"solved, l2 {l2:g}",
                )  # fmt: skip

    def _trained(self, inputs: "Inputs", label: str, recipe: Recipe) -> Iterator[Measured]:
        from stopmim.evals.heads import Split
        from stopmim.evals.linear import probes

        y, test_y = inputs.labels_of(label)
        train = inputs.random_views(self.views) or [inputs.train_x]
        split = Split(train, y, inputs.test_x, test_y, inputs.encoder.width)
        common: dict[str, Any] = {"seed": inputs.seed, "train": len(y)}
        for probe in probes(
            split,
            recipe,
            layers=LAYERS[self.layers],
            readings=self.readings,
            plain=inputs.train_x if "held-out" in self.readings else None,
            seed=inputs.seed,
            device=inputs.device,
        ):
            name, setting = _protocol(probe.head.layers), str(probe.head)
            common["selection"] = probe.reading
            yield graded(name, label, probe.correct, setting=setting, **common)
            if probe.reading == "paper":
                best = probe.best_epoch
                setting = f"{setting}, epoch {best + 1}"
                correct = int(probe.epochs[best])
                name = f"{name} best epoch"
                yield Measured(
                    accuracy(name, label, correct, len(test_y), setting=setting, **common)
                )


def _protocol(layers: int) -> str:
    return "linear" if layers == 1 else f"linear last{layers}"
