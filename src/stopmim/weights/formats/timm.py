"""Models of timm, and the folders of ``export --to timm`` and ``--to safetensors``.

Both exports have the same weights, under timm's names. For timm there is also a config.json, from
which ``timm.create_model("hf-hub:...")`` builds the network and its transform.
"""

import json
import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stopmim.base.errors import CheckpointError, UserError
from stopmim.base.random_keys import torch_generator
from stopmim.base.sandbox import one_line
from stopmim.data.pixels import RGB, PixelStats
from stopmim.data.transform import Transform
from stopmim.method.encoder import EPS, VisionTransformer
from stopmim.weights import vit
from stopmim.weights.format import Contents, Format, WeightFile

AGREE = 1e-4  # relative difference allowed between the features of a timm model and of ours
TEMPLATE = "vit_base_patch16_224"  # every number that matters is given


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
        tags = vit.tags(encoder, stats=contents.stats)
        vit.save_tagged(weights, folder / "model.safetensors", tags)


class Timm(Safetensors):
    name = "timm"
    word = "timm"
    used_by = "timm"
    library = "timm"

    def recognises(self, file: WeightFile) -> bool:
        return str(file).startswith("timm:")

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        """The model ``timm:NAME`` with its published weights, which timm downloads."""
        timm = _import_timm(str(file))
        try:
            name = str(file).removeprefix("timm:")
            model = timm.create_model(name, pretrained=True, num_classes=0)
        except Exception as error:  # unknown names, no network, no such weights: many types
            raise CheckpointError(f"{file}: {one_line(error)}") from None
        return from_timm(model, str(file))

    def stats(self, file: WeightFile) -> PixelStats | None:
        return None  # timm publishes none for channels other than red, green and blue

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        super().write(contents, encoder, folder)
        if encoder.norm.eps != EPS:  # JSON has no `norm_layer`: the README says how to give one
            return
        about: dict[str, Any] = {
            "architecture": TEMPLATE,
            "num_classes": 0,
            "num_features": encoder.width,
            "global_pool": "token" if encoder.prefix else "avg",
            "model_args": self.arguments(encoder),
            "pretrained_cfg": self.view(encoder, contents.stats)
            | {"num_classes": 0, "first_conv": "patch_embed.proj", "classifier": "head"},
        }
        if encoder.channels != 3:
            # timm would take the filters for those of RGB, and replace them by random ones.
            del about["pretrained_cfg"]["first_conv"]
        text = json.dumps(about, indent=1) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    def arguments(self, encoder: VisionTransformer) -> dict[str, Any]:
        """Arguments of ``create_model``, except for an unusual norm."""
        found: dict[str, Any] = {
            "img_size": encoder.side * encoder.patch,
            "patch_size": encoder.patch,
            "embed_dim": encoder.width,
            "depth": len(encoder.blocks),
            "num_heads": encoder.heads,
            "mlp_ratio": vit.Shape.of(encoder).hidden / encoder.width,
        }
        if encoder.channels != 3:
            found["in_chans"] = encoder.channels
        # Without fc_norm=False the final norm would move behind the pooling.
        mean = {"class_token": False, "global_pool": "avg", "fc_norm": False}
        return found if encoder.prefix else found | mean

    def view(self, encoder: VisionTransformer, stats: PixelStats | None = RGB) -> dict[str, Any]:
        """Arguments of timm's ``create_transform``: statistics of channels scaled to 0..1."""
        size, resize = encoder.side * encoder.patch, Transform(encoder.side * encoder.patch).resize
        share = size / resize
        if math.floor(size / share) != resize:  # as timm computes it; a few sizes round down
            share = size / (resize + 0.5)
        found = {
            "input_size": [encoder.channels, size, size],
            "interpolation": "bilinear",
            "crop_pct": share,
            "crop_mode": "center",
        }
        if stats is None:
            return found
        mean, std = stats.unit()
        return found | {"mean": list(mean), "std": list(std)}


def _import_timm(source: str) -> Any:
    """The library, or a UserError that says what to install."""
    try:
        import timm
    except ImportError as error:
        reason = f"timm cannot be imported ({one_line(error)})"
        raise UserError(f'{source}: {reason}; pip install "stopmim[timm]"') from None
    except (RuntimeError, OSError) as error:  # libraries built for another torch
        pair = f"torch {torch.__version__} and torchvision {_version('torchvision')}"
        index = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
        number = torch.__version__.partition("+")[0]
        raise UserError(
            f"{source}: {pair} do not match ({one_line(error)}); install a pair from one index: "
            f"pip install --force-reinstall torch=={number} torchvision --index-url "
            f"https://download.pytorch.org/whl/{index}"
        ) from None
    return timm


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "of unknown version"


def from_timm(model: nn.Module, source: str = "timm") -> VisionTransformer:
    """Our encoder with the weights of a plain ViT of timm; equal features prove that it is one."""
    inner: Any = model
    with vit.refusing(f"{source}: not a plain ViT"):
        # Weights do not determine these: timm has a B/16 with 16 heads.
        heads, eps = int(inner.blocks[0].attn.num_heads), float(inner.norm.eps)
    encoder = vit.read(vit.encoder_weights(inner.state_dict(), source), source, heads, eps)
    edge, training = encoder.side * encoder.patch, model.training
    generator = torch_generator("timm")
    image = torch.randn(1, encoder.channels, edge, edge, generator=generator)
    with torch.inference_mode():
        theirs, ours = inner.eval().forward_features(image)[:, encoder.prefix :], encoder(image)
    model.train(training)
    if not (theirs - ours).norm() <= AGREE * theirs.norm():
        raise CheckpointError(f"{source}: the same weights in a plain ViT give other features")
    return encoder
