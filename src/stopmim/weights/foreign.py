"""Other people's encoders, made ours: the files of MAE, DINO, iBOT, VISSL, timm and Hugging Face.

They are one network under one set of names, timm's, and differ in how it is wrapped, in what lies
beside it, and in what no shape can tell: heads and the epsilon of norms. (data2vec and BEiT are
another one: `data2vec`.) A file is recognised by its keys. Every key is used or known to belong to
something else, every parameter is filled, and nothing is guessed: whatever is not understood is
refused in one line.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stopmim.base.errors import CheckpointError, UserError
from stopmim.base.random_keys import torch_generator
from stopmim.base.sandbox import one_line, read_json, read_tree
from stopmim.config.architectures import SIZES
from stopmim.method.encoder import Encoder, VisionTransformer
from stopmim.method.positions import sincos_2d
from stopmim.runs.checkpoint import fill
from stopmim.weights.formats.data2vec import CLASS, RelativeTransformer

Branch = Literal["target", "context"]
State = dict[str, Tensor]

# Where the weights lie in a file, by the first key of the way there; the branches of DINO and iBOT
# are teacher and student.
TRUNK = ("classy_state_dict", "base_model", "model", "trunk")  # VISSL
BRANCHES = {"target": "teacher", "context": "student"}
CONTAINERS = ("model", "state_dict")  # MAE, timm's training script; iBOT's checkpoint_teacher.pth

# DistributedDataParallel, then the multi-crop wrapper of DINO and iBOT, or a model around it.
WRAPPERS = re.compile(r"^(module\.)?(backbone\.|encoder\.)?")

# What is not the encoder: decoders, heads, and tokens in the place of hidden patches.
BESIDE = ("decoder_", "head.", "lm_head.", "mask_token", "masked_embed")
DISTANCES, INDEX = (f"rel_pos_bias.relative_position_{name}" for name in ("bias_table", "index"))
BESIDE_HF = ("decoder.", "pooler.", "classifier.")

# Hugging Face to timm, as its files have them; names of a layer come after "encoder.layer.N.".
LAYER = {
    "layernorm_before": "norm1",
    "attention.output.dense": "attn.proj",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
AROUND = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
}
_QKV = "encoder.layer.{}.attention.attention.{}.{}"
# In memory, models of transformers 5 have other names; files have these only on request.
_RENAMED = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
HF_FILES = ("model.safetensors", "pytorch_model.bin")
HF_KINDS = ("ijepa", "vit", "vit_mae")

ROUNDING = 0.01  # of a table of positions kept in half precision
AGREE = 1e-4  # relative difference allowed between the features of a timm model and of ours


def load_tree(tree: Any, branch: Branch, source: str, heads: int | None) -> Encoder:
    """The encoder in `tree`, which was read from the file `source`, in evaluation mode."""
    weights, fixed = unwrap(tree, branch, source)
    encoder: VisionTransformer | RelativeTransformer
    if DISTANCES in weights:
        weights.pop(INDEX, None)  # it follows from the size of the table
        encoder = relative_like(weights, source, heads)
    else:
        encoder = encoder_like(weights, source, heads, class_token="cls_token" in weights)
    fill(encoder, weights, source)
    if isinstance(encoder, VisionTransformer):
        check_positions(encoder.pos_embed, source, fixed=fixed)
        encoder.start = "mae" if fixed else "jepa"
    return encoder.eval()


def unwrap(tree: Any, branch: Branch, source: str) -> tuple[State, bool]:
    """The weights of the encoder in `tree`, under timm's names; whether its positions are fixed.

    They are if a decoder of MAE lies beside it. An encoder alone does not tell where it comes from.
    """
    where = "top-level"
    for names in (TRUNK, (BRANCHES[branch],), *((name,) for name in CONTAINERS)):
        if isinstance(tree, Mapping) and isinstance(tree.get(names[0]), Mapping):
            for name in names:
                if not isinstance(tree, Mapping) or name not in tree:
                    raise CheckpointError(f"{source}: no {'.'.join(names)} in it")
                tree, where = tree[name], name
    if not isinstance(tree, Mapping) or not any("patch_embed.proj" in str(key) for key in tree):
        raise CheckpointError(f"{source}: no encoder in it; its {where} keys are {keys_of(tree)}")
    weights = {}
    for name, value in tree.items():
        key = WRAPPERS.sub("", str(name))
        if key.startswith(BESIDE):
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{source}: {key} is no tensor but {type(value).__name__}")
        if key in weights:
            raise CheckpointError(f"{source}: {key} is in it twice, as {name} and without a prefix")
        weights[key] = value
    return weights, any("decoder_pos_embed" in str(name) for name in tree)


def keys_of(tree: Any) -> str:
    """The first keys of `tree`, for a message."""
    return (
        ", ".join(str(key)[:60] for key in list(tree)[:8]) if isinstance(tree, Mapping) else "none"
    )


def encoder_like(
    weights: State, source: str, heads: int | None, *, class_token: bool = False
) -> VisionTransformer:
    """An encoder of the architecture the shapes of `weights` tell."""
    try:
        width, _, patch, _ = weights["patch_embed.proj.weight"].shape
        patches = weights["pos_embed"].shape[1] - class_token
        hidden = weights["blocks.0.mlp.fc1.weight"].shape[0]
        side = math.isqrt(patches)
        if not min(width, patch, side, hidden):
            raise ValueError("an empty tensor")
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{source}: not a plain ViT: {error}") from None
    if side * side != patches:
        raise CheckpointError(f"{source}: its {patches} positions are no square")
    known = {size.width: size.heads for size in SIZES.values()}
    if heads is None and width not in known:
        raise CheckpointError(f"{source}: width {width} is no known size; say heads=...")
    if heads is not None and heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    depth, heads = block_count(weights, "blocks."), heads or known[width]
    try:
        with torch.device("meta"):  # without memory, until it is known to fit: see `fill`
            return VisionTransformer(
                side * patch, patch, width, depth, heads, hidden / width, class_token
            )
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def relative_like(weights: State, source: str, heads: int | None) -> RelativeTransformer:
    """The same for data2vec and BEiT, whose table of distances tells the heads too."""
    try:
        width, _, patch, _ = weights["patch_embed.proj.weight"].shape
        distances, own = weights[DISTANCES].shape
        hidden = weights["blocks.0.mlp.fc1.weight"].shape[0]
        side = (math.isqrt(max(0, distances - CLASS)) + 1) // 2
        if (2 * side - 1) ** 2 + CLASS != distances:
            raise ValueError(f"its table of {distances} distances is of no square")
        if heads not in (None, own):
            raise ValueError(f"it has {own} heads, not {heads}")
        depth = block_count(weights, "blocks.")
        with torch.device("meta"):
            return RelativeTransformer(side, patch, width, depth, own, hidden)
    except (KeyError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{source}: not an encoder of data2vec: {error}") from None


def block_count(weights: State, prefix: str) -> int:
    blocks = {key.removeprefix(prefix).split(".")[0] for key in weights if key.startswith(prefix)}
    return len(blocks)


def check_positions(table: Tensor, source: str, *, fixed: bool) -> None:
    """Refuses a table (1, N or 1 + N, P) with rows and columns swapped or, if `fixed`, any other
    than the sine-cosine table that MAE, I-JEPA and StoP never train.

    (Hugging Face and timm do train it when they fine-tune.)
    """
    side, width = math.isqrt(table.shape[1]), table.shape[2]
    if width % 4:
        return  # there is no such table; a file that should have it did not fit
    right = sincos_2d(side, width)
    swapped = right.view(side, side, width).transpose(0, 1).flatten(0, 1)
    found = table[0, -len(right) :].float()
    is_right, is_swapped = (
        torch.allclose(found, other, atol=ROUNDING, rtol=0) for other in (right, swapped)
    )
    if is_right or not (is_swapped or fixed):
        return
    what = "have rows and columns swapped" if is_swapped else "are not its project's fixed table"
    raise CheckpointError(f"{source}: its positions {what} (sine-cosine of {side}x{side})")


def set_eps(encoder: VisionTransformer, eps: float) -> None:
    for module in encoder.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


# -------------------------------------------------------------------------------- Hugging Face


def load_huggingface(folder: Path, heads: int | None) -> VisionTransformer:
    """The encoder of a folder that `save_pretrained` made of an I-JEPA, ViT or ViT-MAE model."""
    source, config = str(folder), read_json(folder / "config.json")
    try:
        kind, act = config["model_type"], config.get("hidden_act", "gelu")
        own, eps = int(config["num_attention_heads"]), float(config.get("layer_norm_eps", 1e-12))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: unreadable: {error}") from None
    if kind not in HF_KINDS or act != "gelu":
        raise CheckpointError(
            f"{source}: a {kind} model with {act}; known are {', '.join(HF_KINDS)} with gelu"
        )
    files = [folder / name for name in HF_FILES if (folder / name).is_file()]
    if not files:
        raise CheckpointError(f"{folder / HF_FILES[0]}: no such file")
    weights = from_huggingface(read_tree(files[0]), source)
    encoder = encoder_like(weights, source, heads or own, class_token="cls_token" in weights)
    fill(encoder, weights, source)
    set_eps(encoder, eps)
    check_positions(encoder.pos_embed, source, fixed=False)
    return encoder


def from_huggingface(tree: Any, source: str) -> State:
    """The weights under timm's names; queries, keys and values become one matrix, in this order."""
    if not isinstance(tree, Mapping) or not all(isinstance(v, Tensor) for v in tree.values()):
        raise CheckpointError(f"{source}: no weights in it; its keys are {keys_of(tree)}")
    tree = {re.sub(r"^(ijepa|vit)\.", "", str(key)): value for key, value in tree.items()}
    tree = {_in_files(key): value for key, value in tree.items()}
    tree = {key: value for key, value in tree.items() if not key.startswith(BESIDE_HF)}
    weights = {}
    for n in range(block_count(tree, "encoder.layer.")):
        for kind in ("weight", "bias"):
            names = [_QKV.format(n, part, kind) for part in ("query", "key", "value")]
            missing = [name for name in names if name not in tree]
            if missing:
                raise CheckpointError(f"{source}: does not fit this model: missing {missing[0]}")
            weights[f"blocks.{n}.attn.qkv.{kind}"] = torch.cat([tree.pop(name) for name in names])
    for name, value in tree.items():
        layer = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
        stem, _, kind = name.rpartition(".")
        if layer and layer[2] in LAYER:
            weights[f"blocks.{layer[1]}.{LAYER[layer[2]]}.{layer[3]}"] = value
        elif name in AROUND:
            weights[AROUND[name]] = value
        elif stem in AROUND:
            weights[f"{AROUND[stem]}.{kind}"] = value
        else:
            weights[name] = value  # unknown: `fill` names it
    return weights


