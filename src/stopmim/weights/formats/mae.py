"""The names MAE's code has for our model: its decoder is our predictor.

A file of it has the encoder under timm's names and the decoder beside it, in one flat dict. Its
table of positions has a row of zeros for the class token, which ours leaves out.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stopmim.base.errors import CheckpointError

# MAE to ours, by the first component of a key.
NAMES = {
    "decoder_embed": "predictor_embed",
    "decoder_blocks": "predictor_blocks",
    "decoder_norm": "predictor_norm",
    "decoder_pred": "predictor_proj",
    "decoder_pos_embed": "predictor_pos_embed",
    "mask_token": "mask_token",
}
TABLE = "predictor_pos_embed"
HEADS = {512: 16}  # of the decoder, by its width: the published ones are all the same


def decoder_in(tree: Any) -> dict[str, Any]:
    """The decoder in a file of MAE's code, under our names; empty if there is none.

    A name that is not known stays as it is, for whoever fills the predictor to complain of.
    """
    if isinstance(tree, Mapping) and isinstance(tree.get("model"), Mapping):
        tree = tree["model"]
    if not isinstance(tree, Mapping):
        return {}
    found = {}
    for name, value in tree.items():
        stem, dot, rest = str(name).removeprefix("module.").partition(".")
        if stem in NAMES or stem.startswith("decoder_"):
            found[NAMES.get(stem, stem) + dot + rest] = value
    return found if {"predictor_embed.weight", TABLE} <= found.keys() else {}


def heads_of(decoder: Mapping[str, Any]) -> int | None:
    """Of a published decoder; None for any other, since no file says it."""
    weight = decoder.get("predictor_embed.weight")
    return HEADS.get(len(weight)) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def without_class(decoder: Mapping[str, Any], prefix: int, source: str) -> dict[str, Tensor]:
    """`decoder` with a table of patches alone; `prefix` rows before them have to be zeros."""
    for key, value in decoder.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{source}: decoder: {key} is no tensor but {type(value).__name__}"
            )
    table = decoder[TABLE]
    if table.ndim != 3 or table[:, :prefix].any():
        raise CheckpointError(f"{source}: decoder: the class token has a place, unlike in MAE")
    return {**decoder, TABLE: table[:, prefix:]}


def to_mae(encoder: Mapping[str, Tensor], predictor: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both in one dict under MAE's names: the inverse of `decoder_in` and `without_class`."""
    theirs = {ours: name for name, ours in NAMES.items()}
    weights = dict(encoder)
    for key, value in predictor.items():
        stem, dot, rest = key.partition(".")
        if key == TABLE:
            value = torch.cat([torch.zeros_like(value[:, :1]), value], dim=1)
        weights[theirs[stem] + dot + rest] = value
    return weights
