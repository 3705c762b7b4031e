"""``stopmim bench``: one subcommand per benchmark, each with the options that it has."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from stopmim.base.errors import UserError, check_least
from stopmim.cli.options import Changes, option

PAPER = (12_811, 768, 1000)  # images, features and classes of the 1 % protocol with a ViT-B

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

    def run(self, function: Callable[..., str]) -> str:
        """Calls `function` with the options of this benchmark."""
        return function(**{f.name: getattr(self, f.name) for f in fields(self)})


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

    def __call__(self) -> str:
        from stopmim.bench.step import bench_step

        return self.run(bench_step)


@dataclass(frozen=True, kw_only=True)
class Account(_OfPreset):
    """Operations and bytes of a step, by part; runs nothing."""

    masks: Annotated[MaskShapes, option("{own,published}", OWN_OR_PUBLISHED)] = "own"

    def __call__(self) -> str:
        from stopmim.bench.step import bench_account

        return self.run(bench_account)


@dataclass(frozen=True, kw_only=True)
class Masks(_OfPreset, _Repeated):
    """Drawing masks."""

    def __call__(self) -> str:
        from stopmim.bench.step import bench_masks

        return self.run(bench_masks)


@dataclass(frozen=True, kw_only=True)
class Growth(_Repeated):
    """Step time against batch, masks, depth and resolution."""

    changes: Changes = field(default_factory=dict)

    def __call__(self) -> str:
        from stopmim.bench.growth import bench_growth

        return self.run(bench_growth)


@dataclass(frozen=True, kw_only=True)
class Kernels(_Repeated):
    """Fused kernels against the usual ones."""

    def __call__(self) -> str:
        from stopmim.bench.kernels import bench_kernels

        return self.run(bench_kernels)


@dataclass(frozen=True, kw_only=True)
class Saving(_OfPreset):
    """Pauses of training while it saves."""

    def __call__(self) -> str:
        from stopmim.bench.saving import bench_saving

        return self.run(bench_saving)


@dataclass(frozen=True, kw_only=True)
class Run(_OfPreset):
    """A whole run on a folder of JPEGs, beside its step."""

    def __call__(self) -> str:
        from stopmim.bench.run import bench_run

        return self.run(bench_run)


@dataclass(frozen=True, kw_only=True)
class Loader(_Repeated):
    """Reading images, against the usual pipeline; cores that a GPU needs."""

    rate: Annotated[float | None, option("IMAGES/S")] = None
    """of your GPU, as `bench step` prints; default: one H200 with the paper's presets"""

    def __call__(self) -> str:
        from stopmim.bench.loader import bench_loader

        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UserError(f"--rate {self.rate:g}: expected images per second, above 0")
        return self.run(bench_loader)


@dataclass(frozen=True, kw_only=True)
class Rasters(_Repeated):
    """Reading arrays, against NumPy, and crops of a large file."""

    def __call__(self) -> str:
        from stopmim.bench.rasters import bench_rasters

        return self.run(bench_rasters)


@dataclass(frozen=True, kw_only=True)
class Index(_Repeated):
    """Listing images."""

    def __call__(self) -> str:
        from stopmim.bench.loader import bench_index

        return self.run(bench_index)


@dataclass(frozen=True, kw_only=True)
class Probe(_Benchmark):
    """Linear classifiers."""

    paper: bool = False
    """the size of ImageNet with 1 % of labels, 12,811 x 768 with 1,000 classes"""

    def __call__(self) -> str:
        from stopmim.bench.probe import bench_probe

        return bench_probe(*(PAPER if self.paper else ()), out=self.out)


@dataclass(frozen=True, kw_only=True)
class Evals(_Repeated):
    """Features, eval suite and tracking, against what people use."""

    rounds: int = 3
    """number of measurements"""
    parts: Annotated[
        tuple[Literal["memory", "jpeg", "suite", "tracking"], ...], option("PART ...")
    ] = ()
    """memory and jpeg (features), suite, tracking; default: all"""

    def __call__(self) -> str:
        from stopmim.bench.evals import bench_evals

        return self.run(bench_evals)


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
        from stopmim.bench.timing import check_folder

        if isinstance(self.what, _Repeated):
            check_least(self.what, rounds=1)
        if self.what.out is not None:
            check_folder(self.what.out)
        print(self.what())
