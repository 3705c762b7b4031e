"""Encoders in the form others load: timm, Hugging Face, ONNX, I-JEPA's layout, safetensors.

An export is a folder with the weights and a README.md, written whole or not at all. None has a
pickle in it except I-JEPA's layout, which is one.

Shapes: B images, N patches, D width.
"""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stopmim._version import __version__
from stopmim.base.errors import CheckpointError, StorageError, UserError
from stopmim.base.random_keys import torch_generator
from stopmim.data.crops import MEAN, STD
from stopmim.method.encoder import VisionTransformer
from stopmim.method.model import MaskedImageModel, Pixels
from stopmim.method.positions import StochasticPositions
from stopmim.method.predictor import Predictor
from stopmim.weights import card
from stopmim.weights.foreign import AROUND, LAYER, Branch, State
from stopmim.weights.formats.mae import to_mae
from stopmim.weights.inspect import Identity, identify
from stopmim.weights.load import (
    ENCODER_TAG,
    PREDICTOR_TAG,
    Shape,
    encoder_tag,
    load_encoder,
)

Format = Literal["timm", "hf", "onnx", "ijepa", "mae", "safetensors"]

AGREE = 1e-4  # difference allowed between the features of an ONNX file and ours
OPSET = 18


def export(
    path: str | Path,
    to: Format,
    out: str | Path,
    *,
    branch: Branch = "target",
    heads: int | None = None,
) -> Path:
    """Writes the encoder in `path`, or for "ijepa" and "mae" the whole model, to the folder `out`.

    Args:
        path: anything `load_encoder` reads.
        to: timm, hf (a folder for ``from_pretrained``), onnx, ijepa, mae, or safetensors.
        branch: "target" is the EMA encoder, which the papers evaluate. I-JEPA's layout has both.
    """
    if to not in get_args(Format):
        raise ValueError(f"to must be one of {', '.join(get_args(Format))}, got {to!r}")
    if to == "ijepa" and branch != "target":
        raise UserError("--branch: I-JEPA's layout has both encoders; leave it out")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already; choose another --out")
    about = identify(path, heads)
    encoder = about.encoder
    if branch != "target":
        # Not from a run's newest checkpoint: the card is about the one that was identified.
        encoder = about.model.branch(branch) if about.model else load_encoder(path, branch, heads)
    if not isinstance(encoder, VisionTransformer):
        raise CheckpointError(f"{path}: an encoder of data2vec; only plain ViTs can be exported")
    temporary = out.with_name(f".{out.name}-{uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        match to:
            case "timm" | "safetensors":
                write_safetensors(encoder, temporary / "model.safetensors")
            case "hf":
                write_huggingface(encoder, temporary)
            case "onnx":
                write_onnx(encoder, temporary / "model.onnx")
            case "ijepa":
                write_ijepa(about, temporary / "model.pth.tar")
            case "mae":
                write_mae(about, temporary / "model.safetensors")
        text = card.card(about, encoder, to, branch)
        (temporary / "README.md").write_text(text, encoding="utf-8")
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors makes its files 0600
        os.replace(temporary, out)  # onto an empty folder, if it is there
    except OSError as error:
        raise StorageError(f"{out}: cannot write: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def write_safetensors(encoder: VisionTransformer, file: Path) -> None:
    """The weights under timm's names, which are I-JEPA's, MAE's and DINO's too."""
    tag = json.dumps(encoder_tag(encoder))
    words = {"format": "pt", "stopmim.version": __version__, ENCODER_TAG: tag}
    save_file(_weights(encoder), file, metadata=words)


# -------------------------------------------------------------------------------- Hugging Face


def write_huggingface(encoder: VisionTransformer, folder: Path) -> None:
    """What ``AutoModel`` and ``AutoImageProcessor.from_pretrained`` need, without transformers.

    The weights have the names of the files on the hub, which every version of it translates.
    """
    size = encoder.side * encoder.patch
    config = {
        "architectures": ["ViTModel" if encoder.prefix else "IJepaModel"],
        "model_type": "vit" if encoder.prefix else "ijepa",
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.blocks),
        "num_attention_heads": encoder.heads,
        "intermediate_size": Shape.of(encoder).hidden,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": encoder.norm.eps,  # 1e-12 if it were left out
        "image_size": size,
        "patch_size": encoder.patch,
        "num_channels": 3,
        "qkv_bias": True,
        "torch_dtype": "float32",
    }
    # Not ViT's own processor: it squeezes images into a square, and normalises with 0.5.
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(size * 256 / 224)},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    for name, tree in (("config", config), ("preprocessor_config", processor)):
        (folder / f"{name}.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    save_file(to_huggingface(_weights(encoder)), folder / "model.safetensors", {"format": "pt"})


def to_huggingface(weights: State) -> State:
    """The inverse of `foreign.from_huggingface`."""
    layer = {ours: theirs for theirs, ours in LAYER.items()}
    around = {ours: theirs for theirs, ours in AROUND.items()}
    found: State = {}
    for key, value in weights.items():
        if key in around:
            found[around[key]] = value
            continue
        stem, _, kind = key.rpartition(".")
        if stem in around:
            found[f"{around[stem]}.{kind}"] = value
            continue
        _, n, name = stem.split(".", 2)
        if name == "attn.qkv":
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                # A copy: safetensors refuses pieces of one tensor.
                found[f"encoder.layer.{n}.attention.attention.{part}.{kind}"] = piece.clone()
        else:
            found[f"encoder.layer.{n}.{layer[name]}.{kind}"] = value
    return found


# ---------------------------------------------------------------------------------------- ONNX


class _Both(nn.Module):
    """What a user of an ONNX file wants: one vector per image, and all tokens."""

    def __init__(self, encoder: VisionTransformer) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        encoder = self.encoder
        x = encoder.with_class(encoder.embed(images))
        for block in encoder.blocks:
            x = block(x)
        x = encoder.norm(x)
        tokens = x[:, encoder.prefix :]
        return (x[:, 0] if encoder.prefix else tokens.mean(dim=1)), tokens


def write_onnx(encoder: VisionTransformer, file: Path) -> None:
    """images (B, 3, S, S) to features (B, D) and tokens (B, N, D), for any B; checked."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - the exporter needs it
    except ImportError as error:
        raise UserError(f'export: {error}; pip install "stopmim[interop]"') from None
    size, generator = encoder.side * encoder.patch, torch_generator("onnx")
    images = [torch.randn(n, 3, size, size, generator=generator) for n in (2, 3)]
    wrapped = _Both(encoder).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch about its own exporter
        torch.onnx.export(
            wrapped,
            (images[0],),
            file,
            input_names=["images"],
            output_names=["features", "tokens"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        for batch in images:
            theirs = session.run(None, {"images": batch.numpy()})
            for found, want in zip(theirs, wrapped(batch), strict=True):
                worst = float((torch.from_numpy(found) - want).abs().max())
                if not worst <= AGREE * max(1.0, float(want.abs().max())):
                    raise CheckpointError(f"{file}: its features are off by {worst:.1g}")


# ---------------------------------------------------------------------------- I-JEPA's layout


def write_ijepa(about: Identity, file: Path) -> None:
    """Encoder, target encoder and predictor as I-JEPA's and StoP's code save them.

    The only pickle this package writes, for that code reads nothing else; ``weights_only=True``
    reads it too. It has no state of an optimizer: it is to be used, not resumed.
    """
    model = about.model
    if model is None:
        raise CheckpointError(f"{about.path}: no predictor in it, which I-JEPA's layout has")
    if problem := _not_in_ijepa(model):
        raise CheckpointError(f"{about.path}: I-JEPA's layout has no place for {problem}")
    parts = {
        "encoder": _weights(model.encoder),
        "predictor": _in_released_order(model.predictor),
        "target_encoder": _weights(model.branch()),
    }
    # DistributedDataParallel's prefix: their code adds it, and timm reads nothing without it.
    tree: dict[str, Any] = {
        name: {f"module.{key}": value for key, value in part.items()}
        for name, part in parts.items()
    }
    tree |= {"opt": None, "scaler": None, "epoch": about.epoch or 0}
    tree |= {ENCODER_TAG: encoder_tag(model.encoder), PREDICTOR_TAG: model.predictor.tag()}
    torch.save(tree, file)


def _not_in_ijepa(model: MaskedImageModel) -> str | None:
    if isinstance(model.target, Pixels):
        return "a predictor of pixels: use --to mae"
    if not model.target.follows:
        return "a model without target encoder"
    if model.encoder.prefix:
        return "a class token"
    return model.predictor.positions.not_exportable or None


def write_mae(about: Identity, file: Path) -> None:
    """Encoder and decoder under the names of MAE's code, with what these leave out as a tag."""
    model = about.model
    if model is None or not isinstance(model.target, Pixels):
        raise CheckpointError(
            f"{about.path}: no predictor of pixels in it, which MAE's layout has; "
            f"choose another --to"
        )
    if problem := model.predictor.positions.not_exportable:
        raise CheckpointError(f"{about.path}: MAE's layout has no place for {problem}")
    if not model.encoder.prefix:
        raise CheckpointError(f"{about.path}: no class token in it, which MAE's layout has")
    tag = model.predictor.tag() | {"norm_pixels": model.target.normed}
    words = {"format": "pt", "stopmim.version": __version__}
    words |= {ENCODER_TAG: json.dumps(encoder_tag(model.encoder)), PREDICTOR_TAG: json.dumps(tag)}
    weights = to_mae(_weights(model.encoder), _weights(model.predictor))
    save_file(weights, file, metadata=words)


def _in_released_order(predictor: Predictor) -> State:
    """Two keys in the order that tells I-JEPA (mask token first) from StoP in such a file."""
    weights = _weights(predictor)
    names = ["mask_token", "predictor_pos_embed"]
    if isinstance(predictor.positions, StochasticPositions):
        names.reverse()
    return {name: weights.pop(name) for name in names} | weights


def _weights(module: nn.Module) -> State:
    return {key: value.detach().cpu().contiguous() for key, value in module.state_dict().items()}
