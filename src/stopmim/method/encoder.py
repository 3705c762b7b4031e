"""The encoder f: a Vision Transformer, with I-JEPA's and timm's names.

Ours has no class token; those of MAE, DINO and iBOT have one, and are otherwise the same.

Shapes: B images, N patches of an image, K of them kept, D width.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.base.pictures import Pictures, as_input, no_transform
from stopmim.config.architectures import parse_arch
from stopmim.gpu.attention import attend, gelu
from stopmim.gpu.blocks import USUAL, take, through
from stopmim.method.positions import sincos_2d

EPS = 1e-6  # of every LayerNorm here; torch's default is 1e-5

Pool = Literal["mean", "cls"]
Start = Literal["jepa", "mae"]  # whose initial weights


class Encoder(Protocol):
    """The interface that evaluations need: our encoder, or an adapter around a foreign one."""

    patch: int  # edge of a patch, in pixels
    width: int
    pool: Pool  # default pooling of its features

    def __call__(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Patch tokens (B, N or K, D), final norm applied, without the class token."""

    def features(self, images: Tensor, layers: int = 1, pool: Pool = "mean") -> Tensor:
        """One vector per image, (B, layers * D)."""


class ImageEncoder(Encoder, Protocol):
    """An encoder as `load_encoder` returns it: it takes pictures too."""

    transform: Callable[[Pictures], Tensor]  # pictures to its input, as in every evaluation

    def features(self, images: Pictures, layers: int = 1, pool: Pool = "mean") -> Tensor:
        """The same for files, PIL images and pixels; floats in tensors must be normalised."""


