"""``stopmim presets``."""

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from stopmim.base.errors import UserError, did_you_mean
from stopmim.cli.options import option
from stopmim.config.architectures import printed

if TYPE_CHECKING:
    from stopmim.config.presets import Preset


@dataclass(frozen=True)
class Presets:
    """List the presets, or show one with its command and the numbers to expect."""

    name: Annotated[Positional[str], option("[NAME]")] = ""
    """a preset to show in full"""

    def __call__(self) -> None:
        from stopmim.config.presets import PRESETS

        if self.name and self.name not in PRESETS:
            near = did_you_mean(self.name, PRESETS)
            raise UserError(f"{self.name}: no such preset; {near}presets are {', '.join(PRESETS)}")
        print(details(PRESETS[self.name]) if self.name else listing([*PRESETS.values()]))


def listing(presets: "list[Preset]") -> str:
    """All presets, in two lines of at most 80 characters each."""
    lines = [f"{'preset':28} {'network':12} {'pixels':>6}  cost"]
    for preset in presets:
        network, pixels = printed(preset.config.arch), _pixels(preset, "-")
        lines.append(f"{preset.name:28} {network:12} {pixels:>6}  {preset.cost.text}")
        lines.append(f"  {preset.about}")
    lines += ["", "Hours are of one H200 for ImageNet-1k. More about one: stopmim presets NAME"]
    return "\n".join(lines)


def details(preset: "Preset") -> str:
    """All that is known about one preset; only its command may be longer than 80 characters."""
    cost, needs = preset.cost, preset.needs
    time = [f"{cost.text} of one H200" if cost.hours else cost.text]
    time += [f"for {cost.images:,} images"] if cost.hours or cost.minutes else []
    rows = {
        "about": preset.about,
        "network": printed(preset.config.arch),
        "images": f"{_pixels(preset, ' to ')} px",
        "hardware": needs.hardware,
        "cost": ", ".join(filter(None, [*time, cost.note])),
        "memory": f"{needs.memory_gib} GiB per GPU for {needs.batch} images at a time"
        if needs.memory_gib
        else "not measured",
        "expect": preset.expects,
        "notes": preset.notes,
    }
    lines = [preset.name]
    for key, text in rows.items():
        lines += textwrap.wrap(text, 80, initial_indent=f"  {key:10}", subsequent_indent=" " * 12)
    return "\n".join([*lines, f"  {'command':10}{preset.command}"])


def _pixels(preset: "Preset", between: str) -> str:
    return between.join(map(str, dict.fromkeys(preset.needs.pixels)))
