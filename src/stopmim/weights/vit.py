"""Plain ViTs in files, for all formats: names, shapes, positions, and the tags of `export`.

MAE, DINO, iBOT, VISSL, timm, I-JEPA and StoP save one network under timm's names. They differ in
how it is wrapped, in what is saved beside it, and in what shapes do not tell: attention heads and
the epsilon of norms.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stopmim._version import __version__
from stopmim.base.errors import CheckpointError
from stopmim.base.sandbox import one_line
from stopmim.config.architectures import SIZES
from stopmim.config.schema import MOST_PATCHES
from stopmim.data.pixels import RGB, PixelStats
from stopmim.method.build import from_tag
from stopmim.method.encoder import EPS, VisionTransformer
from stopmim.method.positions import sincos_2d
from stopmim.method.predictor import Predictor
from stopmim.runs.checkpoint import FLOATS, fill
from stopmim.runs.checkpoint import State as State

Branch = Literal["target", "context"]  # the EMA encoder (teacher), or the trained one (student)

# Tags that `export` writes beside the weights: heads and epsilon, the kind of predictor, and the
# statistics of images that are not ordinary pictures.
ENCODER_TAG, PREDICTOR_TAG, PIXELS_TAG = "stopmim.encoder", "stopmim.predictor", "stopmim.pixels"

CONTAINERS = ("model", "state_dict")  # MAE, timm's training script; iBOT's checkpoint_teacher.pth
# DistributedDataParallel, then the multi-crop wrapper of DINO and iBOT, or a model around it.
WRAPPERS = re.compile(r"^(module\.)?(backbone\.|encoder\.)?")
# Decoders, heads and mask tokens are not part of the encoder.
NOT_ENCODER = ("decoder_", "head.", "lm_head.", "mask_token", "masked_embed")

# Errors of code that reads what it does not expect.
UNEXPECTED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
BLOCKS = 1000  # most blocks of a network: each takes time to build
ROUNDING = 0.01  # tolerance for a table of positions in half precision


class Shape(NamedTuple):
    """The sizes two encoders must share for weights of one to fit the other."""

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
        """Name of the architecture, if it is a standard size."""
        own = (self.width, self.depth, self.heads, self.hidden)
        for name, size in SIZES.items():
            if own == (size.width, size.depth, size.heads, round(size.width * size.mlp_ratio)):
                return f"vit_{name}{self.patch}"
        return None

    def __str__(self) -> str:
        name = f"{self.arch}, " if self.arch else ""
        token = "with" if self.class_token else "without"
        size = f"patch {self.patch}, width {self.width}, depth {self.depth}, {self.heads} heads"
        return f"{name}{size}, MLP {self.hidden}, {token} class token"


def describe(encoder: VisionTransformer) -> str:
    """Architecture and positions in words."""
    positions = "sine-cosine" if is_sincos(encoder.pos_embed) else "learned"
    eps = f", norm eps {encoder.norm.eps:g}" if encoder.norm.eps != EPS else ""
    return f"{Shape.of(encoder)}, {positions} positions{eps}"


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns errors of unexpected content into a CheckpointError of one line, `what` first."""
    try:
        yield
    except UNEXPECTED as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from None


# ------------------------------------------------------------------------------ keys


def unwrapped(tree: Any) -> Any:
    """The state dict in `tree`, below the containers of a training script."""
    for name in CONTAINERS:
        if isinstance(tree, Mapping) and isinstance(tree.get(name), Mapping):
            tree = tree[name]
    return tree


def has_key(tree: Any, part: str) -> bool:
    return isinstance(tree, Mapping) and any(part in str(key) for key in tree)


def first_keys(tree: Any) -> str:
    """The first keys of `tree`, for a message."""
    keys = list(tree)[:8] if isinstance(tree, Mapping) else []
    return ", ".join(str(key)[:60] for key in keys) or "none"


def tensors(part: Mapping[str, Any], source: str) -> State:
    """`part`; raises CheckpointError unless all values are tensors of a supported type."""
    for key, value in part.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{source}: {key} is not a tensor but {type(value).__name__}")
        if value.is_floating_point() and value.dtype not in FLOATS:
            raise CheckpointError(f"{source}: {key} is {value.dtype}, which is not supported")
    return dict(part)


def encoder_weights(tree: Any, source: str) -> State:
    """The encoder in `tree` under timm's names, without wrappers and heads."""
    weights: dict[str, Any] = {}
    for name, value in unwrapped(tree).items():
        key = WRAPPERS.sub("", str(name))
        if key.startswith(NOT_ENCODER):
            continue
        if key in weights:
            raise CheckpointError(f"{source}: {key} is in it twice, as {name} and without a prefix")
        weights[key] = value
    return tensors(weights, source)


def heads_and_eps(heads: Any, eps: Any) -> tuple[int, float]:
    """Attention heads and norm epsilon as a file states them; ValueError if they are absurd."""
    found = int(heads), float(eps)
    if isinstance(heads, bool) or found[0] != heads or heads < 1 or not 0 <= found[1] < 1:
        raise ValueError(f"{heads} heads, epsilon {eps}")
    return found


