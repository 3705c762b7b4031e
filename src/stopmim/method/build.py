"""From a preset's name to a config that is proved to work, and what it amounts to."""

from pathlib import Path
from typing import Any

import torch

from stopmim.base.errors import UserError, meant
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config, MaskingConfig, from_yaml, override, resolve, to_yaml
from stopmim.method import masks as masking
from stopmim.method.model import build


def configure(preset: str | Path | Config, changes: dict[str, Any] | None = None) -> Config:
    """The resolved config of a preset, YAML file or config with `changes`; its masks exist."""
    if isinstance(preset, Config):
        config = preset
    elif str(preset) in PRESETS:
        config = PRESETS[str(preset)]()
    elif Path(preset).is_file():
        config = from_yaml(Path(preset).read_text(encoding="utf-8", errors="replace"), str(preset))
    else:
        raise UserError(_no_such(str(preset)))
    config = resolve(override(config, changes or {}))
    try:
        if config.masking.kind == "multiblock":
            masking.check_multiblock(config.side, **multiblock_options(config.masking))
        else:
            masking.check_random(config.side, config.masking.ratio)
    except ValueError as error:
        raise UserError(f"config: masking: {error}") from None
    if config.lowres and min(small := min(_blocks(config), key=min)) < 3:
        raise UserError(
            f"config: lowres: a target of {small.height}x{small.width} on a "
            f"{config.side}x{config.side} grid need not hold one whole cell of 2x2 patches; "
            f"raise masking.target_scale"
        )
    return config


def _no_such(preset: str) -> str:
    if preset.endswith((".yaml", ".yml")):
        return f"{preset}: no such file; `stopmim presets` lists the names that need none"
    near = meant(preset, PRESETS)
    return f"{preset}: no such preset or file; {near}presets are {', '.join(PRESETS)}"


def multiblock_options(config: MaskingConfig) -> dict[str, Any]:
    """The part of a masking config that `masking.multiblock` takes."""
    return size_options(config) | config.model_dump(include={"targets", "context_length"})


def size_options(config: MaskingConfig) -> dict[str, Any]:
    """The part of it that `masking.draw_sizes` takes."""
    return config.model_dump(include={"target_scale", "target_aspect", "context_scale"}) | {
        "compat": "released" if config.compat == "released" else None
    }


def describe(config: Config) -> str:
    """The config as a YAML file that `pretrain` takes as a preset, with its size in comments."""
    with torch.device("meta"):
        model = build(config)
    millions = {
        name: sum(p.numel() for p in part.parameters()) / 1e6
        for name, part in model.named_children()
    }
    lines = [
        f"encoder {millions['encoder']:.1f} M parameters, predictor {millions['predictor']:.1f} M",
        f"grid {config.side}x{config.side}, {_masks(config)}",
    ]
    return "".join(f"# {line}\n" for line in lines) + to_yaml(config)


def _masks(config: Config) -> str:
    m = config.masking
    if m.kind == "random":
        return f"{m.ratio:.0%} of the patches hidden at random"
    options = multiblock_options(m)
    blocks = _blocks(config)
    shapes = ", ".join(f"{b.height}x{b.width} ({p:.0%})" for b, p in sorted(blocks.items()))
    length = m.context_length or masking.default_context_length(config.side)
    seen = "as many patches as the batch allows" if options["compat"] else f"{length} patches"
    return f"{seen} seen, {m.targets} targets of {shapes}"


def _blocks(config: Config) -> dict[masking.Block, float]:
    m = config.masking
    compat = size_options(m)["compat"]
    return masking.possible_blocks(config.side, m.target_scale, m.target_aspect, compat=compat)
