"""Builds the objects of the method from a config. Every choice by name is made here and only here.

`configure` turns a preset, a YAML file or a config into a resolved config that is proved to work;
the other functions build what it asks for. A new kind of position, mask or target needs its class,
its name in config/schema.py and one `case` below.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_never

import torch

from stopmim.base.errors import UserError
from stopmim.base.random_keys import seed_of
from stopmim.config.architectures import parse_arch
from stopmim.config.presets import find_config, known_preset
from stopmim.config.schema import Config, override, resolve
from stopmim.config.yaml_text import to_yaml
from stopmim.gpu.blocks import way_of
from stopmim.method.encoder import INITIALISERS, VisionTransformer
from stopmim.method.masks import Masks, MaskSampler, MultiBlock, RandomPatches, ReleasedMultiBlock
from stopmim.method.model import Features, HalfResolution, MaskedImageModel, Pixels, Target
from stopmim.method.positions import Bias, JitteredPositions, Positions, StochasticPositions
from stopmim.method.predictor import Predictor

# ------------------------------------------------------------------------------ the config


def configure(
    preset: str | Path | Config, changes: Mapping[str, Any] | None = None, *, to_train: bool = False
) -> Config:
    """Resolves a preset, YAML file or config with `changes`, and proves that its masks exist.

    `to_train` also requires what the preset cannot supply itself: an encoder to start from.
    """
    config = preset if isinstance(preset, Config) else find_config(preset)
    config = resolve(override(config, changes or {}))
    known = known_preset(preset)
    if to_train and known and known.needs.init and not config.init:
        what = f"needs an encoder to start from, --init: {known.command}"
        raise UserError(f"{known.name}: {what}")
    # Proved before anything is trained: block sizes are drawn, so a rare one could fail much later.
    sampler, key = build_sampler(config), "masking"
    try:
        sampler.check()
        key = "lowres" if config.lowres else "target"
        build_target(config).check(sampler)
    except ValueError as error:
        raise UserError(f"config: {key}: {error}") from None
    return config


def describe(config: Config) -> str:
    """The config as a YAML file that `pretrain` takes as a preset, with its size in comments."""
    with torch.device("meta"):  # parameters are counted, not allocated
        model = build(config)
    parts = dict(model.named_children())
    millions = {name: sum(p.numel() for p in parts[name].parameters()) / 1e6 for name in parts}
    lines = [
        f"encoder {millions['encoder']:.1f} M parameters, predictor {millions['predictor']:.1f} M",
        f"grid {config.side}x{config.side}, {build_sampler(config).describe()}",
    ]
    return "".join(f"# {line}\n" for line in lines) + to_yaml(config)


# ------------------------------------------------------------------------------ the model


def build(config: Config) -> MaskedImageModel:
    """The model of a resolved config, with the weights its seed gives, on the CPU."""
    size, _ = parse_arch(config.arch)  # D, depth, heads of the encoder
    depth, heads = config.predictor.depth, config.predictor.heads
    if depth is None or heads is None:
        raise ValueError("the config is not resolved: call stopmim.config.schema.resolve first")
    target = build_target(config)
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        # On the CPU whatever the device will be: a seed gives the same weights everywhere.
        torch.manual_seed(seed_of("init", config.seed))
        encoder = VisionTransformer.from_arch(
            config.arch, config.image_size, config.class_token, config.data.channels or 3
        )
        positions, outputs = build_positions(config), target.width(encoder)  # T
        noisy = config.positions.tokens
        predictor = Predictor(positions, size.width, depth, heads, noisy=noisy, outputs=outputs)
        if target.start != encoder.start:  # the constructors draw I-JEPA's initial weights
            encoder.start = target.start
            for part in (encoder, predictor):
                part.apply(INITIALISERS[target.start])
    encoder.way = predictor.way = way_of(config.runtime)
    return MaskedImageModel(encoder, predictor, target)


def build_target(config: Config) -> Target:
    match config.target:
        case "features" if config.lowres:  # Table 8 of the paper
            return HalfResolution(config.side, config.lowres)
        case "features":  # I-JEPA
            layers, visible = config.target_layers, config.visible_loss
            return Features(layers=layers, visible=visible, vicreg=config.vicreg)
        case "pixels":  # MAE
            return Pixels(config.norm_pixels)
        case unknown:
            assert_never(unknown)


def build_positions(config: Config) -> Positions:
    side, width, p = config.side, config.predictor.width, config.positions
    # The released code replaces m~ by the bias of A (StoP deit.py:322-326).
    bias: Bias = "project" if config.compat == "released" else "mask_token"
    match p.kind:
        case "sincos" | "learned":  # I-JEPA, and the second row of Table 6
            return Positions(side, width, base=p.kind, bias=bias)
        case "jitter":  # sigma in patches squared
            return JitteredPositions(side, width, _resolved(p.sigma), bias=bias)
        case "stochastic":  # StoP; sigma is a variance
            options = p.model_dump(include={"base", "covariance", "share", "levels"})
            positions = StochasticPositions(side, width, _resolved(p.sigma), bias=bias, **options)
            positions.ramp = p.ramp
            return positions
        case unknown:
            assert_never(unknown)


def _resolved(sigma: float | None) -> float:
    if sigma is None:
        raise ValueError("positions.sigma is not resolved")
    return sigma


def from_tag(
    tag: Any, encoder: VisionTransformer, width: int, depth: int, outputs: int | None = None
) -> Predictor:
    """The predictor that `Predictor.tag` of an exported file describes, without its weights."""
    positions: Positions
    side, bias = encoder.side, tag["bias"]
    match tag["positions"]:  # only kinds whose `not_exportable` is empty are ever written
        case "sincos":
            positions = Positions(side, width, bias=bias)
        case "stochastic":  # files of early versions have no share
            options = {"share": float(tag.get("share", 1)), "bias": bias}
            options["levels"] = tuple(map(float, tag.get("levels", ())))
            positions = StochasticPositions(side, width, float(tag["sigma"]), **options)
        case unknown:
            raise ValueError(f"unknown positions {unknown!r}")
    heads, noisy = int(tag["heads"]), tag["tokens"]
    return Predictor(positions, encoder.width, depth, heads, noisy=noisy, outputs=outputs)


# ------------------------------------------------------------------------------ the masks


def build_sampler(config: Config) -> MaskSampler:
    m = config.masking
    match m.kind:
        case "random":  # MAE
            return RandomPatches(config.side, m.ratio)
        case "multiblock":  # I-JEPA, corrected or with the biases of the released code
            kind = ReleasedMultiBlock if m.compat == "released" else MultiBlock
            shapes = m.target_scale, m.target_aspect, m.context_scale
            return kind(config.side, m.targets, *shapes, config.context_length)
        case unknown:
            assert_never(unknown)


def draw_masks(config: Config, step: int, parts: list[slice], device: torch.device) -> list[Masks]:
    """Masks of every part of the batch of `step`, as training draws them."""
    sampler = build_sampler(config)
    return sampler.at_step(config.seed, step, parts, config.optim.batch_size, device)
