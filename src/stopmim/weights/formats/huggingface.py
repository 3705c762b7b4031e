"""Folders of Hugging Face transformers: I-JEPA, ViT and ViT-MAE models.

Weights have the names used in files on the hub, which every version of transformers translates.
"""

import json
import re
from collections.abc import Mapping
from os.path import exists
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stopmim.base.errors import CheckpointError
from stopmim.base.sandbox import metadata, read_json, read_tree
from stopmim.data.pixels import PixelStats, from_tag
from stopmim.data.transform import Transform
from stopmim.method.encoder import Encoder, VisionTransformer
from stopmim.weights import vit
from stopmim.weights.format import Contents, Format, WeightFile

KINDS = ("ijepa", "vit", "vit_mae")
FILES = ("model.safetensors", "pytorch_model.bin")
NOT_ENCODER = ("decoder.", "pooler.", "classifier.")

# timm to Hugging Face; names of a layer come after "blocks.N." and "encoder.layer.N.".
TOKENS = {"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings"}
AROUND = {"patch_embed.proj": "embeddings.patch_embeddings.projection", "norm": "layernorm"}
LAYER = {
    "norm1": ("layernorm_before",),
    "attn.qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "attn.proj": ("attention.output.dense",),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("intermediate.dense",),
    "mlp.fc2": ("output.dense",),
}
# Models of transformers 5 have other names in memory; files have these only on request.
LAYER_IN_MEMORY = re.compile(r"^layers\.(\d+)\.(.+)\.(weight|bias)$")
IN_MEMORY = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


class HuggingFace(Format):
    name = "Hugging Face"
    word = "hf"
    used_by = "Hugging Face transformers"
    library = "transformers"

    def recognises(self, file: WeightFile) -> bool:
        return exists(file.path / "config.json")  # not an export for timm: see WeightFile.at

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        folder, config = file.path, read_json(file.path / "config.json")
        with vit.refusing(f"{folder / 'config.json'}: unreadable"):
            kind, act = config["model_type"], config.get("hidden_act", "gelu")
            eps = config.get("layer_norm_eps", 1e-12)
            own, eps = vit.heads_and_eps(config["num_attention_heads"], eps)
        if kind not in KINDS or act != "gelu":
            known = f"known are {', '.join(KINDS)} with gelu"
            raise CheckpointError(f"{folder}: a {kind} model with {act}; {known}")
        files = [folder / name for name in FILES if exists(folder / name)]
        if not files:
            raise CheckpointError(f"{folder / FILES[0]}: no such file")
        weights = from_huggingface(read_tree(files[0]), str(folder))
        return vit.read(weights, str(folder), file.heads or own, eps)

    def stats(self, file: WeightFile) -> PixelStats | None:
        """Statistics from the header of the weights, where `write` puts the tag."""
        weights = file.path / FILES[0]
        tag = metadata(weights).get(vit.PIXELS_TAG) if weights.is_file() else None
        return None if tag is None else from_tag(json.loads(tag))

    def project(self, file: WeightFile, encoder: Encoder) -> str:
        return f"{self.name}, {read_json(file.path / 'config.json')['model_type']}"

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        """Writes what ``AutoModel`` and ``AutoImageProcessor`` need, without transformers."""
        config: dict[str, Any] = {
            "architectures": ["ViTModel" if encoder.prefix else "IJepaModel"],
            "model_type": "vit" if encoder.prefix else "ijepa",
            "hidden_size": encoder.width,
            "num_hidden_layers": len(encoder.blocks),
            "num_attention_heads": encoder.heads,
            "intermediate_size": vit.Shape.of(encoder).hidden,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "layer_norm_eps": encoder.norm.eps,  # the default would be 1e-12
            "image_size": encoder.side * encoder.patch,
            "patch_size": encoder.patch,
            "num_channels": encoder.channels,
            "qkv_bias": True,
            "torch_dtype": "float32",
        }
        trees = {"config": config}
        if contents.stats is not None and contents.stats.is_plain:
            trees["preprocessor_config"] = _processor(encoder, contents.stats)
        for name, tree in trees.items():
            text = json.dumps(tree, indent=1) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        tags = {name: json.dumps(tag) for name, tag in vit.pixels_tag(contents.stats).items()}
        weights = to_huggingface(vit.weights_of(encoder))
        save_file(weights, folder / FILES[0], {"format": "pt"} | tags)


def _processor(encoder: VisionTransformer, stats: PixelStats) -> dict[str, Any]:
    """Settings of an image processor for pictures; transformers has none for other images."""
    size, (mean, std) = encoder.side * encoder.patch, stats.unit()
    # Not ViT's own processor: it squeezes images into a square and normalises with 0.5.
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": Transform(size).resize},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def _names(depth: int) -> dict[str, list[str]]:
    """Maps timm's names to those of Hugging Face, which has three matrices for `qkv`."""
    found = {ours: [theirs] for ours, theirs in TOKENS.items()}
    for kind in ("weight", "bias"):
        found |= {f"{ours}.{kind}": [f"{theirs}.{kind}"] for ours, theirs in AROUND.items()}
        for n in range(depth):
            for ours, parts in LAYER.items():
                theirs = [f"encoder.layer.{n}.{part}.{kind}" for part in parts]
                found[f"blocks.{n}.{ours}.{kind}"] = theirs
    return found


def from_huggingface(tree: Any, source: str) -> vit.State:
    """The weights under timm's names; unknown ones keep theirs, and `fill` refuses them."""
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{source}: no weights in it; its keys are {vit.first_keys(tree)}")
    tree = {re.sub(r"^(ijepa|vit)\.", "", str(key)): value for key, value in tree.items()}
    tree = {LAYER_IN_MEMORY.sub(_name_in_files, key): value for key, value in tree.items()}
    left = vit.tensors({k: v for k, v in tree.items() if not k.startswith(NOT_ENCODER)}, source)
    weights = {}
    with vit.refusing(source):
        depth = vit.block_count(left, "encoder.layer.")
    for ours, theirs in _names(depth).items():
        parts = [left.pop(name) for name in theirs if name in left]
        if parts and len(parts) < len(theirs):
            missing = next(name for name in theirs if name not in tree)
            raise CheckpointError(f"{source}: does not fit this model: missing {missing}")
        with vit.refusing(f"{source}: {theirs[0]}"):
            if parts:
                weights[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return weights | left


def to_huggingface(weights: vit.State) -> vit.State:
    """The inverse of `from_huggingface`."""
    found: vit.State = {}
    for ours, theirs in _names(vit.block_count(weights, "blocks.")).items():
        if ours in weights:  # copies: safetensors refuses pieces of one tensor
            pieces = weights[ours].chunk(len(theirs))
            found |= {name: x.clone() for name, x in zip(theirs, pieces, strict=True)}
    return found


def _name_in_files(layer: re.Match[str]) -> str:
    return f"encoder.layer.{layer[1]}.{IN_MEMORY.get(layer[2], layer[2])}.{layer[3]}"
