"""The predictor g: from what is seen, and where to look, to what the masked patches hold.

Shapes: B images, C context tokens, M target blocks of K tokens, D encoder width, P own width, T
numbers predicted per patch: D features, or its pixels.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.method.encoder import EPS, Block, initialise, through
from stopmim.method.positions import Positions

# I-JEPA keeps these at the top of its predictor; here they belong to `positions`.
_RELEASED_NAMES = {
    "positions.table": "predictor_pos_embed",
    "positions.mask_token": "mask_token",
}


class Noise(NamedTuple):
    """The draws of one batch, as `draw` of the positions returns them; None: no uncertainty."""

    masked: Tensor | None = None  # (M, B, K, D) for StoP
    context: Tensor | None = None  # (B, C, D)


class Predictor(nn.Module):
    """A narrow transformer over context and masked tokens.

    Args:
        positions: what is told about places; `Positions` is I-JEPA, `StochasticPositions` is StoP.
        encoder_width: D.
        noisy: the tokens whose positions are stochastic; the paper's choice is "masked".
        tied: A projects the context and the noise. False gives the noise a matrix of its own,
            which then shrinks to nothing: the paper's collapse.
        outputs: T; as many as the encoder is wide without it.
    """

    recompute = False  # as VisionTransformer.recompute

    def __init__(
        self,
        positions: Positions,
        encoder_width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        *,
        noisy: Literal["masked", "context", "both"] = "masked",
        tied: bool = True,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        if noisy not in ("masked", "context", "both"):
            raise ValueError(f"noisy must be masked, context or both, got {noisy!r}")
        width = positions.width
        if width % heads:
            raise ValueError(f"predictor width {width} is not divisible by {heads} heads")
        self.predictor_embed = nn.Linear(encoder_width, width)  # A, and a bias for the context
        self.noise_embed = None if tied else nn.Linear(encoder_width, width, bias=False)
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
        """The noise of one batch, drawn outside of `forward` (a generator breaks a compiled graph).

        `context_index` is (B, C), `target_index` (M, B, K). `dtype` as in `Positions.draw`.
        """
        masked = context = None
        if self.noisy_masked:
            seen = context_index.shape[1]
            masked = self.positions.draw(
                target_index, self.noise_layer, generator, seen=seen, dtype=dtype
            )
        if self.noisy_context:
            context = self.positions.draw(context_index, self.noise_layer, generator, dtype=dtype)
        return Noise(masked, context)

    def forward(
        self,
        context: Tensor,
        context_index: Tensor,
        target_index: Tensor,
        noise: Noise | None = None,
        moved_by: Tensor | None = None,
    ) -> Tensor:
        """What is predicted, (M, B, K, T), of the patches `target_index` (M, B, K).

        The blocks are predicted independently: each sees the context (B, C, D) and itself alone.
        A context of more tokens than `context_index` (B, C) has those of no place first (MAE's
        class token), whose position is zeros. `moved_by` (2,) asks for places that far down and to
        the right of the patches, if certain.
        """
        noise = noise or Noise()
        for tokens, given, noisy in (
            ("masked", noise.masked, self.noisy_masked),
            ("context", noise.context, self.noisy_context),
        ):
            if given is not None and not noisy:
                raise ValueError(f"noise for {tokens} tokens, but their positions are certain")
        blocks, batch, _ = target_index.shape
        places = self._positions(context_index, noise.context, "context", self.noisy_context)
        if placeless := context.shape[1] - context_index.shape[1]:
            places = F.pad(places, (0, 0, placeless, 0))
        c = self.predictor_embed(context) + places  # c_i = A s_i + psi_i
        if moved_by is None:
            seen = context[:, placeless:]
            m = self._positions(target_index, noise.masked, "masked", self.noisy_masked, seen)
        else:
            m = self.positions.mean(target_index, "masked", moved_by)
        c = c.expand(blocks, *c.shape).flatten(0, 1)  # (B, C, P) -> (M * B, C, P), block-major
        x = torch.cat([c, m.flatten(0, 1).to(c.dtype)], dim=1)  # (M * B, C + K, P)
        *before, last = self.predictor_blocks
        x = through(before, x, self.recompute and torch.is_grad_enabled())
        x = last(x, first=c.shape[1])  # masked tokens only: nobody asks for the others
        x = self.predictor_proj(self.predictor_norm(x))
        return x.unflatten(0, (blocks, batch))

    def _positions(
        self,
        index: Tensor,
        noise: Tensor | None,
        tokens: Literal["masked", "context"],
        noisy: bool,
        context: Tensor | None = None,
    ) -> Tensor:
        if not noisy:
            return self.positions.mean(index, tokens)
        return self.positions(index, self.noise_layer, noise=noise, tokens=tokens, context=context)


def _to_released_names(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    for ours, released in _RELEASED_NAMES.items():
        state[prefix + released] = state.pop(prefix + ours)


def _from_released_names(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for ours, released in _RELEASED_NAMES.items():
        if prefix + released in state:
            state[prefix + ours] = state.pop(prefix + released)
