"""Section 2 of the paper: patchify, mask, encode the context, predict, compare with a target.

`get_target` of the paper is `MaskedImageModel.targets`: features of the EMA encoder (I-JEPA).

Shapes: B images, C context patches, M target blocks of K patches, N patches, D width.
"""

import copy
from typing import Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.arch import parse_arch
from stopmim.config import Config
from stopmim.keys import seed_of
from stopmim.positions import Covariance, JitteredPositions, Positions, StochasticPositions
from stopmim.predictor import Noise, Predictor
from stopmim.vit import VisionTransformer, take


class Batch(NamedTuple):
    images: Tensor  # (B, 3, H, W), normalised
    context: Tensor  # (B, C) int64 patch numbers
    targets: Tensor  # (M, B, K) int64 patch numbers


class MaskedImageModel(nn.Module):
    """Encoder f, predictor g, and a target encoder that follows f slowly.

    With `Positions` in the predictor this is I-JEPA, with `StochasticPositions` I-JEPA + StoP.
    """

    def __init__(self, encoder: VisionTransformer, predictor: Predictor) -> None:
        super().__init__()
        self.encoder = encoder
        self.predictor = predictor
        self.target_encoder = copy.deepcopy(encoder).requires_grad_(False)

    def forward(self, batch: Batch, noise: Noise | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(predicted, target), both (M, B, K, D). What training calls, and the only thing."""
        target = self.targets(batch.images, batch.targets)
        return self.predict(batch.images, batch.context, batch.targets, noise), target

    def predict(
        self,
        images: Tensor,
        context_index: Tensor,
        target_index: Tensor,
        noise: Noise | Tensor | None = None,
    ) -> Tensor:
        """Predicted features (M, B, K, D). A bare tensor as `noise` is for the masked tokens."""
        if isinstance(noise, Tensor):
            noise = Noise(masked=noise)
        context = self.encoder(images, context_index)  # s_x, (B, C, D)
        return self.predictor(context, context_index, target_index, noise)

    @torch.no_grad()
    def targets(self, images: Tensor, target_index: Tensor) -> Tensor:
        """What is to be predicted, (M, B, K, D): EMA features, normed once more without affine."""
        features = self.target_encoder(images)  # (B, N, D): targets see the whole image
        # eps is F.layer_norm's own 1e-5 here, not the model's 1e-6, as in the released code.
        features = F.layer_norm(features, features.shape[-1:])
        return torch.stack([take(features, index) for index in target_index])

    @torch.no_grad()
    def update_target(self, momentum: float) -> None:
        """target <- momentum * target + (1 - momentum) * encoder, parameter by parameter."""
        target: list[Tensor] = list(self.target_encoder.parameters())
        online: list[Tensor] = list(self.encoder.parameters())
        torch._foreach_lerp_(target, online, 1.0 - momentum)


def build(config: Config) -> MaskedImageModel:
    """The model of a resolved config, with the weights its seed gives, on the CPU."""
    size, _ = parse_arch(config.arch)
    depth, heads = config.predictor.depth, config.predictor.heads
    if depth is None or heads is None:
        raise ValueError("the config is not resolved: call stopmim.config.resolve first")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("init", config.seed))
        encoder = VisionTransformer.from_arch(config.arch, config.image_size, config.class_token)
        predictor = Predictor(
            build_positions(config),
            size.width,
            depth,
            heads,
            noisy=config.positions.tokens,
            tied=config.positions.covariance != "untied",
        )
    encoder.recompute = predictor.recompute = config.runtime.recompute == "on"
    return MaskedImageModel(encoder, predictor)


def build_positions(config: Config) -> Positions:
    side, width, p = config.side, config.predictor.width, config.positions
    bias: Literal["project", "mask_token"] = (
        "project" if config.compat == "released" else "mask_token"
    )
    match p.kind:
        case "sincos" | "learned":
            return Positions(side, width, base=p.kind, bias=bias)
        case "jitter":
            return JitteredPositions(side, width, _resolved(p.sigma), bias=bias)
        case "stochastic":
            covariance: Covariance = (
                p.covariance if p.covariance in ("fixed", "conditioned") else "projected"
            )
            return StochasticPositions(
                side, width, _resolved(p.sigma), base=p.base, covariance=covariance, bias=bias
            )
        case unknown:
            assert_never(unknown)


def _resolved(sigma: float | None) -> float:
    if sigma is None:
        raise ValueError("positions.sigma is not resolved")
    return sigma
