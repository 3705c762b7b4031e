"""Presets: complete configs, each with its cost, its needs and the numbers to expect.

They are in presets.yaml. ``PRESETS["tiny_cpu"]()`` and ``presets.tiny_cpu()`` return the config.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from stopmim.config.schema import Config, Section, override
from stopmim.config.yaml_text import parse_yaml, validate

IMAGENET = 1_281_167  # training images of ImageNet-1k


class Cost(Section):
    """Training time, as hours of one H200 or minutes on the preset's hardware; or not measured."""

    hours: int | None = None
    minutes: float | None = None
    images: int = IMAGENET
    """size of the data set that this time is for"""
    is_lower_bound: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        if self.hours is not None:
            return f"{'more than ' if self.is_lower_bound else ''}{self.hours} hours"
        return "not measured" if self.minutes is None else f"about {self.minutes:g} minutes"


class Needs(Section):
    """Images, hardware and memory that a preset is made for."""

    pixels: tuple[int, int] = (224, 224)
    """edge of the images: smallest, largest"""
    hardware: str = "GPUs"
    memory_gib: float | None = None
    """measured peak on one GPU; null: not measured"""
    batch: int | None = None
    """images at a time on that GPU"""
    init: bool = False
    """an encoder to start from"""


@dataclass(frozen=True)
class Preset:
    """A named config, and what one wants to know before running it."""

    name: str
    about: str
    config: Config
    cost: Cost
    needs: Needs
    expects: str = ""  # numbers and their source; empty if nothing was published or measured
    notes: str = ""  # why the settings are what they are
    data: str = "imagenet/train"  # of the command
    options: str = ""  # of the command

    def __call__(self) -> Config:
        return self.config

    @property
    def command(self) -> str:
        place = f"--preset {self.name} --out runs/{self.name}"
        return f"stopmim pretrain {self.data} {place} {self.options}".rstrip()


def _load(path: Path) -> dict[str, Preset]:
    presets, plain = dict[str, Preset](), Preset("", "", Config(), Cost(), Needs())
    for name, given in parse_yaml(path.read_text(encoding="ascii"), path.name).items():
        where = f"{path.name}: {name}"
        base = presets[given.pop("from")] if "from" in given else plain
        config = override(base.config, given.pop("config"), where)
        cost = validate(Cost, base.cost.model_dump() | given.pop("cost", {}), where)
        needs = validate(Needs, base.needs.model_dump() | given.pop("needs", {}), where)
        presets[name] = replace(base, name=name, config=config, cost=cost, needs=needs, **given)
    return presets


PRESETS = _load(Path(__file__).with_name("presets.yaml"))


def __getattr__(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
