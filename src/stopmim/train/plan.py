"""Plan of a run before it starts: the preset that suits images and machine, and its config.

What depends on the number of images or on the machine is settled once, when a run starts, and
run.json records plain numbers.
"""

import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stopmim.base.console import warn
from stopmim.base.errors import DataError, UserError
from stopmim.base.tables import counted, spoken
from stopmim.config.architectures import printed
from stopmim.config.presets import known_preset
from stopmim.config.schema import Config, OptimConfig, flatten
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import open_images
from stopmim.data.workers import cores
from stopmim.gpu.devices import choose_device
from stopmim.method.build import configure
from stopmim.runs.run import Run
from stopmim.train import cost
from stopmim.train.cost import Facts

CANDIDATES = {"cpu": ("photos_cpu",), "cuda": ("photos_s16", "small_images")}
SMALL = 128  # pixels: images with a shorter side than this are for small_images
ROOM = 0.7  # share of the free memory that a run is planned for


@dataclass(frozen=True)
class Plan:
    """A run that has not started: its config, and what it takes on this machine."""

    preset: str
    changes: Mapping[str, Any]
    config: Config
    facts: Facts
    device: torch.device

    @property
    def per_epoch(self) -> int:
        return self.facts.count // self.config.optim.batch_size

    @property
    def updates(self) -> int:
        return self.config.optim.epochs * self.per_epoch

    @property
    def seconds(self) -> float:
        """Time of all updates, extrapolated from a measured one; on a GPU an upper bound."""
        # The number of updates does not change one of them: alternatives share a measurement.
        optim = OptimConfig(batch_size=self.config.optim.batch_size)
        config = self.config.model_copy(update={"optim": optim})
        return self.updates * cost.seconds_per_update(config, self.facts, self.device)

    @property
    def lasts(self) -> str:
        """Its time in words: "about 6 minutes"; on a GPU "up to", since nothing is compiled yet."""
        return f"{'up to' if self.device.type == 'cuda' else 'about'} {spoken(self.seconds)}"

    @property
    def takes(self) -> str:
        """Time and memory, in words."""
        gib = cost.memory(self.config, self.device) / 2**30
        return f"{self.lasts}, {gib:.1f} GiB of memory"

    @property
    def what(self) -> str:
        """Network, size and length of the run."""
        optim = self.config.optim
        return (
            f"{printed(self.config.arch)} at {self.config.image_size} px, "
            f"{counted(optim.epochs, 'epoch')} of {counted(self.per_epoch, 'update')} with "
            f"{counted(optim.batch_size, 'image')}"
        )

    @property
    def where(self) -> str:
        """The images and the machine that the run is for."""
        about = "about " if self.facts.varied else ""
        images = f"{counted(self.facts.count, 'image')} of {about}{self.facts.side} px"
        return f"{images} on {machine(self.device)}"

    def command(self, data: str, suffix: str = "") -> str:
        """The complete command line of the run; `suffix` is for the name of its directory."""
        words = ["stopmim", "pretrain", data, "--preset", self.preset, *as_options(self.changes)]
        whole = Path(data).name.replace(" ", "-")  # my-photos of "my photos"
        name = re.split(r"[^\w-]", whole)[0]  # photos of photos.npz, scenes of scenes:64
        first = f"runs/{name or 'first'}{suffix}"
        names = itertools.chain([first], (f"{first}-{n}" for n in itertools.count(2)))
        return shlex.join([*words, "--out", next(x for x in names if not os.path.lexists(x))])


def as_options(changes: Mapping[str, Any]) -> list[str]:
    """Config keys and their values as words of a command line."""
    words = list[str]()
    for key, value in flatten(changes):
        # A list as [...]: only pairs may be several words.
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


# ------------------------------------------------------------------------------ choosing


def choose(facts: Facts, device: torch.device) -> str:
    """The preset for these images: by the device, then by their size."""
    first, *others = CANDIDATES[device.type]
    return others[0] if others and 0 < facts.side < SMALL else first


