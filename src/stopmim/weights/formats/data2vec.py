"""data2vec and BEiT, read only: a ViT that knows only the distances between patches.

It has no table of positions. Instead every attention adds a bias, the same in all blocks, which is
looked up by the distance between two patches; attention from and to the class token has its own
entries. Names are those of the published files.

Shapes: B images, N patches, K of them kept, D width, S patches along an edge in training.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.base.pictures import Pictures, as_input, no_transform
from stopmim.gpu.blocks import take
from stopmim.method.encoder import EPS, Encoder, Mlp, PatchEmbed, Pool
from stopmim.runs.checkpoint import fill
from stopmim.weights import vit
from stopmim.weights.format import Format, WeightFile

BIAS = 2**28  # most numbers of the bias of one image; BEiT-L at 512 px has 2 ** 24
CLASS = 3  # entries of a table for the class token: to patches, from patches, to itself
DISTANCES, INDEX = (f"rel_pos_bias.relative_position_{name}" for name in ("bias_table", "index"))


class Data2vec(Format):
    name = "data2vec or BEiT"

    def recognises(self, file: WeightFile) -> bool:
        return vit.has_key(vit.unwrapped(file.tree), DISTANCES)

    def encoder(self, file: WeightFile, branch: vit.Branch) -> "RelativeTransformer":
        weights = vit.encoder_weights(file.tree, str(file))
        weights.pop(INDEX, None)  # it follows from the size of the table
        with vit.refusing(f"{file}: not an encoder of data2vec"):
            width, channels, patch, _ = weights["patch_embed.proj.weight"].shape
            distances, heads = weights[DISTANCES].shape
            hidden = weights["blocks.0.mlp.fc1.weight"].shape[0]
            side = (math.isqrt(max(0, distances - CLASS)) + 1) // 2
            if (2 * side - 1) ** 2 + CLASS != distances:
                raise ValueError(f"its table of {distances} distances does not fit a square grid")
            if heads * side**4 > BIAS:
                raise ValueError(
                    f"{heads} heads that relate {side**2} patches take too much memory"
                )
            if file.heads not in (None, heads):
                raise ValueError(f"it has {heads} heads, not {file.heads}")
            depth = vit.block_count(weights, "blocks.")
            with torch.device("meta"):  # without memory until it is known to fit: see `fill`
                encoder = RelativeTransformer(side, patch, width, depth, heads, hidden, channels)
        fill(encoder, weights, str(file))
        return encoder.eval()

    def network(self, encoder: Encoder) -> str:
        return f"patch {encoder.patch}, width {encoder.width}, relative positions, class token"


# ------------------------------------------------------------------------------ the network


class RelativeAttention(nn.Module):
    """Attention with a bias for queries and values, and none for keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        shift = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, shift).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, N, D / heads)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class RelativeBlock(nn.Module):
    """A block whose two outputs are scaled, feature by feature."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=EPS) for _ in range(2))
        self.attn = RelativeAttention(width, heads)
        self.mlp = Mlp(width, hidden)
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.ones(width)) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x), bias)
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class RelativeBias(nn.Module):
    """Bias per distance and head; the table is resized for images of another size."""

    def __init__(self, side: int, heads: int) -> None:
        super().__init__()
        self.side = side
        table = torch.zeros((2 * side - 1) ** 2 + CLASS, heads)
        self.relative_position_bias_table = nn.Parameter(table)

    def forward(self, rows: int, cols: int) -> Tensor:
        """(heads, 1 + N, 1 + N) for a grid of rows x cols, the class token first."""
        table = self.relative_position_bias_table
        edge, size = 2 * self.side - 1, (2 * rows - 1, 2 * cols - 1)
        grid = table[:-CLASS].T.reshape(1, -1, edge, edge)  # (1, heads, 2 S - 1, 2 S - 1)
        if size != (edge, edge):
            grid = F.interpolate(grid, size=size, mode="bicubic", align_corners=False)
        row, col = (torch.arange(n, device=table.device) for n in (rows, cols))
        down = row[:, None] - row + rows - 1  # (rows, rows), 0 for the farthest above
        right = col[:, None] - col + cols - 1
        # (heads, rows, cols, rows, cols): from a patch to a patch
        patches = grid[0][:, down[:, None, :, None], right[None, :, None, :]]
        patches = patches.flatten(3).flatten(1, 2)  # (heads, N, N)
        bias = F.pad(patches, (1, 0, 1, 0))
        bias[:, 0, 1:], bias[:, 1:, 0], bias[:, 0, 0] = *table[-CLASS:-1, :, None], table[-1]
        return bias


class RelativeTransformer(nn.Module):
    """Patches to features, with the interface of `VisionTransformer`."""

    def __init__(
        self,
        side: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        self.side, self.patch, self.width, self.heads = side, patch, width, heads
        self.transform: Callable[[Pictures], Tensor] = no_transform
        self.pool: Pool = "cls"
        self.channels, self.patch_embed = channels, PatchEmbed(patch, width, channels)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.rel_pos_bias = RelativeBias(side, heads)
        self.blocks = nn.ModuleList(RelativeBlock(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=EPS)

    def outputs(self, images: Tensor, index: Tensor | None, layers: int) -> list[Tensor]:
        """Tokens (B, 1 + K, D) after each of the last `layers` blocks, normed."""
        height, width = images.shape[-2:]
        if images.shape[1] != self.channels:
            raise ValueError(f"images have {images.shape[1]} channels; expected {self.channels}")
        if height % self.patch or width % self.patch:
            raise ValueError(f"images of {height}x{width} do not divide into patches {self.patch}")
        x = self.patch_embed(images)
        bias = self.rel_pos_bias(height // self.patch, width // self.patch)[None]
        if index is not None:  # (B, heads, 1 + K, 1 + K)
            x, token = take(x, index), F.pad(index + 1, (1, 0))  # (B, 1 + K)
            bias = bias[0, :, token[:, :, None], token[:, None, :]].transpose(0, 1)
        x, found = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1), []
        for i, block in enumerate(self.blocks):
            x = block(x, bias)
            if i >= len(self.blocks) - layers:
                found.append(self.norm(x))
        return found

    def forward(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Features (B, N, D) of all patches, or (B, K, D) of those at `index` (B, K)."""
        return self.outputs(images, index, 1)[-1][:, 1:]

    def features(self, images: Pictures, layers: int = 1, pool: Pool = "mean") -> Tensor:
        """The last `layers` blocks, each normed and pooled, (B, layers * D)."""
        if pool not in ("mean", "cls"):
            raise ValueError(f'pool must be "mean" or "cls", got {pool!r}')
        if not 1 <= layers <= len(self.blocks):
            raise ValueError(f"layers must be between 1 and {len(self.blocks)}, got {layers}")
        images = as_input(images, self.transform).to(self.cls_token)
        found = self.outputs(images, None, layers)
        return torch.cat([x[:, 1:].mean(1) if pool == "mean" else x[:, 0] for x in found], dim=1)
