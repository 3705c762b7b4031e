"""Positions of the predictor's tokens. `StochasticPositions` is the paper's contribution.

A kind of position owns everything about itself: how noise is drawn (`draw`), what a token
receives (`forward`), how strong the noise is (`power`), its name in reports (`method`,
`describe`), the note in exported files (`tag`), why it cannot be exported (`not_exportable`) and
what changes during training (`at_step`).

Shapes: B images, K tokens of a target block, C context tokens, N = side * side patches, D encoder
width, P predictor width. `index` holds int64 patch numbers in row-major order, with any leading
dimensions.

Longer than other files, so that the kinds can be read side by side.
"""

import functools
import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.base import schedules

Base = Literal["sincos", "learned"]  # the table psi
Covariance = Literal["tied", "untied", "fixed", "conditioned"]  # as the config calls it
Bias = Literal["mask_token", "project"]  # the paper; the released code
Tokens = Literal["masked", "context"]  # which tokens receive the positions
Source = torch.Generator | None  # of a draw; torch's default generator without one
Layer = nn.Linear | None  # A, from D to P; certain positions need none

FLAT = 1e-6  # variance per component below which context tokens count as identical


def _one_of(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")


def _check_variance(sigma: float) -> None:
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is a variance and must be finite and >= 0, got {sigma}")


def sincos_2d(side: int, width: int) -> Tensor:
    """Fixed 2-D sine-cosine table (side * side, width), in the row-major order of the patches."""
    if width % 4:
        raise ValueError(f"sine-cosine positions need a width divisible by 4, got {width}")
    omega = _frequencies(width)  # (P/4,)
    row, col = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")  # (S, S)
    # Columns fill the first half: MAE, I-JEPA and StoP build their grid with the width first.
    angles = [axis.reshape(-1, 1).double() * omega for axis in (col, row)]  # 2 x (N, P/4)
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1).float()


