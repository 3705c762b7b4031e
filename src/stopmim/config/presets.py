"""Presets: complete configs, each with its cost, its needs and the numbers to expect.

They are in presets.yaml. ``PRESETS["tiny_cpu"]()`` and ``presets.tiny_cpu()`` return the config;
``presets.photos_s16.for_images(300)`` returns it with the epochs that 300 images need.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stopmim.base.errors import UserError, did_you_mean
from stopmim.config.schema import Config, flatten, from_yaml, override
from stopmim.config.section import Section
from stopmim.config.yaml_text import parse_yaml, read_yaml, validate

IMAGENET = 1_281_167  # training images of ImageNet-1k
ENOUGH = 2000  # updates; runs of docs/results.md half as long had not learned what k-NN can use


class Cost(Section):
    """Training time, as hours of one H200 or minutes on the preset's hardware; or not measured."""

    hours: int | None = None
    minutes: float | None = None
    images: int = IMAGENET
    """size of the data set that this time and the preset's epochs are for"""
    is_lower_bound: bool = False
    note: str = ""

    @property
    def is_known(self) -> bool:
        return bool(self.hours or self.minutes)

    @property
    def text(self) -> str:
        if self.hours is not None:
            return f"{'more than ' if self.is_lower_bound else ''}{self.hours} hours"
        return "not measured" if self.minutes is None else f"about {self.minutes:g} minutes"


class Needs(Section):
    """Images, hardware and memory that a preset is made for."""

    pixels: tuple[int, int | None] = (224, 224)
    """shorter side of the images: smallest, largest; null: any"""
    hardware: Literal["CPU", "1 GPU", "GPUs"] = "GPUs"
    memory_gib: float | None = None
    """measured peak on one GPU, or of the processes on a CPU; null: not measured"""
    batch: int | None = None
    """images at a time when it was measured"""
    init: bool = False
    """an encoder to start from"""


@dataclass(frozen=True)
class Preset:
    """A named config, with the facts to know before running it."""

    name: str
    about: str
    config: Config
    cost: Cost
    needs: Needs
    expects: str = ""  # numbers and their source; empty if nothing was published or measured
    notes: str = ""  # why the settings are what they are
    data: str = "imagenet/train"  # in the command
    options: str = ""  # in the command
    scales: bool = False  # epochs follow the number of images

    def __call__(self) -> Config:
        return self.config

    def for_images(self, count: int, changes: Mapping[str, Any] | None = None) -> Config:
        """The config for `count` images, with `changes`.

        The epochs of a preset that scales are for `cost.images`. Other numbers of images get
        sqrt(cost.images / count) times as many, and always enough for ENOUGH updates: a quarter of
        the images is seen twice as often in half as many updates. The warmup keeps its share. A
        batch that is larger than the data set is halved until it fits.
        """
        changes = changes or {}
        if not self.scales:
            return override(self.config, changes)
        given = dict(flatten(changes))
        # Wrong values are refused here. Without warmup, since that follows from the epochs.
        asked = override(self.config, {"optim.warmup_epochs": 0, **changes}).optim
        batch, epochs = asked.batch_size, asked.epochs
        while batch > count and batch > 1 and "optim.batch_size" not in given:
            batch //= 2
        if "optim.epochs" not in given:
            rarer = self.config.optim.epochs * math.sqrt(self.cost.images / count)
            epochs = max(1, round(rarer), math.ceil(ENOUGH / max(1, count // batch)))
        share = self.config.optim.warmup_epochs / self.config.optim.epochs
        fitted = {
            "optim.batch_size": batch,
            "optim.epochs": epochs,
            "optim.warmup_epochs": round(share * epochs, 2),
        }
        return override(self.config, {**fitted, **changes})

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


def known_preset(preset: str | Path | Config | None) -> Preset | None:
    """The preset of that name, if it is one."""
    return None if isinstance(preset, Config) else PRESETS.get(str(preset))


def find_config(preset: str | Path) -> Config:
    """The config of a preset, or of a YAML file as `pretrain --dry-run` prints it."""
    name = str(preset)
    if name in PRESETS:  # a preset wins over a file of that name
        return PRESETS[name]()
    if Path(preset).exists():
        return from_yaml(read_yaml(Path(preset)), name)
    if name.endswith((".yaml", ".yml")):
        raise UserError(f"{name}: no such file; `stopmim presets` lists the names that need none")
    raise UserError(f"{name}: no such preset or file; {which_preset(name)}")


def which_preset(name: str) -> str:
    """Hint for a `name` that no preset has: the closest one, or all."""
    if near := did_you_mean(name, PRESETS):
        return f"{near}`stopmim presets` lists them all"
    return f"presets are {', '.join(PRESETS)}"


def __getattr__(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