def block_count(weights: Mapping[str, Any], prefix: str) -> int:
    """Number of blocks with keys like ``PREFIX.0.norm.weight``; ValueError if absurd."""
    blocks = {key.removeprefix(prefix).split(".")[0] for key in weights if key.startswith(prefix)}
    if len(blocks) > BLOCKS:
        raise ValueError(f"{len(blocks)} blocks, more than {BLOCKS}")
    return len(blocks)


def tags(
    encoder: VisionTransformer,
    predictor: Mapping[str, Any] | None = None,
    stats: PixelStats | None = None,
) -> dict[str, Any]:
    """The tags of an export; `WeightFile.tag` reads them."""
    own: dict[str, Any] = {ENCODER_TAG: {"heads": encoder.heads, "eps": encoder.norm.eps}}
    own |= {PREDICTOR_TAG: predictor} if predictor else {}
    return own | pixels_tag(stats)


def pixels_tag(stats: PixelStats | None) -> dict[str, Any]:
    """The tag about images; empty for ordinary pictures and for unknown statistics."""
    return {} if stats in (None, RGB) else {PIXELS_TAG: stats.tag()}


def save_tagged(weights: State, file: Path, tags: Mapping[str, Any]) -> None:
    """Writes a .safetensors file with `tags` in its header."""
    words = {name: json.dumps(tag) for name, tag in tags.items()}
    save_file(weights, file, {"format": "pt", "stopmim.version": __version__} | words)


def weights_of(module: nn.Module) -> State:
    """The state dict of `module` as files store it: on the CPU and contiguous."""
    return {key: value.detach().cpu().contiguous() for key, value in module.state_dict().items()}


# ------------------------------------------------------------------------------ networks


def read(
    weights: State, source: str, heads: int | None, eps: float = EPS, *, fixed: bool = False
) -> VisionTransformer:
    """The encoder with `weights`, in evaluation mode; `fixed` asks for sine-cosine positions."""
    encoder = encoder_like(weights, source, heads, class_token="cls_token" in weights)
    fill(encoder, weights, source)
    check_positions(encoder.pos_embed, source, fixed=fixed)
    set_eps(encoder, eps)
    return encoder.eval()


def encoder_like(
    weights: State, source: str, heads: int | None, *, class_token: bool = False
) -> VisionTransformer:
    """An encoder with the architecture of `weights`, by their shapes; allocates no memory."""
    with refusing(f"{source}: not a plain ViT"):
        width, channels, patch, _ = weights["patch_embed.proj.weight"].shape
        patches = weights["pos_embed"].shape[1] - class_token
        hidden = weights["blocks.0.mlp.fc1.weight"].shape[0]
        if (side := math.isqrt(patches)) ** 2 != patches:
            raise ValueError(f"its {patches} positions do not form a square")
        if not min(width, channels, patch, side, hidden):
            raise ValueError("an empty tensor")
        if side > MOST_PATCHES:
            raise ValueError(f"{side} patches along an edge, more than {MOST_PATCHES}")
        if heads is None:
            heads = {size.width: size.heads for size in SIZES.values()}.get(width)
        if heads is None:
            raise CheckpointError(f"{source}: width {width} is no standard size; say heads=...")
        if heads < 1:
            raise CheckpointError(f"{source}: heads must be at least 1, got {heads}")
        depth, ratio = block_count(weights, "blocks."), hidden / width
        with torch.device("meta"):  # without memory until it is known to fit: see `fill`
            sizes = (side * patch, patch, width, depth, heads, ratio, class_token)
            return VisionTransformer(*sizes, channels)


def predictor_like(
    weights: State, encoder: VisionTransformer, source: str, tag: Any, outputs: int | None = None
) -> Predictor:
    """A predictor with the shapes of `weights`, of the kind in `tag`; allocates no memory."""
    with refusing(f"{source}: not a known predictor"):
        width = weights["predictor_embed.weight"].shape[0]
        if not width or int(tag["heads"]) < 1:
            raise ValueError(f"width {width}, {tag['heads']} heads")
        with torch.device("meta"):
            depth = block_count(weights, "predictor_blocks.")
            return from_tag(tag, encoder, width, depth, outputs)


def set_eps(encoder: VisionTransformer, eps: float) -> None:
    for module in encoder.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


# ------------------------------------------------------------------------------ positions


def is_sincos(table: Tensor, *, swapped: bool = False) -> bool:
    """Whether `table` (1, N or 1 + N, P) is that of MAE, I-JEPA and StoP, or with axes swapped."""
    side, width = math.isqrt(table.shape[1]), table.shape[2]
    if width % 4:  # other widths have no such table
        return False
    grid = sincos_2d(side, width).view(side, side, width)
    wanted = (grid.transpose(0, 1) if swapped else grid).flatten(0, 1)
    return torch.allclose(table[0, -(side**2) :].float(), wanted, atol=ROUNDING, rtol=0)


def check_positions(table: Tensor, source: str, *, fixed: bool) -> None:
    """Refuses a table with swapped rows and columns and, if `fixed`, any but the sine-cosine one.

    MAE, I-JEPA and StoP never train theirs; Hugging Face and timm do when they fine-tune.
    """
    side, swapped = math.isqrt(table.shape[1]), is_sincos(table, swapped=True)
    if table.shape[2] % 4 == 0 and not is_sincos(table) and (swapped or fixed):
        what = "have rows and columns swapped" if swapped else "are not its project's fixed table"
        raise CheckpointError(f"{source}: its positions {what} (sine-cosine of {side}x{side})")
