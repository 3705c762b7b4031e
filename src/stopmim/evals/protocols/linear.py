"""The linear probe; evals/linear.py has the computation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stopmim.base.errors import check_least
from stopmim.evals.protocols.protocol import Inputs, Measured, Selecting
from stopmim.evals.recipes import OWN, TASKS, Recipe, TaskName

if TYPE_CHECKING:
    from stopmim.evals.linear import ChosenHead

LAYERS = {"last": (1,), "last4": (4,), "both": (1, 4), "best": (1, 4)}
BEST = "linear best depth"  # of last and last four, which most tables of I-JEPA and StoP report
QUICK = 10**9  # features x classes up to which logistic regression is solved: takes seconds


@dataclass(frozen=True)
class Linear(Selecting):
    """Linear classifiers on the last block and on the last four."""

    name = "linear"
    layers: Literal["last", "last4", "both", "best"] = "both"
    """blocks whose features the classifier sees, side by side; best: both, and the better one"""
    recipe: Literal["auto", "own", TaskName] = "auto"
    """published recipe to train by; own: a grid of rates; auto: the exact optimum if quick"""
    views: int = 0
    """random views per training image, used in turn; published: one per epoch; 0: centre crop"""

    def __post_init__(self) -> None:
        check_least(self, views=0)

    @property
    def crops(self) -> TaskName | None:
        return None if self.recipe == "auto" or self.recipe == "own" else self.recipe

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        y, _ = inputs.labels_of(label)
        solvable = self.recipe == "auto" and not self.views
        if solvable and inputs.train_x.numel() * len(y.unique()) <= QUICK:
            yield from self._solved(inputs, label)
        elif self.recipe in TASKS:
            yield from self._trained(inputs, label, TASKS[self.recipe].heads(inputs.encoder))
        else:
            yield from self._trained(inputs, label, OWN)

    def _solved(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        from stopmim.evals.linear import depths, linear_probe

        y, test_y = (labels.to(inputs.device) for labels in inputs.labels_of(label))
        both, width = (inputs.train_x, inputs.test_x), inputs.encoder.width
        for reading in self.readings:
            tried = []
            for n in depths(LAYERS[self.layers], inputs.test_x, width):
                x, test_x = (features[:, -n * width :].to(y.device) for features in both)
                # A coarse solution is enough to choose l2.
                probe = linear_probe(
                    x, y, test_x, test_y, seed=inputs.seed, reading=reading, tolerance=1e-3
                )
                correct, setting = probe.correct.cpu(), f"solved, l2 {probe.l2:g}"
                yield inputs.graded(_protocol(n), label, correct, reading, len(y), setting)
                tried.append((probe.score, n, correct, setting))
            if self.layers == "best":
                _, n, correct, setting = max(tried, key=lambda one: one[0])
                setting = f"{_depth(n)}, {setting}"
                yield inputs.graded(BEST, label, correct, reading, len(y), setting)

    def _trained(self, inputs: Inputs, label: str, recipe: Recipe) -> Iterator[Measured]:
        from stopmim.evals.heads import Split
        from stopmim.evals.linear import probes

        y, test_y = inputs.labels_of(label)
        train = inputs.random_views(self.views) or [inputs.train_x]
        found = probes(
            Split(train, y, inputs.test_x, test_y, inputs.encoder.width),
            recipe,
            layers=LAYERS[self.layers],
            readings=self.readings,
            plain=inputs.train_x if "held-out" in self.readings else None,
            seed=inputs.seed,
            device=inputs.device,
        )

        def graded(name: str, probe: "ChosenHead", depth: str = "") -> Measured:
            setting, reading = f"{depth}{probe.head}", probe.reading
            return inputs.graded(name, label, probe.correct, reading, len(y), setting)

        def best_epoch(name: str, probe: "ChosenHead", depth: str = "") -> Measured:
            best, name = probe.best_epoch, f"{name} best epoch"
            setting = f"{depth}{probe.head}, epoch {best + 1}"
            return inputs.graded(name, label, int(probe.epochs[best]), "paper", len(y), setting)

        for probe in found:
            yield graded(_protocol(probe.head.layers), probe)
            if probe.reading == "paper":
                yield best_epoch(_protocol(probe.head.layers), probe)
        for reading in self.readings if self.layers == "best" else ():
            own = [probe for probe in found if probe.reading == reading]
            best = max(own, key=lambda probe: probe.score)
            yield graded(BEST, best, f"{_depth(best.head.layers)}, ")
            if reading == "paper":  # another depth may be best in another epoch
                best = max(own, key=lambda probe: int(probe.epochs.max()))
                yield best_epoch(BEST, best, f"{_depth(best.head.layers)}, ")


def _protocol(layers: int) -> str:
    return "linear" if layers == 1 else f"linear {_depth(layers)}"


def _depth(layers: int) -> str:
    return "last" if layers == 1 else f"last{layers}"
