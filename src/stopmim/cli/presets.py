"""``stopmim presets``."""

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from stopmim.base.errors import UserError
from stopmim.base.tables import aligned
from stopmim.cli.options import option
from stopmim.config.architectures import printed

if TYPE_CHECKING:
    from stopmim.config.presets import Preset

FOOT = """\
pixels: shorter side of the images; GiB: peak memory; time: for so many images,
on one H200 or two CPU cores; -: not measured. `stopmim check DATA` chooses for
your images and this machine, `stopmim presets NAME` says more about one."""


@dataclass(frozen=True)
class Presets:
    """List the presets, or show one with its command and the numbers to expect."""

    name: Annotated[Positional[str], option("[NAME]")] = ""
    """a preset to show in full"""

    def __call__(self) -> None:
        from stopmim.config.presets import PRESETS, which_preset

        if self.name and self.name not in PRESETS:
            raise UserError(f"{self.name}: no such preset; {which_preset(self.name)}")
        print(details(PRESETS[self.name]) if self.name else listing([*PRESETS.values()]))


def listing(presets: "list[Preset]") -> str:
    """All presets as a table of at most 80 characters."""
    rows = [
        {
            "preset": preset.name,
            "pixels": _pixels(preset, "-"),
            "network": printed(preset.config.arch),
            "runs on": preset.needs.hardware,
            "GiB": f"{preset.needs.memory_gib:g}" if preset.needs.memory_gib else "-",
            "time": _time(preset),
            "for": _compact(preset.cost.images) if _time(preset) != "-" else "-",
        }
        for preset in presets
    ]
    return f"{aligned(rows, right=('GiB', 'time', 'for'))}\n\n{FOOT}"


def details(preset: "Preset") -> str:
    """Everything known about one preset, within 80 columns except for its command."""
    cost, needs = preset.cost, preset.needs
    time = [f"{cost.text} of one H200" if cost.hours else cost.text]
    time += [f"for {cost.images:,} images"] if cost.hours or cost.minutes else []
    rows = {
        "about": preset.about,
        "network": printed(preset.config.arch),
        "images": f"{_pixels(preset, ' to ')} px",
        "hardware": needs.hardware,
        "cost": ", ".join(filter(None, [*time, cost.note])),
        "memory": f"{needs.memory_gib} GiB{'' if needs.hardware == 'CPU' else ' per GPU'} for "
        f"{needs.batch} images at a time"
        if needs.memory_gib
        else "not measured",
        "epochs": f"{preset.config.optim.epochs} of {cost.images:,} images, more of fewer"
        if preset.scales
        else "",
        "expect": preset.expects,
        "notes": preset.notes,
    }
    lines = [preset.name]
    for key, text in rows.items():
        lines += textwrap.wrap(text, 80, initial_indent=f"  {key:10}", subsequent_indent=" " * 12)
    return "\n".join([*lines, f"  {'command':10}{preset.command}"])


def _pixels(preset: "Preset", between: str) -> str:
    low, high = preset.needs.pixels
    return f"{low}+" if high is None else between.join(map(str, dict.fromkeys((low, high))))


def _time(preset: "Preset") -> str:
    cost = preset.cost
    if cost.hours is not None:
        return f"{'>' if cost.is_lower_bound else ''}{cost.hours} h"
    return "-" if cost.minutes is None else f"{cost.minutes:g} min"


def _compact(count: int) -> str:
    """50,000 as 50k, and 1,281,167 as 1.3M."""
    if count < 1000:
        return str(count)
    return f"{count / 1e6:.2g}M" if count >= 1e6 else f"{count / 1e3:.2g}k"