class PatchEmbed(nn.Module):
    """The usual strided convolution, computed as one matrix product per patch."""

    def __init__(self, patch: int, width: int, channels: int = 3) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)  # for names and shapes

    def forward(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, N, D), or (B, K, D): patches not in `index` (B, K) cost nothing."""
        p = self.patch
        patches = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, C, rows, p, cols, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, N, C * p * p)
        if index is not None:  # before the product: hidden patches cost nothing
            patches = take(patches, index)  # (B, K, C * p * p)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)  # packed as timm's: queries, keys, values
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, first: int = 0, asked: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N - first or Q, D): the others are keys and values only."""
        mixed = attend(self.qkv(x), self.heads, first)
        return self.proj(mixed if asked is None else take(mixed, asked))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = Mlp(width, round(width * mlp_ratio))

    def forward(self, x: Tensor, first: int = 0, asked: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N - first or Q, D): the last block skips tokens that are not read."""
        kept = x[:, first:] if asked is None else take(x, asked)
        x = kept + self.attn(self.norm1(x), first, asked)  # pre-norm, as in ViT
        return x + self.mlp(self.norm2(x))


def initialise(module: nn.Module) -> None:
    """Draws matrices and the patch projection from N(0, 0.02^2); biases 0, norms 1 and 0.

    This is what the released code ends up with: its constructor rescales `attn.proj` and `mlp.fc2`
    by depth, and `init_model` then overwrites every linear layer (ijepa src/helper.py:86-99).
    """
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def initialise_mae(module: nn.Module) -> None:
    """The same for MAE: matrices and the patch projection (as a matrix) are Xavier-uniform."""
    initialise(module)
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight.flatten(1))  # a view


INITIALISERS: dict[Start, Callable[[nn.Module], None]] = {"jepa": initialise, "mae": initialise_mae}


class VisionTransformer(nn.Module):
    """Patches to features: ``s = f(x)``. Positions are a fixed table, part of the state dict.

    Args:
        image_size: edge of the images it is trained on; others work, the table is then resized.
        patch: edge of a patch, in pixels.
        class_token: whether a learned token precedes the patch tokens.
        channels: C of its images; 3 are red, green and blue.
    """

    pos_embed: Tensor  # (1, N, D), or (1, 1 + N, D) with the class token first
    cls_token: nn.Parameter | None  # (1, 1, D)
    way = USUAL  # how its blocks are computed
    start: Start = "jepa"  # how its weights were initialised, to make an untrained twin

    def __init__(
        self,
        image_size: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        class_token: bool = False,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"patch {patch} does not divide the image size {image_size}")
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        # side: patches along one edge, S; N = S * S
        self.side, self.patch, self.width, self.heads = image_size // patch, patch, width, heads
        self.transform: Callable[[Pictures], Tensor] = no_transform  # `load_encoder` sets it
        self.channels, self.patch_embed = channels, PatchEmbed(patch, width, channels)
        self.pool: Pool = "cls" if class_token else "mean"
        self.prefix = int(class_token)  # tokens before the patch tokens
        # The class token has no place: zeros, as in MAE.
        table = F.pad(sincos_2d(self.side, width), (0, 0, self.prefix, 0))
        self.register_buffer("pos_embed", table[None])
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if class_token else None
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.apply(initialise)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    @classmethod
    def from_arch(
        cls, arch: str, image_size: int, class_token: bool = False, channels: int = 3
    ) -> "VisionTransformer":
        """The encoder called `arch`, for example ``"vit_b16"``."""
        size, patch = parse_arch(arch)
        sizes = (patch, size.width, size.depth, size.heads, size.mlp_ratio)
        return cls(image_size, *sizes, class_token, channels)

    def embed(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Patches with their positions, (B, N, D), or (B, K, D) for those at `index` (B, K)."""
        height, width = images.shape[-2:]
        if images.shape[1] != self.channels:
            raise ValueError(f"images have {images.shape[1]} channels; expected {self.channels}")
        if height % self.patch or width % self.patch:
            raise ValueError(f"images of {height}x{width} do not divide into patches {self.patch}")
        positions = self.positions(height // self.patch, width // self.patch)  # (1, N, D)
        patches = self.patch_embed(images, index)
        return patches + (positions if index is None else positions[0, index])

    def positions(self, rows: int, cols: int) -> Tensor:
        """The positions of a grid of rows x cols patches, (1, rows * cols, D).

        Without a class token every entry of the table is a patch. (The released code cuts off the
        first one as if it were a class token, and fails for any other image size.)
        """
        table = self.pos_embed[:, self.prefix :] if self.prefix else self.pos_embed
        if (rows, cols) == (self.side, self.side):
            return table
        grid = table.reshape(1, self.side, self.side, -1).permute(0, 3, 1, 2)  # (1, D, S, S)
        grid = F.interpolate(grid, size=(rows, cols), mode="bicubic", align_corners=False)
        return grid.flatten(2).transpose(1, 2)

    def with_class(self, x: Tensor) -> Tensor:
        """`x` (B, K, D) with the class token before it, if there is one."""
        if self.cls_token is None:
            return x
        first = self.cls_token + self.pos_embed[:, :1]  # (1, 1, D)
        # Not len(x): the ONNX exporter would freeze it, and with it the batch size.
        return torch.cat([first.expand(x.shape[0], -1, -1), x], dim=1)

    def forward(
        self,
        images: Tensor,
        index: Tensor | None = None,
        *,
        all_tokens: bool = False,
        layers: int = 1,
        asked: Tensor | None = None,
    ) -> Tensor:
        """Features (B, N, D) of all patches, or (B, K, D) of those at `index` (B, K) only.

        With `asked` (B, Q), only the features (B, Q, D) of those patches, which still attend to
        all. With `all_tokens` the class token comes first, if there is one. With several `layers`,
        (B, N, layers * D): evenly spaced in depth, and only the last one is normed.
        """
        x = self.with_class(self.embed(images, index))  # hidden patches stay hidden from here on
        if asked is not None:
            return through(self.blocks, x, self.norm, self.way, asked=asked + self.prefix)
        blocks, earlier = list(self.blocks), []
        starts = [len(blocks) * i // layers for i in range(layers)]
        for start, stop in pairwise(starts):
            earlier.append(x := through(blocks[start:stop], x, nn.Identity(), self.way))
        # The blocks that remain, by default all, and the final norm: s_i, (B, K, D)
        x = through(blocks[starts[-1] :], x, self.norm, self.way)
        x = torch.cat([*earlier, x], dim=-1) if earlier else x
        return x[:, self.prefix :] if self.prefix and not all_tokens else x

    def features(self, images: Pictures, layers: int = 1, pool: Pool = "mean") -> Tensor:
        """The last `layers` blocks, each normed and pooled, (B, layers * D).

        Args:
            images: floats (B, C, H, W), normalised; or, if the encoder was loaded, pictures for
                its `transform`: one or a list of paths, PIL images (RGB) or pixels as stored.
            pool: "mean" averages over patches, "cls" takes the class token.
        """
        if pool not in ("mean", "cls"):
            raise ValueError(f'pool must be "mean" or "cls", got {pool!r}')
        if pool == "cls" and not self.prefix:
            raise ValueError('this encoder has no class token: use pool="mean"')
        if not 1 <= layers <= len(self.blocks):
            raise ValueError(f"layers must be between 1 and {len(self.blocks)}, got {layers}")
        images = as_input(images, self.transform).to(self.pos_embed)
        x, pooled = self.with_class(self.embed(images)), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i >= len(self.blocks) - layers:
                normed = self.norm(x)  # the final norm, on every layer
                mean = pool == "mean"
                pooled.append(normed[:, self.prefix :].mean(dim=1) if mean else normed[:, 0])
        return torch.cat(pooled, dim=1)
