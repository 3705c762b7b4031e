"""The predictor g: from visible features and places to features of the masked patches.

Shapes: B images, C context tokens, M target blocks of K tokens, D encoder width, P own width, T
numbers predicted per patch: D features, or its pixels.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.gpu.blocks import USUAL, through
from stopmim.method.encoder import EPS, Block, initialise
from stopmim.method.positions import Positions, Tokens

# I-JEPA keeps these at the top level of its predictor; here they belong to `positions`.
_RELEASED_NAMES = {"positions.table": "predictor_pos_embed", "positions.mask_token": "mask_token"}

Noisy = Literal["masked", "context", "both"]


class Noise(NamedTuple):
    """The draws of one batch, as `draw` of the positions returns them; None: no uncertainty."""

    masked: Tensor | None = None  # (M, B, K, D) for StoP
    context: Tensor | None = None  # (B, C, D)

    def zeros(self) -> "Noise":
        """The same shapes without any noise: every token at its mean position."""
        return Noise(*(None if x is None else torch.zeros_like(x) for x in self))


class Predictor(nn.Module):
    """A narrow transformer over context and masked tokens.

    Args:
        positions: how tokens get their places; `Positions` is I-JEPA, `StochasticPositions` StoP.
        encoder_width: D.
        noisy: the tokens whose positions are stochastic; the paper's choice is "masked".
        outputs: T; the encoder width by default.
    """

    way = USUAL  # how its blocks are computed

    def __init__(
        self,
        positions: Positions,
        encoder_width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        *,
        noisy: Noisy = "masked",
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        if noisy not in ("masked", "context", "both"):
            raise ValueError(f"noisy must be masked, context or both, got {noisy!r}")
        width = positions.width
        if width % heads:
            raise ValueError(f"predictor width {width} is not divisible by {heads} heads")
        self.noisy, self.heads = noisy, heads
        self.predictor_embed = nn.Linear(encoder_width, width)  # A, and a bias for the context
        # Untied noise has a matrix of its own, which then shrinks to nothing: the paper's collapse.
        own = positions.untied
        self.noise_embed = nn.Linear(encoder_width, width, bias=False) if own else None
        self.predictor_blocks = nn.ModuleList(Block(width, heads, mlp_ratio) for _ in range(depth))
        self.predictor_norm = nn.LayerNorm(width, eps=EPS)
        self.predictor_proj = nn.Linear(width, outputs or encoder_width)
        self.apply(initialise)
        self.positions = positions
        self.noisy_masked = positions.uncertain and noisy in ("masked", "both")
        self.noisy_context = positions.uncertain and noisy in ("context", "both")
        self.register_state_dict_post_hook(_to_released_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_released_names)  # type: ignore[no-untyped-call]

    @property
    def noise_layer(self) -> nn.Linear:
        """The A of ``A n_j``. This line is the tie ``A = B`` of the paper."""
        return self.predictor_embed if self.noise_embed is None else self.noise_embed

    def draw(
        self,
        context_index: Tensor,
        target_index: Tensor,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Noise:
        """Draws the noise of one batch, outside `forward`: a generator breaks a compiled graph.

        `context_index` is (B, C), `target_index` (M, B, K). `dtype` as in `Positions.draw`.
        """
        masked = context = None
        layer, seen = self.noise_layer, context_index.shape[1]  # A; C
        if self.noisy_masked:
            masked = self.positions.draw(target_index, layer, generator, seen=seen, dtype=dtype)
        if self.noisy_context:
            context = self.positions.draw(context_index, layer, generator, dtype=dtype)
        return Noise(masked, context)

    def forward(
        self,
        context: Tensor,
        context_index: Tensor,
        target_index: Tensor,
        noise: Noise | None = None,
        moved_by: Tensor | None = None,
        visible: bool = False,
    ) -> Tensor:
        """Predictions (M, B, K, T) for the patches `target_index` (M, B, K).

        The blocks are predicted independently: each sees the context (B, C, D) and itself only.
        Context tokens beyond `context_index` (B, C) come first and have no place (MAE's class
        token): their position is zero. `moved_by` (2,) moves the places to predict that far down
        and right; positions must be certain. With `visible` the result is (M, B, C + K, T): the
        visible patches come first, predicted once beside every block.
        """
        noise = noise or Noise()
        self._check(noise)
        blocks, batch, _ = target_index.shape
        places = self._positions(context_index, noise.context, "context")
        if placeless := context.shape[1] - context_index.shape[1]:
            places = F.pad(places, (0, 0, placeless, 0))  # zeros before the first token
        c = self.predictor_embed(context) + places  # c_i = A s_i + psi_i, (B, C, P)
        # m_j = A n_j + psi_j + m~, (M, B, K, P)
        if moved_by is None:
            m = self._positions(target_index, noise.masked, "masked", context[:, placeless:])
        else:
            m = self.positions.mean(target_index, "masked", moved_by)
        c = c.expand(blocks, *c.shape).flatten(0, 1)  # (B, C, P) -> (M * B, C, P), block-major
        x = torch.cat([c, m.flatten(0, 1).to(c.dtype)], dim=1)  # (M * B, C + K, P)
        # All blocks and the norm; the last block skips tokens that are not read: (M * B, K, P)
        to, first = self.predictor_norm, placeless if visible else c.shape[1]
        x = self.predictor_proj(through(self.predictor_blocks, x, to, self.way, first))
        return x.unflatten(0, (blocks, batch))  # (M, B, K, T)

    def _check(self, noise: Noise) -> None:
        """Raises ValueError if there is noise for tokens whose positions are certain."""
        for tokens, noisy in (("masked", self.noisy_masked), ("context", self.noisy_context)):
            if getattr(noise, tokens) is not None and not noisy:
                raise ValueError(f"noise for {tokens} tokens, but their positions are certain")

    def _positions(
        self, index: Tensor, noise: Tensor | None, tokens: Tokens, context: Tensor | None = None
    ) -> Tensor:
        if not (self.noisy_masked if tokens == "masked" else self.noisy_context):
            return self.positions.mean(index, tokens)
        return self.positions(index, self.noise_layer, noise=noise, tokens=tokens, context=context)

    def tag(self) -> dict[str, Any]:
        """Facts that weights alone do not tell, for exported files; read by `build.from_tag`."""
        noisy = self.noisy if self.positions.uncertain else "masked"  # the default of such files
        return self.positions.tag() | {"tokens": noisy, "heads": self.heads}


def _to_released_names(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    for ours, released in _RELEASED_NAMES.items():
        state[prefix + released] = state.pop(prefix + ours)


def _from_released_names(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for ours, released in _RELEASED_NAMES.items():
        if prefix + released in state:
            state[prefix + ours] = state.pop(prefix + released)
