"""Encoders and models from files: our checkpoints, and the released ones of StoP and I-JEPA.

A file is recognised by its keys, its architecture read off its shapes, and every key must be used
and every parameter filled: there is no such thing as a partly random encoder. Pickles are read with
``weights_only=True``, which executes nothing. Encoders of others are in `foreign`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stopmim.base.errors import CheckpointError
from stopmim.base.sandbox import metadata, one_line, read_tree
from stopmim.config.architectures import SIZES
from stopmim.config.schema import Config
from stopmim.method.build import from_tag
from stopmim.method.encoder import EPS, Encoder, VisionTransformer
from stopmim.method.model import MaskedImageModel, Pixels
from stopmim.method.positions import Positions, StochasticPositions
from stopmim.method.predictor import Predictor
from stopmim.runs import checkpoint
from stopmim.runs.checkpoint import fill
from stopmim.weights import foreign
from stopmim.weights.foreign import Branch, State, block_count, check_positions, encoder_like
from stopmim.weights.formats import mae

PARTS = ("encoder", "target_encoder", "predictor")  # of a released file

# What we write into exported files beside the weights, which cannot tell it.
ENCODER_TAG, PREDICTOR_TAG = "stopmim.encoder", "stopmim.predictor"
MAE_TAG = {  # what MAE's own files leave out
    "positions": "sincos",
    "bias": "mask_token",
    "tokens": "masked",
    "norm_pixels": True,
}


class Shape(NamedTuple):
    """What two encoders must have in common to have weights in common."""

    patch: int
    width: int
    depth: int
    heads: int
    hidden: int
    class_token: bool

    @classmethod
    def of(cls, encoder: VisionTransformer) -> "Shape":
        first: Any = encoder.blocks[0]
        hidden, depth, heads = first.mlp.fc1.out_features, len(encoder.blocks), encoder.heads
        return cls(encoder.patch, encoder.width, depth, heads, hidden, bool(encoder.prefix))

    @property
    def arch(self) -> str | None:
        """Its name, if it is one of the known sizes."""
        own = (self.width, self.depth, self.heads, self.hidden)
        for name, size in SIZES.items():
            if own == (size.width, size.depth, size.heads, round(size.width * size.mlp_ratio)):
                return f"vit_{name}{self.patch}"
        return None

    def __str__(self) -> str:
        name = f"{self.arch}, " if self.arch else ""
        token = "with" if self.class_token else "without"
        return (
            f"{name}patch {self.patch}, width {self.width}, depth {self.depth}, "
            f"{self.heads} heads, MLP {self.hidden}, {token} class token"
        )


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
    path = weights_in(existing(path))
    if path.is_dir() and (path / "config.json").is_file():
        return foreign.load_huggingface(path, heads).eval()
    if not path.is_dir():
        return encoder_in(read_tree(path), path, branch, heads)
    return checkpoint.load_model(path).branch(branch)


def encoder_in(tree: Any, path: Path, branch: Branch, heads: int | None) -> Encoder:
    """The encoder in `tree`, which was read from the file `path`."""
    if is_released(tree):
        return model_in(tree, path, heads).branch(branch)
    own, eps = told(_tag(path, ENCODER_TAG), path)
    encoder = foreign.load_tree(tree, branch, str(path), heads or own)
    if isinstance(encoder, VisionTransformer):
        foreign.set_eps(encoder, eps)
    return encoder


def load_model(
    path: str | Path, heads: int | None = None, decoder_heads: int | None = None
) -> MaskedImageModel:
    """Encoder, target encoder and predictor in `path`, in evaluation mode; MAE has no target one.

    `decoder_heads` is needed for a decoder of MAE that is not 512 wide.
    """
    path = weights_in(existing(path))
    if path.is_dir():
        return checkpoint.load_model(path)
    tree = read_tree(path)
    if not is_released(tree) and mae.decoder_in(tree):
        return mae_in(tree, path, heads, decoder_heads)
    return model_in(tree, path, heads)


def weights_in(path: Path) -> Path:
    """The file of weights in a folder of `stopmim export`; of others, the path as it is."""
    file, others = path / "model.safetensors", ("run", "manifest", "state", "config")
    is_export = file.is_file() and not any((path / f"{name}.json").exists() for name in others)
    return file if is_export else path


def existing(path: str | Path) -> Path:
    if not Path(path).exists():
        raise CheckpointError(f"{path}: no such file or folder; give a run or a file of weights")
    return Path(path)


def is_released(tree: Any) -> bool:
    """Whether `tree` is of StoP's or I-JEPA's code. One part tells: the others are then missed."""
    return isinstance(tree, Mapping) and any(name in tree for name in PARTS)


def model_in(tree: Any, path: Path, heads: int | None) -> MaskedImageModel:
    """The model in `tree`, read from a ``.pth.tar`` of StoP's or I-JEPA's code, or of `export`."""
    parts = {}
    for name in PARTS:
        if not isinstance(tree, Mapping) or not isinstance(tree.get(name), Mapping):
            keys = foreign.keys_of(tree)
            raise CheckpointError(f"{path}: no {name} in it; its top-level keys are {keys}")
        # "module." is DistributedDataParallel's; StoP without a launcher has none.
        parts[name] = {str(k).removeprefix("module."): v for k, v in tree[name].items()}
        for key, value in parts[name].items():
            if not isinstance(value, Tensor):
                what = type(value).__name__
                raise CheckpointError(f"{path}: {name}: {key} is no tensor but {what}")
    own, eps = told(tree.get(ENCODER_TAG), path)
    encoder = encoder_like(parts["encoder"], str(path), heads or own)
    with torch.device("meta"):
        predictor = predictor_like(parts["predictor"], encoder, str(path), tree.get(PREDICTOR_TAG))
        model = MaskedImageModel(encoder, predictor)
    for name, module in model.named_children():
        fill(module, parts[name], f"{path}: {name}")
    for name in ("encoder", "target_encoder"):  # a run of ours may have begun with learned ones
        fixed = ENCODER_TAG not in tree
        check_positions(parts[name]["pos_embed"], f"{path}: {name}", fixed=fixed)
    check_positions(parts["predictor"]["predictor_pos_embed"], f"{path}: predictor", fixed=True)
    for part in (model.encoder, model.branch()):
        foreign.set_eps(part, eps)
    return model.eval()


def mae_in(
    tree: Any, path: Path, heads: int | None, decoder_heads: int | None = None
) -> MaskedImageModel:
    """The model in `tree`, read from a file of MAE's code with its decoder, or of `export`.

    No file of theirs says whether pixels were normed: most were, and so it is taken.
    """
    own, eps = told(_tag(path, ENCODER_TAG), path)
    weights, _ = foreign.unwrap(tree, "target", str(path))
    encoder = encoder_like(weights, str(path), heads or own, class_token="cls_token" in weights)
    decoder = mae.without_class(mae.decoder_in(tree), encoder.prefix, str(path))
    tag = _tag(path, PREDICTOR_TAG)
    exported = tag is not None  # a run of ours may have begun with learned positions
    try:
        if tag is None:
            tag = MAE_TAG | {"heads": decoder_heads or mae.heads_of(decoder)}
        if tag["heads"] is None:
            raise ValueError("its decoder is not 512 wide as all of MAE's are; say decoder_heads=")
        if int(tag["heads"]) < 1:
            raise ValueError(f"a decoder of {tag['heads']} heads")
        with torch.device("meta"):
            width = decoder["predictor_embed.weight"].shape[0]
            depth = block_count(decoder, "predictor_blocks.")
            predictor = from_tag(tag, encoder, width, depth, outputs=3 * encoder.patch**2)
            model = MaskedImageModel(encoder, predictor, Pixels(bool(tag["norm_pixels"])))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None
    fill(model.encoder, weights, f"{path}: encoder")
    fill(model.predictor, decoder, f"{path}: decoder")
    check_positions(model.encoder.pos_embed, f"{path}: encoder", fixed=not exported)
    check_positions(decoder[mae.TABLE], f"{path}: decoder", fixed=True)
    foreign.set_eps(model.encoder, eps)
    return model.eval()


def told(tag: Any, source: Path) -> tuple[int | None, float]:
    """Heads and epsilon of norms, from what `export` noted; None and 1e-6 without it."""
    if tag is None:
        return None, EPS
    try:
        heads, eps = int(tag["heads"]), float(tag["eps"])
        if heads < 1 or not 0 <= eps < 1:
            raise ValueError(f"{heads} heads, epsilon {eps}")
        return heads, eps
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {ENCODER_TAG} is none of ours: {error}") from None


def _tag(source: Path, name: str) -> Any:
    """What `export` noted as `name` in the header of a .safetensors file; None without it."""
    text = metadata(source).get(name)
    try:
        return text and json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: {name} is none of ours: {error}") from None


def predictor_like(
    weights: State, encoder: VisionTransformer, source: str, tag: Any = None
) -> Predictor:
    """A predictor of the architecture and variant of `weights`, from released code or `export`.

    StoP and I-JEPA save the same keys and use them differently, but create them in a different
    order: `mask_token` comes before `predictor_pos_embed` in I-JEPA and after it in StoP. Files of
    ours say it in words, as `tag`.
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
        if tag is not None:
            return from_tag(tag, encoder, width, block_count(weights, "predictor_blocks."))
        if stop:
            sigma = (0.2 if encoder.width == SIZES["h"].width else 0.25) ** 2
            positions = StochasticPositions(encoder.side, width, sigma, bias="project")
        else:
            positions = Positions(encoder.side, width)
        depth = block_count(weights, "predictor_blocks.")
        return Predictor(positions, encoder.width, depth, encoder.heads)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: {one_line(error)}") from None


