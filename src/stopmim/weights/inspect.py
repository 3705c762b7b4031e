"""What a file is: whose, which network, how far trained, and what can be loaded from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stopmim.base.errors import CheckpointError
from stopmim.base.sandbox import metadata, read_json, read_tree
from stopmim.config.schema import Config
from stopmim.method.encoder import Encoder, VisionTransformer
from stopmim.method.model import MaskedImageModel
from stopmim.method.positions import sincos_2d
from stopmim.runs import checkpoint
from stopmim.runs.run import Run, begun
from stopmim.weights import foreign
from stopmim.weights.formats import mae
from stopmim.weights.load import (
    ENCODER_TAG,
    PREDICTOR_TAG,
    Shape,
    encoder_in,
    existing,
    is_released,
    load_encoder,
    load_model,
    mae_in,
    model_in,
    weights_in,
)


@dataclass(frozen=True)
class Identity:
    """Of a file or folder; `str` is what ``stopmim inspect`` prints."""

    path: Path
    project: str  # whose file it is, as far as its keys tell
    encoder: Encoder
    model: MaskedImageModel | None = None  # with predictor and both branches, if they are there
    branches: tuple[str, ...] = ()
    config: Config | None = None  # of our own runs
    epoch: int | None = None
    step: int | None = None

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Name and value of everything known, in the order in which it is printed."""
        found = [("file", str(self.path)), ("project", self.project)]
        found += [("encoder", network(self.encoder)), ("images", pictures(self.encoder))]
        found += [("parameters", f"{millions(self.encoder)} of the encoder")]
        if self.model:
            found[-1] = (
                "parameters",
                f"{found[-1][1]}, {millions(self.model.predictor)} of the predictor",
            )
            found += [("predictor", self.model.describe())]
        done = {"epoch": self.epoch, "step": self.step}
        found += [(name, str(value)) for name, value in done.items() if value is not None]
        if self.config:
            found += [("trained", trained(self.config))]
        found += [("load_encoder", " or ".join(self.branches) or "its one encoder")]
        why_not = "no: there is no predictor in it"
        if self.project == WITH_DECODER:
            why_not = "with decoder_heads=..., which no file says"
        found += [("load_model", "yes" if self.model else why_not)]
        return found

    def __str__(self) -> str:
        return "\n".join(f"{name:13} {value}" for name, value in self.rows)


BRANCHES = ("target (EMA, the default)", "context")
WITH_DECODER = "MAE, with its decoder"


def identify(path: str | Path, heads: int | None = None) -> Identity:
    """What is in `path`, anything that `load_encoder` reads; CheckpointError if nothing is."""
    if str(path).startswith("timm:"):
        return Identity(Path(path), "timm", load_encoder(path))
    path = weights_in(existing(path))
    if path.is_dir():
        if (path / "config.json").is_file():
            encoder = load_encoder(path, heads=heads)
            kind = read_json(path / "config.json")["model_type"]
            return Identity(path, f"Hugging Face, {kind}", encoder)
        return _ours(path)
    tree = read_tree(path)
    if is_released(tree):
        model = model_in(tree, path, heads)
        whose = released(tree)
        return Identity(path, whose, model.branch(), model, BRANCHES, epoch=_epoch(tree))
    if mae.heads_of(mae.decoder_in(tree)) or PREDICTOR_TAG in metadata(path):
        model = mae_in(tree, path, heads)
        ours = (
            "stopmim export, in MAE's layout" if PREDICTOR_TAG in metadata(path) else WITH_DECODER
        )
        return Identity(path, ours, model.encoder, model, epoch=_epoch(tree))
    names = ("target (teacher, the default)", "context (student)")
    both = isinstance(tree, Mapping) and {"teacher", "student"} <= tree.keys()
    encoder = encoder_in(tree, path, "target", heads)
    return Identity(
        path,
        "stopmim export" if ENCODER_TAG in metadata(path) else project(tree, encoder),
        encoder,
        branches=names if both else (),
        epoch=_epoch(tree),
    )


def _epoch(tree: Any) -> int | None:
    epoch = tree.get("epoch") if isinstance(tree, Mapping) else None
    return epoch if isinstance(epoch, int) and epoch else None  # we write 0 where none is known


def _ours(path: Path) -> Identity:
    is_run = (path / "run.json").exists()
    newest = Run(path).checkpoint if is_run else path  # once: of a run that goes on it changes
    model = load_model(newest)
    about = checkpoint.state(newest)
    config = Config.model_validate(about["config"], strict=False)
    epoch = None
    if is_run:
        epoch = about["step"] // (begun(path)["data"]["images"] // config.optim.batch_size)
    return Identity(
        path,
        f"stopmim {'run' if is_run else 'checkpoint'}",
        model.branch(),
        model,
        BRANCHES if model.target_encoder else (),
        config=config,
        epoch=epoch,
        step=about["step"],
    )


def released(tree: Mapping[str, Any]) -> str:
    if PREDICTOR_TAG in tree:
        return "stopmim export, in I-JEPA's layout"
    names = [str(key).removeprefix("module.") for key in tree["predictor"]]
    stop = names.index("mask_token") > names.index("predictor_pos_embed")
    return f"{'StoP' if stop else 'I-JEPA'}, by the order of the predictor's keys"


def project(tree: Any, encoder: Encoder) -> str:
    """Whose file `tree` is. One encoder alone may be of several: then all are named."""
    if not isinstance(encoder, VisionTransformer):
        return "data2vec or BEiT"
    if foreign.TRUNK[0] in tree:
        return "VISSL"
    for name in foreign.BRANCHES.values():
        if isinstance(tree.get(name), Mapping):
            ibot = "ibot_loss" in tree or any("masked_embed" in str(key) for key in tree[name])
            return "iBOT" if ibot else "DINO"
    inner = next((tree[name] for name in foreign.CONTAINERS if name in tree), tree)
    if any("decoder_pos_embed" in str(key) for key in inner):
        return WITH_DECODER
    if positions(encoder) == "sine-cosine":
        return "MAE" if encoder.prefix else "StoP or I-JEPA, the encoder alone"
    return "a plain ViT: DINO, iBOT or timm"


def positions(encoder: VisionTransformer) -> str:
    if encoder.width % 4:
        return "learned"
    table = encoder.pos_embed[0, encoder.prefix :]
    own = sincos_2d(encoder.side, encoder.width)
    return "sine-cosine" if torch.allclose(table, own, atol=foreign.ROUNDING) else "learned"


def network(encoder: Encoder) -> str:
    if isinstance(encoder, VisionTransformer):
        eps = f", norm eps {encoder.norm.eps:g}" if encoder.norm.eps != 1e-6 else ""
        return f"{Shape.of(encoder)}, {positions(encoder)} positions{eps}"
    return f"patch {encoder.patch}, width {encoder.width}, relative positions, class token"


def pictures(encoder: Any) -> str:
    side, patch = encoder.side, encoder.patch
    return f"{side * patch}x{side * patch} pixels, a grid of {side}x{side}"


def millions(module: Any) -> str:
    if not isinstance(module, nn.Module):
        raise CheckpointError("not a network")
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f} M"


def trained(config: Config) -> str:
    optim = config.optim
    begin = f", begun with {config.init}" if config.init else ""
    return (
        f"{optim.epochs} epochs planned, batch {optim.batch_size}, lr {optim.lr:g}, "
        f"seed {config.seed}{begin}"
    )
