"""The ``.pth.tar`` of I-JEPA's and StoP's code: encoder, target encoder and predictor.

Both save the same predictor keys and use them differently, but create them in a different order:
`mask_token` comes before `predictor_pos_embed` in I-JEPA and after it in StoP. Our exports say in a
tag which predictor it is, and the tag decides.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stopmim.base.errors import CheckpointError
from stopmim.config.architectures import SIZES
from stopmim.method.encoder import Encoder, VisionTransformer
from stopmim.method.model import MaskedImageModel, Pixels
from stopmim.method.positions import StochasticPositions
from stopmim.runs.checkpoint import fill
from stopmim.weights import vit
from stopmim.weights.format import Contents, Format, WeightFile

PARTS = ("encoder", "target_encoder", "predictor")


class StopIjepa(Format):
    name = "StoP or I-JEPA"
    word = "ijepa"
    used_by = "the code of I-JEPA and StoP"
    whole_model = True

    def recognises(self, file: WeightFile) -> bool:
        # Any part suffices: `model` reports the missing ones.
        return isinstance(file.tree, Mapping) and any(name in file.tree for name in PARTS)

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        return self.model(file).branch(branch)

    def model(self, file: WeightFile) -> MaskedImageModel:
        parts = {name: _part(file, name) for name in PARTS}
        heads, eps = file.heads_and_eps()
        encoder = vit.encoder_like(parts["encoder"], str(file), heads)
        tag = file.tag(vit.PREDICTOR_TAG)
        if tag is None:
            tag = _released_tag(parts["predictor"], encoder, str(file))
        predictor = vit.predictor_like(parts["predictor"], encoder, str(file), tag)
        model = MaskedImageModel(encoder, predictor)
        for name, module in model.named_children():
            fill(module, parts[name], f"{file}: {name}")
        fixed = vit.ENCODER_TAG not in file.tree  # our runs may have started from learned positions
        for name in ("encoder", "target_encoder"):
            vit.check_positions(parts[name]["pos_embed"], f"{file}: {name}", fixed=fixed)
        vit.check_positions(
            parts["predictor"]["predictor_pos_embed"], f"{file}: predictor", fixed=True
        )
        for part in (model.encoder, model.branch()):
            vit.set_eps(part, eps)
        return model.eval()

    def project(self, file: WeightFile, encoder: Encoder) -> str:
        if vit.PREDICTOR_TAG in file.tree:
            return "stopmim export, in I-JEPA's layout"
        whose = "StoP" if _is_stop(_part(file, "predictor")) else "I-JEPA"
        return f"{whose}, by the order of the predictor's keys"

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        """Writes the only pickle of this package, because that code reads nothing else.

        ``weights_only=True`` reads it too. It has no optimizer state: it cannot be resumed.
        """
        model = contents.model
        if model is None:
            raise CheckpointError(f"{contents.path}: no predictor in it, which I-JEPA's layout has")
        if problem := _no_place_for(model):
            raise CheckpointError(f"{contents.path}: I-JEPA's layout has no place for {problem}")
        predictor = vit.weights_of(model.predictor)
        order = ["mask_token", "predictor_pos_embed"]
        if isinstance(model.predictor.positions, StochasticPositions):
            order.reverse()
        parts = {
            "encoder": vit.weights_of(model.encoder),
            "predictor": {name: predictor.pop(name) for name in order} | predictor,
            "target_encoder": vit.weights_of(model.branch()),
        }
        # DistributedDataParallel's prefix: their code adds it, and timm reads nothing without it.
        tree: dict[str, Any] = {
            name: {f"module.{key}": value for key, value in part.items()}
            for name, part in parts.items()
        }
        tree |= {"opt": None, "scaler": None, "epoch": contents.epoch or 0}
        tree |= {
            vit.ENCODER_TAG: vit.encoder_tag(model.encoder),
            vit.PREDICTOR_TAG: model.predictor.tag(),
        }
        torch.save(tree, folder / "model.pth.tar")


def _part(file: WeightFile, name: str) -> vit.State:
    if not isinstance(file.tree.get(name), Mapping):
        keys = vit.first_keys(file.tree)
        raise CheckpointError(f"{file}: no {name} in it; its top-level keys are {keys}")
    # "module." is DistributedDataParallel's; StoP without a launcher has none.
    part = {str(key).removeprefix("module."): value for key, value in file.tree[name].items()}
    return vit.tensors(part, f"{file}: {name}")


def _is_stop(predictor: vit.State) -> bool:
    names = list(predictor)
    return names.index("mask_token") > names.index("predictor_pos_embed")


def _released_tag(weights: vit.State, encoder: VisionTransformer, source: str) -> dict[str, Any]:
    """The tag of a predictor that the released code saved."""
    common = {"tokens": "masked", "heads": encoder.heads}
    try:
        stop = _is_stop(weights)
    except ValueError as error:
        raise CheckpointError(f"{source}: not a predictor of I-JEPA: {error}") from None
    if not stop:
        return common | {"positions": "sincos", "bias": "mask_token"}
    deviation = 0.2 if encoder.width == SIZES["h"].width else 0.25
    return common | {"positions": "stochastic", "bias": "project", "sigma": deviation**2}


def _no_place_for(model: MaskedImageModel) -> str:
    if isinstance(model.target, Pixels):
        return "a predictor of pixels: use --to mae"
    if not model.target.follows:
        return "a model without target encoder"
    return "a class token" if model.encoder.prefix else model.predictor.positions.not_exportable
