"""Encoders and models from files: the list of formats, and loading.

A file is recognised by its content, and its architecture by the shapes. Every key must be used and
every parameter filled: no encoder is partly random. Nothing in a file is executed.
"""

from pathlib import Path

import torch

from stopmim.base.console import is_first_rank, say
from stopmim.base.errors import CheckpointError
from stopmim.config.schema import Config
from stopmim.data.pixels import stats_of
from stopmim.method.encoder import ImageEncoder, VisionTransformer
from stopmim.method.model import MaskedImageModel
from stopmim.weights.filters import fitted
from stopmim.weights.format import Format, WeightFile
from stopmim.weights.formats.data2vec import Data2vec
from stopmim.weights.formats.huggingface import HuggingFace
from stopmim.weights.formats.mae import Mae
from stopmim.weights.formats.onnx import Onnx
from stopmim.weights.formats.plain_vit import PlainVit
from stopmim.weights.formats.run import OwnRun
from stopmim.weights.formats.stop_ijepa import StopIjepa
from stopmim.weights.formats.timm import Safetensors, Timm
from stopmim.weights.vit import Branch, Shape, first_keys, unwrapped

# The first that recognises a file reads it: names, then folders, then what is inside a file.
FORMATS: tuple[Format, ...] = (
    Timm(),
    HuggingFace(),
    OwnRun(),
    StopIjepa(),
    Mae(),
    Data2vec(),
    Safetensors(),
    PlainVit(),
    Onnx(),
)


def format_of(file: WeightFile) -> Format:
    """The format that recognises `file`."""
    for known in FORMATS:
        if known.recognises(file):
            return known
    keys = first_keys(unwrapped(file.tree))
    raise CheckpointError(f"{file}: no encoder in it that stopmim knows; its keys are {keys}")


def load_encoder(
    path: str | Path, branch: Branch = "target", heads: int | None = None
) -> ImageEncoder:
    """The encoder in `path`, in evaluation mode; its `transform` prepares pictures for it.

    Args:
        path: a run directory, one of its checkpoints, or a file of StoP, I-JEPA, MAE, DINO, iBOT,
            data2vec, BEiT, VISSL or timm; a folder of Hugging Face; ``timm:NAME`` downloads.
        branch: "target" is the EMA encoder (the teacher), which the papers evaluate; "context" the
            trained one (the student). A file with one encoder has only that one.
        heads: number of attention heads, if the width is not a standard size.
    """
    if branch not in ("target", "context"):
        raise ValueError(f'branch must be "target" or "context", got {branch!r}')
    file = WeightFile.at(path, heads)
    known = format_of(file)
    return known.seeing(file, known.encoder(file, branch))


def load_model(
    path: str | Path, heads: int | None = None, decoder_heads: int | None = None
) -> MaskedImageModel:
    """Encoders and predictor in `path`, in evaluation mode; MAE has no target encoder.

    `decoder_heads` is needed for a decoder of MAE that is not 512 wide.
    """
    file = WeightFile.at(path, heads, decoder_heads)
    known = format_of(file)
    model = known.model(file)
    for encoder in (model.encoder, model.branch()):
        known.seeing(file, encoder)
    return model


def apply_init(model: MaskedImageModel, config: Config, run: Path) -> MaskedImageModel:
    """The new `model`, with the weights of the encoder in ``config.init`` in its encoders, if any.

    Positions are taken too, resized if the images have another size, and stay fixed. Filters are
    adapted to the channels of the images, see filters.py. A run with checkpoints continues from
    them and no longer needs the file.
    """
    source = config.init
    if not source or any((run / "checkpoints").glob("step-*")):
        return model
    given = load_encoder(source)
    if not isinstance(given, VisionTransformer):
        raise CheckpointError(f"init: {source}: not a plain ViT with a table of positions")
    own, theirs = Shape.of(model.encoder), Shape.of(given)
    if theirs != own:
        advice = "no arch has this size"
        if theirs.arch:
            advice = f"set --arch {theirs.arch} --class-token {str(theirs.class_token).lower()}"
        raise CheckpointError(f"init: {source} is {theirs}; the config says {own}: {advice}")
    try:
        stats = getattr(given.transform, "stats", None)
        filters, how = fitted(given.patch_embed.proj.weight, stats, stats_of(config))
    except ValueError as error:
        raise CheckpointError(f"init: {source}: {error}") from None
    if how and is_first_rank():
        say(f"init: {source}: {how}")
    side, token = model.encoder.side, given.pos_embed[:, : given.prefix]
    state = given.state_dict() | {"pos_embed": torch.cat([token, given.positions(side, side)], 1)}
    state["patch_embed.proj.weight"] = filters
    for part in (model.encoder, model.branch()):
        part.load_state_dict(state)
    return model
