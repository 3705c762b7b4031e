"""Channels, type and statistics of the images of a run, settled when it starts.

For 8-bit RGB with ImageNet's statistics nothing is settled, and the config keeps its nulls.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stopmim.base.console import is_first_rank, say, warn
from stopmim.base.errors import DataError, UserError
from stopmim.config.schema import Config, flatten
from stopmim.data.channels import Form
from stopmim.data.images import Images
from stopmim.data.survey import common_form, measure
from stopmim.runs.identity import begun
from stopmim.train.distributed import World

SETTLED = tuple(
    f"data.{key}"
    for key in ("channels", "kind", "channel_names", "normalise", "low", "high", "mean", "std")
)


def settle_channels(
    config: Config, changes: Mapping[str, Any], images: Images, out: Path, world: World
) -> dict[str, Any]:
    """The `changes` of config keys, plus the keys that the images decide.

    A run that is resumed keeps what it began with. Rank 0 measures for all.
    """
    given = dict(flatten(changes))
    if (out / "run.json").exists():
        before = dict(flatten(begun(out)["config"]))
        found = {key: before[key] for key in SETTLED if before.get(key) is not None}
        return found | given
    seen = common_form(images, config)
    _refuse_other(config, seen)
    normalise = config.data.normalise or (None if seen.is_rgb else "measured")
    if normalise is None or (seen.is_rgb and normalise == "imagenet"):
        return given
    if normalise == "imagenet":
        raise UserError(
            f"config: data: normalise: imagenet is for 3 channels, 8 bit; these images have {seen}:"
            f" use measured"
        )
    found = world.gather(_settled(config, seen, normalise, images) if world.first else None)[0]
    if world.first and config.data.augmentation == "released" and seen.channels != 3:
        warn(
            f"data.augmentation: released: grey is for red, green and blue; {seen.channels} "
            f"channels are flipped and blurred only"
        )
    return given | found


def _settled(config: Config, seen: Form, normalise: str, images: Images) -> dict[str, Any]:
    """Config keys of section data, measured where the config does not state them."""
    data = config.data
    found: dict[str, Any] = {"normalise": normalise}
    if not seen.is_rgb:
        found |= {"channels": seen.channels, "kind": seen.kind}
        found["channel_names"] = data.channel_names or seen.names or None
    origin = "as the config states"
    if None in (data.low, data.high, data.mean, data.std):
        stats, count = measure(images, seen, config)
        for key in ("low", "high", "mean", "std"):
            found[key] = getattr(data, key) or getattr(stats, key)
        origin = f"measured on {count:,} image{'s' * (count != 1)}"
    how = "each image by its own" if normalise == "per-image" else "by the"
    if is_first_rank():
        say(f"{seen}; normalised {how} mean and deviation per channel, {origin}")
    return {f"data.{key}": value for key, value in found.items() if value is not None}


def _refuse_other(config: Config, seen: Form) -> None:
    """Raises DataError if the config states other channels than the images have."""
    data = config.data
    stated = Form(data.channels or seen.channels, data.kind or seen.kind)
    if not stated.is_like(seen):
        raise DataError(f"config: data: {stated}, but these images have {seen}; leave both out")