def _frequencies(width: int, device: torch.device | None = None) -> Tensor:
    """Radians per patch of each sine-cosine pair, (P/4,) in float64."""
    # A quarter of the channels each: sine and cosine of the column, then of the row.
    exponent = torch.arange(width // 4, dtype=torch.float64, device=device) / (width // 4)
    return 1.0 / 10000**exponent  # 1 for the fastest pair, down to 1/10000


def shifted(psi: Tensor, by: Tensor) -> Tensor:
    """Sine-cosine positions `psi` (..., P), moved down and right by `by` (..., 2) patches.

    Uses the addition theorem on the table instead of coordinates: a shift of 0 is exactly `psi`.
    """
    omega = _frequencies(psi.shape[-1], psi.device).to(psi.dtype)
    halves = []
    # Columns fill the first half of the channels: see sincos_2d.
    for half, patches in zip(psi.chunk(2, dim=-1), (by[..., 1:], by[..., :1]), strict=True):
        (sin, cos), angle = half.chunk(2, dim=-1), patches.to(psi.dtype) * omega  # (..., P/4)
        halves += [sin * angle.cos() + cos * angle.sin(), cos * angle.cos() - sin * angle.sin()]
    return torch.cat(halves, dim=-1)  # (..., P)


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
    uncertain = False  # whether there is noise to draw
    conditioned = False  # whether the noise is made from context tokens
    untied = False  # whether the noise has a projection of its own instead of the context's A
    noise_in_evaluation = False  # as the released code; ours draws in training only

    def __init__(
        self, side: int, width: int, *, base: Base = "sincos", bias: Bias = "mask_token"
    ) -> None:
        super().__init__()
        _one_of("base", base, get_args(Base))
        _one_of("bias", bias, get_args(Bias))
        self.side, self.width, self.base, self.bias = side, width, base, bias
        if base == "learned":
            self.table = nn.Parameter(0.02 * torch.randn(1, side * side, width))
        else:  # a buffer: saved, as I-JEPA saves it, and never trained
            self.register_buffer("table", sincos_2d(side, width)[None])
        # m~, shared by all masked tokens; (1, 1, P) is I-JEPA's shape.
        shared = 0.02 * torch.randn(1, 1, width)
        self.mask_token = nn.Parameter(shared, requires_grad=bias == "mask_token")

    def mean(
        self, index: Tensor, tokens: Tokens = "masked", moved_by: Tensor | None = None
    ) -> Tensor:
        """The position without noise, (..., P): psi_j, plus m~ on masked tokens.

        `moved_by` (..., 2) shifts it down and right of the patch, for a sine-cosine table.
        """
        _one_of("tokens", tokens, get_args(Tokens))
        token = self.table[0, index]  # psi_j, (..., P)
        if moved_by is not None:
            token = shifted(token, moved_by)
        if tokens == "masked" and self.bias == "mask_token":
            token = token + self.mask_token[0, 0]  # psi_j + m~
        return token

    def forward(
        self,
        index: Tensor,
        project: Layer = None,
        generator: Source = None,
        *,
        noise: Tensor | None = None,
        tokens: Tokens = "masked",
        context: Tensor | None = None,
    ) -> Tensor:
        """Positions (..., P) of the tokens at patches `index` (...).

        Args:
            project: the caller's linear layer A.
            noise: replaces the draw; as `draw` returns it.
            tokens: "context" leaves out m~, for context tokens at uncertain places.
            context: features (B, C, D) that ``covariance="conditioned"`` makes noise from; the
                last dimensions of `index` are then (B, K).
        """
        if noise is None and self.uncertain and (self.training or self.noise_in_evaluation):
            seen = 0 if context is None else context.shape[-2]
            noise = self.draw(index, project, generator, seen=seen)
            # Training under autocast draws outside and passes noise in the right dtype already.
            noise = noise if noise is None or project is None else noise.to(project.weight.dtype)
        if noise is None:
            return self.mean(index, tokens)
        return self.noisy(index, noise, project, tokens, context)

    def noisy(
        self, index: Tensor, noise: Tensor, project: Layer, tokens: Tokens, context: Tensor | None
    ) -> Tensor:
        """Positions (..., P) with `noise`, as `draw` returns it; without effect where certain."""
        return self.mean(index, tokens)

    def draw(
        self,
        index: Tensor,
        project: Layer,
        generator: Source = None,
        *,
        seen: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor | None:
        """Noise for every token of `index`, as `forward` takes it; None without uncertainty.

        `seen` is the number of context tokens. The result has `dtype` if that is exactly a float32
        draw rounded, else float32.
        """
        return None

    def shared(self, project: Layer) -> Tensor | None:
        """Vector that masked tokens with the noise of `project` share, m~ (1, 1, P), or None."""
        return self.mask_token if self.bias == "mask_token" else None

    def power(self, a: Tensor, context: Tensor | None = None) -> Tensor:
        """Mean squared length that noise adds to a position, for the current A (P, D)."""
        return self.table.new_zeros(())

    def at_step(self, step: int, steps_per_epoch: int) -> None:
        """Sets the values of update number `step` (from 0), if any change over a run."""

    # How reports and exported files describe it.

    @property
    def method(self) -> str:
        """Addition to the name of the method: "I-JEPA" + this."""
        return " with learned positions" if self.base == "learned" else ""

    def describe(self) -> str:
        """A phrase for people."""
        return "learned positions" if self.base == "learned" else "sine-cosine positions"

    def tag(self) -> dict[str, Any]:
        """Facts that weights alone do not tell, for exported files; read by `build.from_tag`."""
        return {"positions": self.base, "bias": self.bias}

    @property
    def not_exportable(self) -> str:
        """Reason why the layouts of I-JEPA and MAE cannot hold it; "" if they can."""
        return "learned positions" if self.base == "learned" else ""


class StochasticPositions(Positions):
    """Tokens at uncertain places: ``m_j = psi_j + A n_j + m~`` with ``n_j ~ N(0, sigma I)``.

    `sigma` is the paper's, a variance: the tokens have the covariance ``Sigma = sigma A A^T``.
    The released code passes its 0.25 as a standard deviation, which is sigma = 0.0625 here.

    ``A`` is the matrix that brings encoder features to the predictor, handed in by the caller as
    `project` so that the tie is visible where it is made. A free ``A`` would shrink to zero, which
    is plain I-JEPA again; tied, it cannot, because the context tokens need it.

    Args:
        side, width, base: see `Positions`.
        sigma: variance of each component of n_j.
        covariance: "tied" (also called "projected") is sigma A A^T with the A of the context;
            "untied" is the same with another matrix in `project`, the paper's collapse; "fixed" is
            sigma I, the paper's ablation, with noise drawn in the width of the predictor and no
            projection; "conditioned" makes the noise from the image, which the paper leaves to
            future work: see `_mixture`.
        bias: "mask_token" is the paper: the bias of `project` never touches the noise, m~ is a
            parameter of its own. "project" is the released code: the bias of `project` replaces
            m~, and there is noise in evaluation too.
        share: probability that the place of a token is uncertain; the others have certain places.
        levels: factors of sigma, one of which is drawn for all tokens of a block (N-JEPA, arXiv
            2507.15216, has such levels, with a fixed covariance); None is 1 for all.
    """

    uncertain = True
    ramp = 0.0  # epochs over which sigma grows linearly from 0; negative: falls to 0; 0: neither

    def __init__(
        self,
        side: int,
        width: int,
        sigma: float,
        *,
        base: Base = "sincos",
        covariance: Covariance | Literal["projected"] = "tied",
        bias: Bias = "mask_token",
        share: float = 1.0,
        levels: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__(side, width, base=base, bias=bias)
        _one_of("covariance", covariance, (*get_args(Covariance), "projected"))
        self.levels = levels or (1.0,)
        for variance in (sigma, *self.levels):
            _check_variance(variance)
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        self.covariance: Covariance = "tied" if covariance == "projected" else covariance
        self.sigma, self.full_sigma, self.share = sigma, sigma, share
        self.conditioned, self.untied = covariance == "conditioned", covariance == "untied"
        self.noise_in_evaluation = bias == "project"

    def draw(
        self,
        index: Tensor,
        project: Layer,
        generator: Source = None,
        *,
        seen: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """n_j for every token of `index`, already scaled by sqrt(sigma): (..., D).

        (..., P) for ``covariance="fixed"``. For "conditioned" it is e_j, (..., C): the weights of
        the `seen` context tokens in n_j.
        """
        if project is None:
            raise ValueError("stochastic positions need the layer A that projects the context")
        width, variance = project.in_features, self.sigma
        if self.covariance == "fixed":
            width = self.width  # sigma I in the predictor's own space
        elif self.conditioned:
            width, variance = seen, self.sigma / max(1, seen)  # weights of C context tokens
        # A GPU draws in float32 and rounds to `dtype`; a CPU would draw with bfloat16's few bits.
        # Levels scale what was drawn, and are exact in float32 only.
        drawn = dtype if index.is_cuda and len(self.levels) == 1 else torch.float32
        noise = torch.empty((*index.shape, width), device=index.device, dtype=drawn)
        noise.normal_(0.0, math.sqrt(variance), generator=generator)
        if self.share < 1:
            chance = torch.rand(index.shape, generator=generator, device=index.device)  # per token
            noise.masked_fill_((chance >= self.share)[..., None], 0.0)
        if len(self.levels) > 1:
            shape = (*index.shape[:-1], 1, 1)  # (M, B, 1, 1): one for the tokens of a block
            level = torch.randint(len(self.levels), shape, generator=generator, device=index.device)
            noise *= _roots(self.levels, index.device)[level]
        return noise

    def shared(self, project: Layer) -> Tensor | None:
        if self.bias == "project" and self.covariance != "fixed" and project is not None:
            return project.bias  # (P,): in the released code it comes with the noise
        return super().shared(project)

    def power(self, a: Tensor, context: Tensor | None = None) -> Tensor:
        sigma = self.share * self.sigma * sum(self.levels) / len(self.levels)  # of the mean token
        if self.covariance == "fixed":
            return torch.tensor(sigma * self.width)  # the trace of sigma I
        directions = a  # E|A n|^2 = sigma |A|^2
        if self.conditioned:
            mixture = _mixture(context)  # (B, C, D)
            directions = F.linear(mixture, a) / math.sqrt(mixture[..., 0].numel())
        return sigma * directions.square().sum()

    def noisy(
        self, index: Tensor, noise: Tensor, project: Layer, tokens: Tokens, context: Tensor | None
    ) -> Tensor:
        token = self.mean(index, tokens)  # psi_j + m~, (..., P)
        if self.covariance == "fixed":
            return token + noise  # drawn in the width of the predictor: (..., P)
        if project is None:
            raise ValueError("stochastic positions need the layer A that projects the context")
        if self.conditioned:
            noise = noise @ _mixture(context).to(noise.dtype)  # (..., B, K, C) -> (..., B, K, D)
        # The weight alone: the bias of A must not reach the noise, m~ is its own parameter.
        bias = project.bias if self.bias == "project" else None
        return token + F.linear(noise, project.weight, bias)  # (..., D) -> (..., P)

    def at_step(self, step: int, steps_per_epoch: int) -> None:
        if total := abs(int(self.ramp * steps_per_epoch)):  # in updates
            start, final = (0.0, self.full_sigma) if self.ramp > 0 else (self.full_sigma, 0.0)
            self.sigma = schedules.linear(step, total=total, start=start, final=final)

    @property
    def method(self) -> str:
        return " + StoP"

    def describe(self) -> str:
        released = " as released (no mask token)" if self.bias == "project" else ""
        stop = f"StoP{released}, sigma {self.full_sigma:g} (a variance)"
        factors = ", ".join(f"{level:g}" for level in self.levels)
        levels = f"times one of {factors}" if len(self.levels) > 1 else ""
        way = "growing from" if self.ramp > 0 else "falling to"
        ramp = f"{way} 0 in {abs(self.ramp):g} epochs" if self.ramp else ""
        return ", ".join(filter(None, (stop, levels, ramp, f"{self.covariance} covariance")))

    def tag(self) -> dict[str, Any]:
        # "tied" is left out: only tied noise can be exported.
        noise = {"positions": "stochastic", "sigma": self.sigma, "share": self.share}
        noise |= {"levels": list(self.levels)} if len(self.levels) > 1 else {}
        return super().tag() | noise

    @property
    def not_exportable(self) -> str:
        kinds = {"untied": "untied noise", "tied": ""}
        own = kinds.get(self.covariance, f"a {self.covariance} covariance")
        return own or super().not_exportable


@functools.cache  # kept on the device: copying it there each time would make the host wait
def _roots(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, device=device).sqrt()


def _mixture(context: Tensor | None) -> Tensor:
    """Directions (B, C, D) that noise conditioned on context tokens s_i is mixed from.

    ``n_j = sum_i e_ji (s_i - mean s) sqrt(D / tr C_s)`` with ``e_ji ~ N(0, sigma / C)``: a Gaussian
    with the covariance C_s of the context tokens of this very image, scaled to the total variance
    sigma D that n_j has in StoP, so that sigma means the same.

    No A can make it collapse. Behind A it is ``Sigma = sigma D / tr C_s * A C_s A^T``, in a fixed
    ratio to the covariance ``A C_s A^T`` of the projected tokens: whatever lowers the noise lowers
    the visible context by the same factor, in every direction. Isotropic noise leaves a way out:
    an A that keeps the directions in which tokens differ most and drops the noise of all others.
    No gradient reaches the encoder through the noise: the tokens are detached. One way out remains,
    as in StoP: features on a larger scale with a smaller A. Where all tokens are the same, or there
    is only one, there is no noise.
    """
    if context is None:
        raise ValueError("conditioned noise is made from context tokens: none were given")
    s = context.detach().float()  # (B, C, D)
    s = s - s.mean(dim=-2, keepdim=True)  # over the tokens of an image
    variance = s.square().mean(dim=(-2, -1), keepdim=True)  # tr C_s / D, (B, 1, 1)
    return s * variance.clamp(min=FLAT).rsqrt()  # (B, C, D), mean square 1


class JitteredPositions(Positions):
    """Tokens moved at random: ``psi(row + e1, col + e2) + m~`` with ``e ~ N(0, sigma)`` in patches.

    The plain baseline of StoP: uncertain places without anything learned.

    Args:
        side, width, bias: see `Positions`; the table is sine-cosine, which has values in between.
        sigma: variance of each coordinate, in patches squared.
    """

    uncertain = True

    def __init__(self, side: int, width: int, sigma: float, *, bias: Bias = "mask_token") -> None:
        super().__init__(side, width, bias=bias)
        _check_variance(sigma)
        self.sigma = sigma

    def draw(
        self, index: Tensor, project: Layer = None, generator: Source = None, **unused: Any
    ) -> Tensor:
        """Shift of each token of `index`, down and right: (..., 2), float32."""
        shift = torch.randn((*index.shape, 2), generator=generator, device=index.device)
        return shift.mul_(math.sqrt(self.sigma))

    def power(self, a: Tensor, context: Tensor | None = None) -> Tensor:
        # E|exp(i w (x + e)) - exp(i w x)|^2 = 2 - 2 exp(-w^2 sigma / 2), for rows and for columns.
        decay = torch.exp(-_frequencies(self.width).square() * self.sigma / 2)
        return 4 * (1 - decay).sum()

    def noisy(
        self, index: Tensor, noise: Tensor, project: Layer, tokens: Tokens, context: Tensor | None
    ) -> Tensor:
        return self.mean(index, tokens, moved_by=noise)

    @property
    def method(self) -> str:
        return " with jittered positions"

    def describe(self) -> str:
        return f"jittered positions, sigma {self.sigma:g} patches squared"

    def tag(self) -> dict[str, Any]:
        return super().tag() | {"positions": "jitter", "sigma": self.sigma}

    @property
    def not_exportable(self) -> str:
        return "jittered positions"
