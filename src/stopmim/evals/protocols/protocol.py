"""A protocol: a frozen dataclass of its options, with a name and a method that measures.

Files in this folder import torch inside methods only, see request.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from stopmim.base.console import say
from stopmim.evals.recipes import TaskName
from stopmim.evals.results import Measured as Measured
from stopmim.evals.results import Reading

if TYPE_CHECKING:
    from stopmim.evals.inputs import Inputs as Inputs
else:
    Inputs = Any  # imports torch; here it is needed as a type only


class Protocol(ABC):
    """One way to measure an encoder. A subclass is a frozen dataclass, its fields are options."""

    name: ClassVar[str]  # on the command line and in results
    needs: ClassVar[Literal["labels", "images", "videos"]] = "labels"  # labels: measured per label
    in_suite: ClassVar[bool] = True
    own_view: ClassVar[bool] = False  # images are cropped and resized in one way, whatever `crops`

    @abstractmethod
    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        """Yields the results for `label`; it is "" for a protocol that needs none."""

    @property
    def cacheable(self) -> bool:
        """Whether the answer depends only on the encoder, the images and the options."""
        return True

    @property
    def compared(self) -> bool:
        """Whether untrained networks are measured as well."""
        return True

    @property
    def crops(self) -> TaskName | None:
        """The published recipe whose crops must be shown, if any; it holds for all protocols."""
        return None

    def obstacle(self, inputs: Inputs) -> str:
        """Reason why this cannot be measured on `inputs`, or ""."""
        return ""

    def facts(self, inputs: Inputs) -> dict[str, Any]:
        """Facts to record with its results, besides encoder, images, seed and options."""
        return {}


@dataclass(frozen=True)
class Selecting(Protocol):
    """A protocol with a setting to choose."""

    selection: Literal["held-out", "paper", "both"] = "held-out"
    """choose settings on training images (held-out) or, as papers do, on test images (paper)"""

    @property
    def readings(self) -> Sequence[Reading]:
        """The readings to report, each by its own choice of setting."""
        return ("held-out", "paper") if self.selection == "both" else (self.selection,)


@dataclass(frozen=True)
class FewLabels(Protocol):
    """A protocol that fits on few labelled images."""

    per_class: int = 25
    """labelled images per class, drawn by seed; for finetune, 0 means all"""
    list: Annotated[Path | None, "FILE"] = None
    """file that lists the labelled images instead, by path or unique name, e.g. 1percent.txt"""

    def obstacle(self, inputs: Inputs) -> str:
        from stopmim.data.subset import check_named

        if self.list is not None:  # a wrong list is reported before any work
            check_named(inputs.train, self.list, inputs.labels)
            return ""
        counts = [(x, inputs.labels_of(x)[0].unique(return_counts=True)[1]) for x in inputs.labels]
        least = [f"{label} {n}" for label, c in counts if (n := int(c.min())) < self.per_class]
        if least:
            few = f"the smallest class has fewer images ({', '.join(least)}), all of which are used"
            say(f"{self.name}: --per-class {self.per_class}, but {few}")
        return ""

    def choose(self, inputs: Inputs, label: str) -> tuple[Sequence[int], str]:
        """Indices of the labelled training images, and a short note on their choice."""
        from stopmim.data.subset import find_named
        from stopmim.evals.lowshot import per_class

        if self.list is not None:
            return find_named(inputs.train, self.list), self.list.name
        y, _ = inputs.labels_of(label)
        index = per_class(y, self.per_class, inputs.seed)
        # Small classes contribute every image, which may be fewer than requested.
        return index, f"{int(y[index].bincount().max())}/class"
