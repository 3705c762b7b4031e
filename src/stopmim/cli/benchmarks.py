"""``stopmim bench``: one subcommand per benchmark, each with the options that it has."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from stopmim.base.errors import check_least
from stopmim.cli.options import Changes, option

PresetToMeasure = Annotated[
    str | None,
    option("NAME|FILE", "default: vit_b16_stop for one GPU, on a CPU tiny_cpu"),
]
MaskShapes = Literal["own", "published"]
OWN_OR_PUBLISHED = "the likeliest of this preset, or the mean token counts of the released masks"


@dataclass(frozen=True, kw_only=True)
class _Benchmark:
    out: Annotated[Path | None, option("FOLDER")] = None
    """folder for a dated Markdown file; figures of the same day are appended"""

    file: ClassVar[str] = ""  # in bench/, with a function bench_NAME; by default NAME.py

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def options(self) -> dict[str, Any]:
        """The arguments of the function."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "out"}

    def lines(self) -> Iterator[dict[str, Any]]:
        """Measures, and yields one line per figure."""
        module = import_module(f"stopmim.bench.{self.file or self.name}")
        yield from getattr(module, f"bench_{self.name}")(**self.options())


@dataclass(frozen=True, kw_only=True)
class _Repeated(_Benchmark):
    rounds: int = 10
    """number of measurements"""


@dataclass(frozen=True, kw_only=True)
class _OfPreset(_Benchmark):
    preset: PresetToMeasure = None
    changes: Changes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step(_OfPreset, _Repeated):
    """Forward, backward and update, and the time these take at least."""

    masks: Annotated[MaskShapes, option("{own,published}", OWN_OR_PUBLISHED)] = "own"
    twin: bool = True
    """also time the sine-cosine twin of a StoP preset and print the ratios"""
    versus: Annotated[tuple[str, ...], option("KEY=VALUE ...")] = ()
    """time it with this config too, in turn, and print the ratio"""
    profile: bool = False
    """show where the time goes, kernel by kernel"""


@dataclass(frozen=True, kw_only=True)
class Account(_OfPreset):
    """Operations and bytes of a step, by part; runs nothing."""

    masks: Annotated[MaskShapes, option("{own,published}", OWN_OR_PUBLISHED)] = "own"

    file = "step"


@dataclass(frozen=True, kw_only=True)
class Masks(_OfPreset, _Repeated):
    """Drawing masks."""

    file = "step"


@dataclass(frozen=True, kw_only=True)
class Growth(_Repeated):
    """Step time against batch, masks, depth and resolution."""

    changes: Changes = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        return super().options() | {"out": self.out}  # for the plot


@dataclass(frozen=True, kw_only=True)
class Kernels(_Repeated):
    """Fused kernels against the usual ones."""


@dataclass(frozen=True, kw_only=True)
class Saving(_OfPreset):
    """Pauses of training while it saves."""


@dataclass(frozen=True, kw_only=True)
class Run(_OfPreset):
    """A whole run on a folder of JPEGs, beside its step."""


@dataclass(frozen=True, kw_only=True)
class Loader(_Repeated):
    """Reading images, against the usual pipeline; cores that a GPU needs."""

    rate: Annotated[float | None, option("IMAGES/S")] = None
    """of your GPU, as `bench step` prints; default: one H200 with the paper's presets"""


@dataclass(frozen=True, kw_only=True)
class Rasters(_Repeated):
    """Reading arrays, against NumPy, and crops of a large file."""


@dataclass(frozen=True, kw_only=True)
class Index(_Repeated):
    """Listing images."""

    file = "loader"


@dataclass(frozen=True, kw_only=True)
class Probe(_Benchmark):
    """Linear classifiers."""

    paper: bool = False
    """the size of ImageNet with 1 % of labels, 12,811 x 768 with 1,000 classes"""


@dataclass(frozen=True, kw_only=True)
class Evals(_Repeated):
    """Features, eval suite and tracking, against what people use."""

    rounds: int = 3
    """number of measurements"""
    parts: Annotated[
        tuple[Literal["memory", "jpeg", "suite", "tracking"], ...], option("PART ...")
    ] = ()
    """memory and jpeg (features), suite, tracking; default: all"""


Networks = Step | Account | Masks | Growth | Kernels | Saving | Run
Benchmark = Networks | Loader | Rasters | Index | Probe | Evals


@dataclass(frozen=True)
class Bench:
    """Measure speed; prints one JSON line per figure."""

    what: Benchmark

    @property
    def changes(self) -> dict[str, Any]:
        """Config keys; raises AttributeError, like any class without them, if there are none."""
        changes: dict[str, Any] = getattr(self.what, "changes")  # noqa: B009
        return changes

    def __call__(self) -> None:
        from stopmim.bench.timing import check_folder, record

        if isinstance(self.what, _Repeated):
            check_least(self.what, rounds=1)
        if self.what.out is not None:
            check_folder(self.what.out)
        by_arch, what = isinstance(self.what, _OfPreset), self.what.name
        for line in record(self.what.lines(), what, self.what.out, by_arch=by_arch):
            print(json.dumps(line), flush=True)
