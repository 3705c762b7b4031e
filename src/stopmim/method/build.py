"""From a preset's name to a config that is proved to work, and what it amounts to."""

from pathlib import Path
from typing import Any, Literal, assert_never

import torch
from torch import Tensor

from stopmim.base.errors import UserError, meant
from stopmim.base.random_keys import seed_of, torch_generator
from stopmim.config.architectures import parse_arch
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config, MaskingConfig, from_yaml, override, resolve, to_yaml
from stopmim.method import masks as masking
from stopmim.method.encoder import VisionTransformer, initialise_mae
from stopmim.method.model import MaskedImageModel
from stopmim.method.positions import (
    Covariance,
    JitteredPositions,
    Positions,
    StochasticPositions,
)
from stopmim.method.predictor import Predictor


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


# ------------------------------------------------------------------------------ the model


def build(config: Config) -> MaskedImageModel:
    """The model of a resolved config, with the weights its seed gives, on the CPU."""
    size, patch = parse_arch(config.arch)
    depth, heads = config.predictor.depth, config.predictor.heads
    if depth is None or heads is None:
        raise ValueError("the config is not resolved: call stopmim.config.schema.resolve first")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("init", config.seed))
        encoder = VisionTransformer.from_arch(config.arch, config.image_size, config.class_token)
        predictor = Predictor(
            build_positions(config),
            size.width,
            depth,
            heads,
            noisy=config.positions.tokens,
            tied=config.positions.covariance != "untied",
            outputs=3 * patch**2 if config.target == "pixels" else size.width,
        )
        if config.target == "pixels":
            encoder.start = "mae"
            encoder.apply(initialise_mae)
            predictor.apply(initialise_mae)
    encoder.recompute = predictor.recompute = config.runtime.recompute == "on"
    return MaskedImageModel(
        encoder,
        predictor,
        target=config.target,
        norm_pixels=config.norm_pixels,
        lowres=config.lowres,
    )


def build_positions(config: Config) -> Positions:
    side, width, p = config.side, config.predictor.width, config.positions
    bias: Literal["project", "mask_token"] = (
        "project" if config.compat == "released" else "mask_token"
    )
    match p.kind:
        case "sincos" | "learned":
            return Positions(side, width, base=p.kind, bias=bias)
        case "jitter":
            return JitteredPositions(side, width, _resolved(p.sigma), bias=bias)
        case "stochastic":
            covariance: Covariance = (
                p.covariance if p.covariance in ("fixed", "conditioned") else "projected"
            )
            return StochasticPositions(
                side,
                width,
                _resolved(p.sigma),
                base=p.base,
                covariance=covariance,
                bias=bias,
                share=p.share,
            )
        case unknown:
            assert_never(unknown)


def _resolved(sigma: float | None) -> float:
    if sigma is None:
        raise ValueError("positions.sigma is not resolved")
    return sigma


# ------------------------------------------------------------------------------ the masks of a step


def draw_sizes(config: Config, step: int) -> masking.Sizes:
    """The block sizes of the batch of `step`."""
    on_host = torch_generator("sizes", config.seed, step)
    return masking.draw_sizes(config.side, generator=on_host, **size_options(config.masking))


def draw_masks(
    config: Config, step: int, parts: list[slice], device: torch.device
) -> list[masking.Masks]:
    """The masks of every part of the batch of `step`."""
    m, side, size = config.masking, config.side, config.optim.batch_size
    places = torch_generator("masks", config.seed, step, device=device)
    if m.kind == "random":
        every = masking.random(size, side, generator=places, ratio=m.ratio)
        return [masking.Masks(every.context[part], every.targets[:, part]) for part in parts]
    options = multiblock_options(m) | {"sizes": draw_sizes(config, step)}
    if m.compat == "released":
        # Its contexts are cut to the shortest of those drawn together: on one GPU, as published.
        return [
            masking.multiblock(
                part.stop - part.start,
                side,
                **options,
                generator=torch_generator("masks", config.seed, step, part.start, device=device),
            )
            for part in parts
        ]
    every = masking.multiblock(size, side, **options, generator=places)
    return [masking.Masks(every.context[part], every.targets[:, part]) for part in parts]


def find_cells(config: Config, step: int, targets: Tensor) -> Tensor | None:
    """The cells (M, B, L) of the targets (M, B, K) of `step`; none without `lowres`."""
    if config.lowres is None:
        return None
    return masking.cells(targets, draw_sizes(config, step).target, config.side)