def first_config(
    preset: str | Path | Config | None, changes: Mapping[str, Any], out: Path | None = None
) -> Config:
    """The config as far as it is known before the images are; a mistake raises UserError.

    `out` is the directory of a run that is about to start or to be resumed.
    """
    if preset is None and out and (out / "run.json").exists():  # nothing is chosen again
        return configure(Run(out).config, changes)
    wrong, on_cpu = list[UserError](), dict(flatten(changes)).get("runtime.device") == "cpu"
    kind = "cpu" if on_cpu or not torch.cuda.is_available() else "cuda"
    for name in CANDIDATES[kind] if preset is None else (preset,):
        try:
            return _config(name, changes, to_train=out is not None)
        except UserError as error:
            wrong.append(error)
    raise wrong[0]  # no candidate takes these changes


def plan_run(
    preset: str | Path | Config | None,
    changes: Mapping[str, Any],
    facts: Facts,
    device: torch.device,
    out: Path | None = None,
    ranks: int = 1,
) -> Plan:
    """Settles what depends on the images and the machine; `out` may be a run to resume."""
    given = dict(flatten(changes))
    crops = given.get("data.crops_per_image")
    if isinstance(crops, int) and crops > 1:  # an epoch has so many times the samples
        read, reduced = facts.read_seconds / crops, facts.reduced_seconds / crops
        facts = replace(
            facts, count=crops * facts.count, read_seconds=read, reduced_seconds=reduced
        )
    resumed = Run(out).config if out and (out / "run.json").exists() else None
    chosen = choose(facts, device) if preset is None else preset
    config, known = _config(chosen, changes, facts.count), known_preset(chosen)
    if known and known.scales:
        now = resumed.runtime.model_dump() if resumed else _runtime(config, device, ranks)
        settled = {f"runtime.{key}": now[key] for key in ("accumulate", "threads", "save_every")}
        config = configure(config, {key: n for key, n in settled.items() if key not in given})
    if not facts.seen.is_rgb and config.data.channels is None:
        found = {"data.channels": facts.seen.channels, "data.kind": facts.seen.kind}
        config = configure(config, found)
    name = config.arch if isinstance(chosen, Config) else str(chosen)
    return Plan(name, changes, config, facts, device)


def plan_for(
    data: str | Path, preset: str | Path | Config | None, changes: Mapping[str, Any]
) -> Plan:
    """The plan of a run on `data` that would start now."""
    first = first_config(preset, changes)
    images = without_skipped(open_images(data), first.data.skip)
    return plan_run(preset, changes, cost.look(images), choose_device(first.runtime.device))


def dry_config(
    data: str | Path, preset: str | Path | Config | None, changes: Mapping[str, Any]
) -> Config:
    """The config that `--dry-run` shows, also if the images cannot be opened."""
    known = known_preset(preset)
    if preset is None:
        return plan_for(data, preset, changes).config
    if known and known.scales:
        try:
            return plan_for(data, preset, changes).config
        except DataError as error:
            warn(f"{error}; these are the epochs for {known.cost.images:,} images")
    return first_config(preset, changes)


def _config(
    preset: str | Path | Config,
    changes: Mapping[str, Any],
    count: int | None = None,
    to_train: bool = False,
) -> Config:
    """The config for `count` images, by default as many as the preset was measured with."""
    known = known_preset(preset)
    if known and known.scales:
        count = known.cost.images if count is None else count
        return configure(known.for_images(count, changes))
    return configure(preset, changes, to_train=to_train)


def _runtime(config: Config, device: torch.device, ranks: int) -> dict[str, Any]:
    """The section `runtime` of the config, fitted to this machine."""
    now, batch = config.runtime.model_dump(), config.optim.batch_size
    if ranks > 1:  # ranks must agree, and share the batch anyway
        return now
    if device.type == "cpu":  # the other half of the cores reads images
        now["threads"] = max(1, cores() // 2)
    free = ROOM * cost.free_memory(device)
    for parts in (n for n in range(1, batch + 1) if batch % n == 0):  # the fewest that fit
        now["accumulate"] = parts
        if cost.memory(configure(config, {"runtime.accumulate": parts}), device) <= free:
            break
    return now


def machine(device: torch.device) -> str:
    """The machine in a few words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "one CPU core" if cores() == 1 else f"{cores()} CPU cores"
