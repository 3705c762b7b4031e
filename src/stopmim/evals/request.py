"""The options that all evaluations share.

Here and in protocols/, the docstring below a field is its help on the command line, and a string
in `Annotated` is what the help calls its value. torch is not imported, so that help is quick.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from stopmim.base.errors import check_least
from stopmim.base.secrets import hide
from stopmim.evals.recipes import TaskName


@dataclass(frozen=True)
class Request:
    """Options for the encoder of a run, the device, and the file of results."""

    branch: Literal["target", "context"] = "target"
    """encoder of a run: target, the EMA copy that papers evaluate, or context, the trained one"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """precision of the encoder; auto: on a GPU bf16, and fp16 for tracking, fp32 on a CPU"""
    seed: int = 0
    """seed of every split and draw"""
    out: Annotated[Path | None, "FILE|RUN"] = None
    """file for one JSON line per result; default: results.jsonl of the run, if ENCODER is one"""

    def __post_init__(self) -> None:
        check_least(self, seed=0)


@dataclass(frozen=True)
class ImageRequest(Request):
    """`Request` with the images and labels to evaluate on."""

    data: Annotated[str | None, "DATA"] = None
    """labelled images in train and test splits: a folder, or scenes:N:SIZE:SEED (test: SEED + 1);
    default: scenes:4096 at the encoder's size"""
    train: Annotated[str | None, "DATA"] = None
    """labelled images to fit on, if the two splits are stored apart; needs --test"""
    test: Annotated[str | None, "DATA"] = None
    """labelled images to test on; needs --train"""
    hold_out: Annotated[float | None, "SHARE"] = None
    """if --data has one split only: share of each class to test on, e.g. 0.2"""
    skip: Annotated[Path | None, "FILE.jsonl"] = None
    """leave out the images listed in this file, in both splits: see `stopmim check --fix-list`"""
    label: Annotated[tuple[str, ...], "NAME ..."] = ()
    """labels to predict, e.g. count distance; default: class, or all if there is none;
    of scenes, all but colour"""
    size: Annotated[int | None, "INT"] = None
    """image size in pixels; default: the encoder's"""
    random_inits: Annotated[int | None, "INT"] = None
    """untrained networks to compare with; fewer are quicker and tell less, 0: no comparison;
    default: 8, or 4 for more than 10,000 images"""
    crops: Annotated[TaskName | None, "RECIPE"] = None
    """crop and resize as this published recipe does; default: as --recipe, or centre crops;
    low-shot always takes centre crops"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data", "train", "test"):  # results name them
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, hide(given))
        check_least(self, size=1, random_inits=0)
