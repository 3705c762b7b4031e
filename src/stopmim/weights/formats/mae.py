"""MAE with its decoder, which is our predictor, in one flat state dict.

The encoder has timm's names. The decoder's table of positions has a row of zeros for the class
token, which ours leaves out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stopmim.base.errors import CheckpointError
from stopmim.method.encoder import Encoder, VisionTransformer
from stopmim.method.model import MaskedImageModel, Pixels
from stopmim.runs.checkpoint import fill
from stopmim.weights import vit
from stopmim.weights.format import Contents, Format, WeightFile

# MAE to ours, by the first component of a key.
NAMES = {f"decoder_{x}": f"predictor_{x}" for x in ("embed", "blocks", "norm", "pos_embed")}
NAMES |= {"decoder_pred": "predictor_proj", "mask_token": "mask_token"}
TABLE = "predictor_pos_embed"
DECODER_WIDTH, DECODER_HEADS = 512, 16  # of every published decoder
# A tag for MAE's own files. They do not say whether pixels were normed; most were.
PUBLISHED = {"positions": "sincos", "bias": "mask_token", "tokens": "masked", "norm_pixels": True}


class Mae(Format):
    name = "MAE, with its decoder"
    word = "mae"
    used_by = "the code of MAE"
    whole_model = True

    def recognises(self, file: WeightFile) -> bool:
        return vit.has_key(vit.unwrapped(file.tree), "decoder_pos_embed")

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        # A run of ours may have started from learned positions.
        fixed = file.tag(vit.PREDICTOR_TAG) is None
        weights = vit.encoder_weights(file.tree, str(file))
        encoder = vit.read(weights, str(file), *file.heads_and_eps(), fixed=fixed)
        encoder.start = "mae"
        return encoder

    def model(self, file: WeightFile) -> MaskedImageModel:
        encoder, source = self.encoder(file, "target"), f"{file}: decoder"
        decoder = _decoder(vit.unwrapped(file.tree), encoder.prefix, source)
        tag = file.tag(vit.PREDICTOR_TAG)
        if tag is None:
            weight = decoder.get("predictor_embed.weight", torch.empty(DECODER_WIDTH))
            if file.decoder_heads is None and weight.shape[:1] != (DECODER_WIDTH,):
                what = f"its decoder is not {DECODER_WIDTH} wide as all of MAE's are"
                raise CheckpointError(f"{file}: {what}; say decoder_heads=")
            tag = PUBLISHED | {"heads": file.decoder_heads or DECODER_HEADS}
        outputs = encoder.channels * encoder.patch**2
        predictor = vit.predictor_like(decoder, encoder, source, tag, outputs)
        if not isinstance(normed := tag.get("norm_pixels"), bool):
            raise CheckpointError(f"{source}: norm_pixels is not in its {vit.PREDICTOR_TAG}")
        fill(predictor, decoder, source)
        vit.check_positions(decoder[TABLE], source, fixed=True)
        return MaskedImageModel(encoder, predictor, Pixels(normed)).eval()

    def project(self, file: WeightFile, encoder: Encoder) -> str:
        exported = file.tag(vit.PREDICTOR_TAG) is not None
        return "stopmim export, in MAE's layout" if exported else self.name

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        model, path = contents.model, contents.path
        if model is None or not isinstance(model.target, Pixels):
            what = "no predictor of pixels in it, which MAE's layout has"
            raise CheckpointError(f"{path}: {what}; choose another --to")
        if problem := model.predictor.positions.not_exportable:
            raise CheckpointError(f"{path}: MAE's layout has no place for {problem}")
        if not model.encoder.prefix:
            raise CheckpointError(f"{path}: no class token in it, which MAE's layout has")
        theirs = {ours: name for name, ours in NAMES.items()}
        weights = vit.weights_of(model.encoder)
        for key, value in vit.weights_of(model.predictor).items():
            stem, dot, rest = key.partition(".")
            if key == TABLE:
                value = torch.cat([torch.zeros_like(value[:, :1]), value], dim=1)
            weights[theirs[stem] + dot + rest] = value
        tag = model.predictor.tag() | {"norm_pixels": model.target.normed}
        tags = vit.tags(model.encoder, tag, contents.stats)
        vit.save_tagged(weights, folder / "model.safetensors", tags)


def _decoder(tree: Mapping[str, Any], prefix: int, source: str) -> vit.State:
    """The decoder in MAE's state dict under our names, with positions of patches only."""
    found = {}
    for name, value in tree.items():
        stem, dot, rest = str(name).removeprefix("module.").partition(".")
        if stem in NAMES or stem.startswith("decoder_"):
            found[NAMES.get(stem, stem) + dot + rest] = value  # `fill` refuses unknown ones
    decoder = vit.tensors(found, source)
    if (table := decoder.get(TABLE)) is None:
        return decoder  # `fill` reports it
    if table.ndim != 3 or table[:, :prefix].any():
        raise CheckpointError(f"{source}: the class token has a place, unlike in MAE")
    return decoder | {TABLE: table[:, prefix:]}
