"""Encoders and models from files: our checkpoints, and the released ones of StoP and I-JEPA.

A file is recognised by its keys, its architecture read off its shapes, and every key must be used
and every parameter filled: there is no such thing as a partly random encoder. Pickles are read with
``weights_only=True``, which executes nothing. Encoders of others are in `foreign`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stopmim import checkpoint, foreign
from stopmim.arch import SIZES
from stopmim.config import Config
from stopmim.errors import CheckpointError
from stopmim.foreign import Branch, State, block_count, encoder_like, fill
from stopmim.mim import MaskedImageModel, build
from stopmim.positions import Positions, StochasticPositions
from stopmim.predictor import Predictor
from stopmim.vit import Encoder, VisionTransformer

PARTS = ("encoder", "target_encoder", "predictor")  # of a released file


def load_encoder(path: str | Path, branch: Branch = "target", heads: int | None = None) -> Encoder:
    """The encoder in `path`, in evaluation mode.

    Args:
        path: a run directory, one of its checkpoints, or a file of StoP, I-JEPA, MAE, DINO, iBOT,
            data2vec, BEiT, VISSL or timm; a folder of Hugging Face; ``timm:NAME`` downloads.
        branch: "target" is the EMA encoder (the teacher), which the papers evaluate; "context" the
            trained one (the student). Of a file with one encoder it is that one.
        heads: attention heads, needed for a file whose width is not a known size.
    """
    if branch not in ("target", "context"):
        raise ValueError(f'branch must be "target" or "context", got {branch!r}')
    if str(path).startswith("timm:"):
        return foreign.load_timm(str(path).removeprefix("timm:"))
    path = existing(path)
    if path.is_dir() and (path / "config.json").is_file():
        return foreign.load_huggingface(path, heads).eval()
    tree = None if path.is_dir() else foreign.read_tree(path)
    if tree is not None and not is_released(tree):
        return foreign.load_tree(tree, branch, str(path), heads)
    model = (_load_ours(path) if tree is None else _load_released(path, tree, heads)).eval()
    return model.target_encoder if branch == "target" else model.encoder


def load_model(path: str | Path, heads: int | None = None) -> MaskedImageModel:
    """Encoder, target encoder and predictor in `path`, in evaluation mode."""
    path = existing(path)
    if path.is_dir():
        return _load_ours(path).eval()
    return _load_released(path, foreign.read_tree(path), heads).eval()


def existing(path: str | Path) -> Path:
    if not Path(path).exists():
        raise CheckpointError(f"{path}: no such file or directory")
    return Path(path)


def is_released(tree: Any) -> bool:
    """Whether `tree` is of StoP's or I-JEPA's code. One part tells: the others are then missed."""
    return isinstance(tree, Mapping) and any(name in tree for name in PARTS)


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


def _load_released(path: Path, tree: Any, heads: int | None) -> MaskedImageModel:
    """A ``.pth.tar`` of amirbar/StoP or facebookresearch/ijepa, read as `tree`."""
    parts = {}
    for name in PARTS:
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
        depth = block_count(weights, "predictor_blocks.")
        return Predictor(positions, encoder.width, depth, encoder.heads)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
