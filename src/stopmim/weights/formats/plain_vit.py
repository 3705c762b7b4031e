"""Plain ViTs under timm's names: DINO, iBOT, VISSL, timm's checkpoints, MAE without its decoder."""

from collections.abc import Mapping
from typing import Any

from stopmim.base.errors import CheckpointError
from stopmim.method.encoder import Encoder, VisionTransformer
from stopmim.weights import vit
from stopmim.weights.format import Format, WeightFile

TRUNK = ("classy_state_dict", "base_model", "model", "trunk")  # where VISSL keeps it
TEACHER_OR_STUDENT = {"target": "teacher", "context": "student"}  # DINO and iBOT


class PlainVit(Format):
    name = "a plain ViT"

    def recognises(self, file: WeightFile) -> bool:
        found = _state_dicts(file.tree).values()
        return any(vit.has_key(weights, "patch_embed.proj") for weights in found)

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        found = _state_dicts(file.tree)
        name = TEACHER_OR_STUDENT[branch] if "" not in found else ""
        if name not in found:
            raise CheckpointError(f"{file}: no {name} in it, only {' and '.join(found)}")
        return vit.read(vit.encoder_weights(found[name], str(file)), str(file), file.heads)

    def project(self, file: WeightFile, encoder: Encoder) -> str:
        """The project that wrote the file; all candidates if there is nothing but the encoder."""
        found = _state_dicts(file.tree)
        if TRUNK[0] in file.tree:
            return "VISSL"
        if "" not in found:
            masked = any(vit.has_key(weights, "masked_embed") for weights in found.values())
            return "iBOT" if masked or "ibot_loss" in file.tree else "DINO"
        if isinstance(encoder, VisionTransformer) and vit.is_sincos(encoder.pos_embed):
            return "MAE" if encoder.prefix else "StoP or I-JEPA, the encoder alone"
        return "a plain ViT: DINO, iBOT or timm"

    def branches(self, file: WeightFile) -> tuple[str, ...]:
        both = ("target (teacher, the default)", "context (student)")
        return both if len(_state_dicts(file.tree)) == 2 else ()


def _state_dicts(tree: Any) -> dict[str, Any]:
    """State dicts by "teacher" and "student", or under "" where there is only one network."""
    for name in TRUNK if isinstance(tree, Mapping) and TRUNK[0] in tree else ():
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    if not isinstance(tree, Mapping):
        return {}
    names = [n for n in TEACHER_OR_STUDENT.values() if isinstance(tree.get(n), Mapping)]
    return {name: vit.unwrapped(tree[name]) for name in names} or {"": vit.unwrapped(tree)}