def _in_files(key: str) -> str:
    """The name in files of what models of transformers 5 call `key`."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", key)
    if layer is None:
        return key
    return f"encoder.layer.{layer[1]}.{_RENAMED.get(layer[2], layer[2])}.{layer[3]}"


# ---------------------------------------------------------------------------------------- timm


def load_timm(name: str) -> VisionTransformer:
    """The model that timm calls `name`, with its published weights, which timm downloads."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        reason = f"timm cannot be imported ({one_line(error)})"
        raise UserError(f'timm:{name}: {reason}; pip install "stopmim[interop]"') from None
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # unknown names, no network, no such weights: all kinds of types
        raise CheckpointError(f"timm:{name}: {one_line(error)}") from None
    return from_timm(model, f"timm:{name}")


def from_timm(model: nn.Module, source: str = "timm") -> VisionTransformer:
    """Our encoder with the weights of a plain ViT of timm; its features prove that it is the same.

    Heads and the epsilon of norms are taken from the model, since its weights cannot tell them:
    timm has a B/16 with 16 heads.
    """
    inner: Any = model
    try:
        heads, eps = int(inner.blocks[0].attn.num_heads), float(inner.norm.eps)
    except (AttributeError, TypeError, IndexError) as error:
        raise CheckpointError(f"{source}: not a plain ViT: {one_line(error)}") from None
    weights, _ = unwrap(inner.state_dict(), "target", source)
    encoder = encoder_like(weights, source, heads, class_token="cls_token" in weights).eval()
    fill(encoder, weights, source)
    set_eps(encoder, eps)
    edge, training = encoder.side * encoder.patch, model.training
    image = torch.randn(1, 3, edge, edge, generator=torch_generator("timm"))
    with torch.inference_mode():
        theirs, ours = inner.eval().forward_features(image)[:, encoder.prefix :], encoder(image)
    model.train(training)
    if not (theirs - ours).norm() <= AGREE * theirs.norm():
        raise CheckpointError(f"{source}: the same weights in a plain ViT give other features")
    return encoder
