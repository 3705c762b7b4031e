"""Where the predictor is told its tokens are. `StochasticPositions` is the paper's contribution.

Shapes: B images, K tokens of a target block, N = side * side patches, D encoder width, P predictor
width. `index` is int64 patch numbers in row-major order and may have any leading dimensions.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Base = Literal["sincos", "learned"]
Covariance = Literal["projected", "fixed"]
Bias = Literal["mask_token", "project"]
Tokens = Literal["masked", "context"]


def _one_of(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")


def sincos_2d(side: int, width: int) -> Tensor:
    """Fixed 2-D sine-cosine table (side * side, width), in the row-major order of the patches."""
    if width % 4:
        raise ValueError(f"sine-cosine positions need a width divisible by 4, got {width}")
    omega = 1.0 / 10000 ** (torch.arange(width // 4, dtype=torch.float64) / (width // 4))  # (P/4,)
    row, col = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    # Columns fill the first half: MAE, I-JEPA and StoP build their grid with the width first.
    angles = [axis.reshape(-1, 1).double() * omega for axis in (col, row)]  # 2 x (N, P/4)
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1).float()


class Positions(nn.Module):
    """Tokens at certain places: ``psi_j + m~`` when masked, ``psi_j`` in the context.

    Args:
        side: patches along one edge of the grid.
        width: P, the width of the tokens that receive the positions.
        base: the table psi, fixed sine-cosine or learned.
        bias: "mask_token" adds the learned m~ to masked tokens. "project" is the released StoP
            code, which creates m~ and never uses it: it stays in the state dict, frozen (a
            parameter without gradient would stop DistributedDataParallel).
    """

    table: Tensor  # psi, (1, N, P)

    def __init__(
        self, side: int, width: int, *, base: Base = "sincos", bias: Bias = "mask_token"
    ) -> None:
        super().__init__()
        _one_of("base", base, get_args(Base))
        _one_of("bias", bias, get_args(Bias))
        self.side, self.width, self.bias = side, width, bias
        if base == "learned":
            self.table = nn.Parameter(0.02 * torch.randn(1, side * side, width))
        else:
            self.register_buffer("table", sincos_2d(side, width)[None])
        self.mask_token = nn.Parameter(
            0.02 * torch.randn(1, 1, width), requires_grad=bias == "mask_token"
        )

    def mean(self, index: Tensor, tokens: Tokens = "masked") -> Tensor:
        """The position without noise, (..., P): psi_j, and m~ on masked tokens."""
        _one_of("tokens", tokens, get_args(Tokens))
        token = self.table[0, index]
        if tokens == "masked" and self.bias == "mask_token":
            token = token + self.mask_token[0, 0]
        return token

    def forward(
        self,
        index: Tensor,
        project: nn.Linear | None = None,
        generator: torch.Generator | None = None,
        *,
        noise: Tensor | None = None,
        tokens: Tokens = "masked",
    ) -> Tensor:
        return self.mean(index, tokens)


class StochasticPositions(Positions):
    """Tokens at uncertain places: ``m_j = psi_j + A n_j + m~`` with ``n_j ~ N(0, sigma I)``.

    `sigma` is the paper's, a variance: the tokens have the covariance ``Sigma = sigma A A^T``.
    The released code passes its 0.25 as a standard deviation, which is sigma = 0.0625 here.

    ``A`` is the matrix that brings encoder features to the predictor, handed in by the caller as
    `project` so that the tie can be seen where it is made. A free ``A`` would shrink to zero, which
    is plain I-JEPA again; tied, it cannot, because the context tokens need it.

    Args:
        side, width, base: see `Positions`.
        sigma: variance of each component of n_j.
        covariance: "projected" is sigma A A^T; "fixed" is sigma I, the paper's ablation, with the
            noise drawn in the width of the predictor and no projection.
        bias: "mask_token" is the paper: the bias of `project` never touches the noise, m~ is a
            parameter of its own. "project" is the released code: the bias of `project` takes the
            place of m~, and there is noise in evaluation too.
        share: chance of a token to be at an uncertain place; the others are told theirs exactly.
    """

    def __init__(
        self,
        side: int,
        width: int,
        sigma: float,
        *,
        base: Base = "sincos",
        covariance: Covariance = "projected",
        bias: Bias = "mask_token",
        share: float = 1.0,
    ) -> None:
        super().__init__(side, width, base=base, bias=bias)
        _one_of("covariance", covariance, get_args(Covariance))
        if not 0 <= sigma < math.inf:
            raise ValueError(f"sigma is a variance and must be finite and >= 0, got {sigma}")
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        self.sigma, self.covariance, self.share = sigma, covariance, share

    def draw(
        self, index: Tensor, project: nn.Linear, generator: torch.Generator | None = None
    ) -> Tensor:
        """n_j for every token of `index`, already scaled by sqrt(sigma): (..., D), float32.

        (..., P) for ``covariance="fixed"``. Always float32: bfloat16 has too few bits to draw in.
        """
        width = self.width if self.covariance == "fixed" else project.in_features
        shape = (*index.shape, width)
        noise = torch.randn(shape, generator=generator, device=index.device).mul_(
            math.sqrt(self.sigma)
        )
        if self.share < 1:
            chance = torch.rand(index.shape, generator=generator, device=index.device)
            noise.masked_fill_((chance >= self.share)[..., None], 0.0)
        return noise

    def forward(
        self,
        index: Tensor,
        project: nn.Linear | None = None,
        generator: torch.Generator | None = None,
        *,
        noise: Tensor | None = None,
        tokens: Tokens = "masked",
    ) -> Tensor:
        """Positions (..., P) of the tokens at patches `index` (...).

        Args:
            project: the caller's linear layer A, from D to P.
            generator: the source of the draw; the default generator without it.
            noise: replaces the draw; as `draw` returns it.
            tokens: "context" leaves out m~, for context tokens at uncertain places.
        """
        if project is None:
            raise ValueError("stochastic positions need the layer A that projects the context")
        token = self.mean(index, tokens)
        if noise is None:
            if not (self.training or self.bias == "project"):
                return token
            noise = self.draw(index, project, generator)
        if self.covariance == "fixed":
            return token + noise
        # The weight alone: the bias of A must not reach the noise, m~ is its own parameter.
        bias = project.bias if self.bias == "project" else None
        return token + F.linear(noise, project.weight, bias)  # (..., D) -> (..., P)
