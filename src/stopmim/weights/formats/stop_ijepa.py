"""The ``.pth.tar`` of I-JEPA's and StoP's code: encoder, target encoder and predictor.

Both save the same predictor keys and use them differently. They can be told apart by the order of
keys: `mask_token` comes before `predictor_pos_embed` in I-JEPA and after it in StoP. Our exports
name the predictor in a tag, which decides.
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

# Parts of a file, and the table of positions in each.
PARTS = {"encoder": "pos_embed", "target_encoder": "pos_embed", "predictor": "predictor_pos_embed"}


class StopIjepa(Format):
    name = "StoP or I-JEPA"
    word = "ijepa"
    used_by = "the code of I-JEPA and StoP"
    whole_model = True

    def recognises(self, file: WeightFile) -> bool:
        # Any part suffices: `model` reports the missing ones.
        return isinstance(file.tree, Mapping) and any(name in file.tree for name in PARTS)

    def model(self, file: WeightFile) -> MaskedImageModel:
        parts = {name: _part(file, name) for name in PARTS}
        heads, eps = file.heads_and_eps()
        encoder = vit.encoder_like(parts["encoder"], str(file), heads)
        if (tag := file.tag(vit.PREDICTOR_TAG)) is None:  # of the released code
            tag = {"positions": "sincos", "bias": "mask_token"}
            if _is_stop(file, parts["predictor"]):
                deviation = 0.2 if encoder.width == SIZES["h"].width else 0.25
                tag = {"positions": "stochastic", "bias": "project", "sigma": deviation**2}
            tag |= {"tokens": "masked", "heads": encoder.heads}
        predictor = vit.predictor_like(parts["predictor"], encoder, str(file), tag)
        model = MaskedImageModel(encoder, predictor)
        exported = vit.ENCODER_TAG in file.tree  # our runs may have started from learned positions
        for name, module in model.named_children():
            fill(module, parts[name], source := f"{file}: {name}")
            fixed = not exported or name == "predictor"
            vit.check_positions(parts[name][PARTS[name]], source, fixed=fixed)
        for part in (model.encoder, model.branch()):
            vit.set_eps(part, eps)
        return model.eval()

    def project(self, file: WeightFile, encoder: Encoder) -> str:
        if vit.PREDICTOR_TAG in file.tree:
            return "stopmim export, in I-JEPA's layout"
        whose = "StoP" if _is_stop(file, _part(file, "predictor")) else "I-JEPA"
        return f"{whose}, by the order of the predictor's keys"

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        """Writes the only pickle of this package, because the code of I-JEPA reads nothing else.

        ``weights_only=True`` reads it too. It has no optimizer state, so training cannot resume.
        """
        model = contents.model
        if model is None:
            raise CheckpointError(f"{contents.path}: no predictor in it, which I-JEPA's layout has")
        problem = model.predictor.positions.not_exportable or model.target.not_exportable
        if isinstance(model.target, Pixels):
            problem = "a predictor of pixels: use --to mae"
        elif not model.target.follows:
            problem = "a model without target encoder"
        elif model.encoder.prefix:
            problem = "a class token"
        if problem:
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
        tree: dict[str, Any] = {}
        for name, part in parts.items():
            tree[name] = {f"module.{key}": value for key, value in part.items()}
        tree |= {"opt": None, "scaler": None, "epoch": contents.epoch or 0}
        tree |= vit.tags(model.encoder, model.predictor.tag(), contents.stats)
        torch.save(tree, folder / "model.pth.tar")


def _part(file: WeightFile, name: str) -> vit.State:
    if not isinstance(file.tree.get(name), Mapping):
        keys = vit.first_keys(file.tree)
        raise CheckpointError(f"{file}: no {name} in it; its top-level keys are {keys}")
    # "module." is DistributedDataParallel's; StoP without a launcher has none.
    part = {str(key).removeprefix("module."): value for key, value in file.tree[name].items()}
    return vit.tensors(part, f"{file}: {name}")


def _is_stop(file: WeightFile, predictor: vit.State) -> bool:
    names = list(predictor)
    with vit.refusing(f"{file}: not a predictor of I-JEPA"):
        return names.index("mask_token") > names.index("predictor_pos_embed")
