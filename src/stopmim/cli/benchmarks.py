"""``stopmim bench``."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from stopmim.base.errors import UserError, check_least
from stopmim.cli.options import Changes, choices, option

PAPER = (12_811, 768, 1000)  # images, features and classes of the 1 % protocol with a ViT-B


@dataclass(frozen=True)
class Bench:
    """Measure speed; prints one JSON line per figure."""

    what: Annotated[
        Positional[
            Literal[
                "step",
                "account",
                "masks",
                "growth",
                "kernels",
                "saving",
                "run",
                "loader",
                "rasters",
                "index",
                "probe",
                "evals",
            ]
        ],
        choices(
            step="forward, backward and update, and what it takes at least",
            account="operations and bytes of a step, by part; runs nothing",
            masks="drawing masks",
            growth="step time against batch, masks, depth and resolution",
            kernels="fused kernels against the usual ones",
            saving="pauses of training while it saves",
            run="a whole run on a folder of JPEGs, beside its step",
            loader="reading images, against the usual pipeline; cores that a GPU needs",
            rasters="reading arrays, against NumPy, and crops of a large file",
            index="listing images",
            probe="linear classifiers",
            evals="features, eval suite and tracking, against what people use",
        ),
    ]
    preset: Annotated[str | None, option("NAME|FILE")] = None
    """step, account, masks, saving, run; default: vit_b16_stop for one GPU, on a CPU tiny_cpu"""
    masks: Literal["own", "published"] = "own"
    """step, account: likeliest mask shapes, or mean token counts of the released masks"""
    paper: bool = False
    """probe: the size of ImageNet with 1 % of labels, 12,811 x 768 with 1,000 classes"""
    twin: bool = True
    """step: also time the sine-cosine twin of a StoP preset and print the ratios"""
    versus: Annotated[tuple[str, ...], option("KEY=VALUE ...")] = ()
    """step: time it with this config too, in turn, and print the ratio"""
    profile: bool = False
    """step: show where the time goes, kernel by kernel"""
    parts: Annotated[
        tuple[Literal["memory", "jpeg", "suite", "tracking"], ...], option("PART ...")
    ] = ()
    """evals: memory and jpeg (features), suite, tracking; default: all"""
    rate: Annotated[float | None, option("IMAGES/S")] = None
    """loader: images/s of your GPU, as step prints; default: one H200 with the paper's presets"""
    rounds: Annotated[int | None, option("INT")] = None
    """number of measurements; default: 10, for evals 3"""
    out: Annotated[Path | None, option("FOLDER")] = None
    """folder for a dated Markdown file; figures of the same day are appended"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.bench.evals import bench_evals
        from stopmim.bench.growth import bench_growth
        from stopmim.bench.kernels import bench_kernels
        from stopmim.bench.loader import bench_index, bench_loader
        from stopmim.bench.probe import bench_probe
        from stopmim.bench.rasters import bench_rasters
        from stopmim.bench.run import bench_run
        from stopmim.bench.saving import bench_saving
        from stopmim.bench.step import bench_account, bench_masks, bench_step
        from stopmim.bench.timing import check_folder

        check_least(self, rounds=1)
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UserError(f"--rate {self.rate:g}: expected images per second, above 0")
        if self.out is not None:
            check_folder(self.out)
        functions: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
            "step": (
                bench_step,
                ("preset", "changes", "masks", "twin", "versus", "profile", "rounds"),
            ),
            "account": (bench_account, ("preset", "changes", "masks")),
            "masks": (bench_masks, ("preset", "changes", "rounds")),
            "growth": (bench_growth, ("changes", "rounds")),
            "kernels": (bench_kernels, ("rounds",)),
            "saving": (bench_saving, ("preset", "changes")),
            "run": (bench_run, ("preset", "changes")),
            "loader": (bench_loader, ("rounds", "rate")),
            "rasters": (bench_rasters, ("rounds",)),
            "index": (bench_index, ("rounds",)),
            "evals": (bench_evals, ("parts", "rounds")),
            "probe": (partial(bench_probe, *(PAPER if self.paper else ())), ("paper",)),
        }
        function, used = functions[self.what]
        for other in fields(self):
            value = getattr(self, other.name)
            usual = {} if other.name == "changes" else other.default
            if other.name not in ("what", "out", *used) and value != usual:
                key = next(iter(value)) if other.name == "changes" else other.name
                raise UserError(f"bench {self.what}: --{key} has no effect")
        options = {name: getattr(self, name) for name in (*used, "out") if name != "paper"}
        if "rounds" in used and self.rounds is None:
            options["rounds"] = 3 if self.what == "evals" else 10
        print(function(**options))