def encoder_tag(encoder: VisionTransformer) -> dict[str, int | float]:
    """What the weights of an encoder do not tell; `told` reads it."""
    return {"heads": encoder.heads, "eps": encoder.norm.eps}


# ---------------------------------------------------------------------- where a run begins


def start(model: MaskedImageModel, config: Config, run: Path) -> MaskedImageModel:
    """The new `model` as the run begins with it: with the encoder of ``config.init``, if any.

    A run that has checkpoints goes on from them, and does not need the file any more.
    """
    if config.init and not any((run / "checkpoints").glob("step-*")):
        start_from(model, config.init)
    return model


def start_from(model: MaskedImageModel, source: str) -> None:
    """Gives the encoders of `model` the weights of the encoder in `source`.

    Its positions come along, resized if the images have another size, and stay fixed.
    """
    given = load_encoder(source)
    own = Shape.of(model.encoder)
    if not isinstance(given, VisionTransformer):
        raise CheckpointError(
            f"init: {source}: an encoder of data2vec, which has no plain positions"
        )
    theirs = Shape.of(given)
    if theirs != own:
        arch = f"--arch {theirs.arch} " if theirs.arch else ""
        token = f"--class-token {str(theirs.class_token).lower()}"
        advice = f"set {arch}{token}" if theirs.arch else "no arch has this size"
        raise CheckpointError(f"init: {source} is {theirs}; the config says {own}: {advice}")
    state = given.state_dict()
    side = model.encoder.side
    state["pos_embed"] = torch.cat(
        [given.pos_embed[:, : given.prefix], given.positions(side, side)], 1
    )
    for part in (model.encoder, model.branch()):
        part.load_state_dict(state)
