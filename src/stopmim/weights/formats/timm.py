"""Models of timm, and the .safetensors files of ``export --to timm`` and ``--to safetensors``.

Both exports are the same file, under timm's names; their README.md differs.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stopmim.base.errors import CheckpointError, UserError
from stopmim.base.random_keys import torch_generator
from stopmim.base.sandbox import one_line
from stopmim.method.encoder import VisionTransformer
from stopmim.weights import vit
from stopmim.weights.format import Contents, Format, WeightFile

AGREE = 1e-4  # relative difference allowed between the features of a timm model and of ours


class Safetensors(Format):
    name = "stopmim export"
    word = "safetensors"
    used_by = "stopmim and plain PyTorch"

    def recognises(self, file: WeightFile) -> bool:
        return file.tag(vit.ENCODER_TAG) is not None

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        weights = vit.encoder_weights(file.tree, str(file))
        return vit.read(weights, str(file), *file.heads_and_eps())

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        weights = vit.weights_of(encoder)
        vit.save_tagged(weights, folder / "model.safetensors", vit.tags(encoder))


class Timm(Safetensors):
    name = "timm"
    word = "timm"
    used_by = "timm"
    library = "timm"

    def recognises(self, file: WeightFile) -> bool:
        return str(file).startswith("timm:")

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        """The model ``timm:NAME`` with its published weights, which timm downloads."""
        try:
            import timm
        except (ImportError, RuntimeError) as error:
            reason = f"timm cannot be imported ({one_line(error)})"
            raise UserError(f'{file}: {reason}; pip install "stopmim[interop]"') from None
        try:
            name = str(file).removeprefix("timm:")
            model = timm.create_model(name, pretrained=True, num_classes=0)
        except Exception as error:  # unknown names, no network, no such weights: many types
            raise CheckpointError(f"{file}: {one_line(error)}") from None
        return from_timm(model, str(file))


def from_timm(model: nn.Module, source: str = "timm") -> VisionTransformer:
    """Our encoder with the weights of a plain ViT of timm; equal features prove that it is one."""
    inner: Any = model
    with vit.refusing(f"{source}: not a plain ViT"):
        # Weights do not tell them: timm has a B/16 with 16 heads.
        heads, eps = int(inner.blocks[0].attn.num_heads), float(inner.norm.eps)
    encoder = vit.read(vit.encoder_weights(inner.state_dict(), source), source, heads, eps)
    edge, training = encoder.side * encoder.patch, model.training
    image = torch.randn(1, 3, edge, edge, generator=torch_generator("timm"))
    with torch.inference_mode():
        theirs, ours = inner.eval().forward_features(image)[:, encoder.prefix :], encoder(image)
    model.train(training)
    if not (theirs - ours).norm() <= AGREE * theirs.norm():
        raise CheckpointError(f"{source}: the same weights in a plain ViT give other features")
    return encoder
