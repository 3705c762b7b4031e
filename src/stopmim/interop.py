"""Encoders and models from files: our checkpoints, and the released ones of StoP and I-JEPA.

A file is recognised by its keys, its architecture read off its shapes, and every key must be used
and every parameter filled: there is no such thing as a partly random encoder. Pickles are read with
``weights_only=True``, which executes nothing.
"""

import json
import math
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stopmim import checkpoint
from stopmim.arch import SIZES
from stopmim.config import Config
from stopmim.errors import CheckpointError
from stopmim.mim import MaskedImageModel, build
from stopmim.positions import Positions, StochasticPositions
from stopmim.predictor import Predictor
from stopmim.vit import Encoder, VisionTransformer

Branch = Literal["target", "context"]
State = dict[str, Tensor]


def load_encoder(path: str | Path, branch: Branch = "target", heads: int | None = None) -> Encoder:
    """The encoder in `path`, in evaluation mode.

    Args:
        path: a run directory, one of its checkpoints, or a released StoP or I-JEPA file.
        branch: "target" is the EMA encoder, which the papers evaluate; "context" the trained one.
        heads: attention heads, needed for a released file whose width is not a known size.
    """
    if branch not in ("target", "context"):
        raise ValueError(f'branch must be "target" or "context", got {branch!r}')
    model = load_model(path, heads)
    return model.target_encoder if branch == "target" else model.encoder


def load_model(path: str | Path, heads: int | None = None) -> MaskedImageModel:
    """Encoder, target encoder and predictor in `path`, in evaluation mode."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    model = _load_ours(path) if path.is_dir() else _load_released(path, heads)
    return model.eval()


def _load_ours(path: Path) -> MaskedImageModel:
    if (path / "run.json").exists():
        newest, damaged = checkpoint.latest(path)
        if newest is None:
            raise CheckpointError(damaged[0] if damaged else f"{path}: no checkpoint in it yet")
        path = newest
    elif problem := checkpoint.verify(path):
        raise CheckpointError(f"{problem}; expected a run directory or one of its checkpoints")
    config = Config.model_validate_json(json.dumps(checkpoint.state(path)["config"]))
    model = build(config)
    checkpoint.load(path, model)
    return model


def _load_released(path: Path, heads: int | None) -> MaskedImageModel:
    """A ``.pth.tar`` of amirbar/StoP or facebookresearch/ijepa."""
    tree = read_pickle(path)
    parts = {}
    for name in ("encoder", "target_encoder", "predictor"):
        if not isinstance(tree, Mapping) or not isinstance(tree.get(name), Mapping):
            keys = ", ".join(map(str, list(tree)[:8])) if isinstance(tree, Mapping) else "none"
            raise CheckpointError(f"{path}: no {name} in it; its top-level keys are {keys}")
        # "module." is DistributedDataParallel's; StoP without a launcher has none.
        parts[name] = {str(k).removeprefix("module."): v for k, v in tree[name].items()}
        for key, value in parts[name].items():
            if not isinstance(value, Tensor):
                what = type(value).__name__
                raise CheckpointError(f"{path}: {name}: {key} is no tensor but {what}")
    encoder = encoder_like(parts["encoder"], str(path), heads)
    model = MaskedImageModel(encoder, predictor_like(parts["predictor"], encoder, str(path)))
    for name, module in model.named_children():
        fill(module, parts[name], f"{path}: {name}")
    return model


def read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickle protocols, in several lines
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: refused or damaged: {reason}") from None
    except (zipfile.BadZipFile, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: not a checkpoint: {error}") from None


def encoder_like(weights: State, source: str, heads: int | None) -> VisionTransformer:
    """An encoder of the architecture the shapes of `weights` tell."""
    try:
        width, _, patch, _ = weights["patch_embed.proj.weight"].shape
        side = math.isqrt(weights["pos_embed"].shape[1])
        hidden = weights["blocks.0.mlp.fc1.weight"].shape[0]
        if not min(width, patch, side, hidden):
            raise ValueError("an empty tensor")
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{source}: not an I-JEPA encoder: {error}") from None
    if side * side != weights["pos_embed"].shape[1]:
        raise CheckpointError(
            f"{source}: its {weights['pos_embed'].shape[1]} positions are no square"
        )
    known = {size.width: size.heads for size in SIZES.values()}
    if heads is None and width not in known:
        raise CheckpointError(f"{source}: width {width} is no known size; say heads=...")
    if heads is not None and heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    depth, heads = _depth(weights, "blocks."), heads or known[width]
    try:
        return VisionTransformer(side * patch, patch, width, depth, heads, mlp_ratio=hidden / width)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def predictor_like(weights: State, encoder: VisionTransformer, source: str) -> Predictor:
    """A predictor of the architecture and variant of `weights`, from released code.

    StoP and I-JEPA save the same keys and use them differently, but create them in a different
    order: `mask_token` comes before `predictor_pos_embed` in I-JEPA and after it in StoP.
    """
    try:
        width = weights["predictor_embed.weight"].shape[0]
        names = list(weights)
        stop = names.index("mask_token") > names.index("predictor_pos_embed")
        if not width:
            raise ValueError("an empty tensor")
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{source}: not an I-JEPA predictor: {error}") from None
    positions: Positions
    try:
        if stop:
            sigma = (0.2 if encoder.width == SIZES["h"].width else 0.25) ** 2
            positions = StochasticPositions(encoder.side, width, sigma, bias="project")
        else:
            positions = Positions(encoder.side, width)
        depth = _depth(weights, "predictor_blocks.")
        return Predictor(positions, encoder.width, depth, encoder.heads)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def fill(module: nn.Module, weights: State, source: str) -> None:
    checkpoint.check_fit(weights, module.state_dict(), source)
    module.load_state_dict(weights)


def _depth(weights: State, prefix: str) -> int:
    blocks = {key.removeprefix(prefix).split(".")[0] for key in weights if key.startswith(prefix)}
    return len(blocks)
