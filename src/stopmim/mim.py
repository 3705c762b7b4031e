"""Section 2 of the paper: patchify, mask, encode the context, predict, compare with a target.

`get_target` of the paper is `MaskedImageModel.targets`: features of the EMA encoder (I-JEPA), or
pixels (MAE).

Shapes: B images, C context patches, M target blocks of K patches, N patches, D width, T numbers to
predict per patch: D features, or its p * p * 3 pixels.
"""

import copy
from typing import Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.arch import parse_arch
from stopmim.config import Config
from stopmim.keys import seed_of
from stopmim.positions import Positions, StochasticPositions
from stopmim.predictor import Noise, Predictor
from stopmim.vit import VisionTransformer, initialise_mae, take

Target = Literal["features", "pixels"]


class Batch(NamedTuple):
    images: Tensor  # (B, 3, H, W), normalised
    context: Tensor  # (B, C) int64 patch numbers
    targets: Tensor  # (M, B, K) int64 patch numbers


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, 3, H, W) -> (B, N, p * p * 3): pixels by row, column and channel, the order of MAE."""
    x = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, 3, rows, p, cols, p)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class MaskedImageModel(nn.Module):
    """Encoder f, predictor g, and for I-JEPA a target encoder that follows f slowly.

    With `Positions` in the predictor this is I-JEPA or MAE, with `StochasticPositions` it is that
    + StoP.

    Args:
        target: "features" of the target encoder are predicted, or "pixels", and there is none.
        norm_pixels: every patch to predict has mean 0 and variance 1.
    """

    target_encoder: VisionTransformer | None

    def __init__(
        self,
        encoder: VisionTransformer,
        predictor: Predictor,
        *,
        target: Target = "features",
        norm_pixels: bool = True,
    ) -> None:
        super().__init__()
        self.target, self.norm_pixels = target, norm_pixels
        self.encoder = encoder
        self.predictor = predictor
        self.target_encoder = None
        if target == "features":
            self.target_encoder = copy.deepcopy(encoder).requires_grad_(False)

    def branch(self, name: Literal["target", "context"] = "target") -> VisionTransformer:
        """The target encoder, which the papers evaluate, or the trained one: MAE has but one."""
        return self.encoder if name == "context" else self.target_encoder or self.encoder

    def forward(self, batch: Batch, noise: Noise | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(predicted, target), both (M, B, K, T). What training calls, and the only thing."""
        target = self.targets(batch.images, batch.targets)
        return self.predict(batch.images, batch.context, batch.targets, noise), target

    def predict(
        self,
        images: Tensor,
        context_index: Tensor,
        target_index: Tensor,
        noise: Noise | Tensor | None = None,
    ) -> Tensor:
        """What is predicted, (M, B, K, T). A bare tensor as `noise` is for the masked tokens."""
        if isinstance(noise, Tensor):
            noise = Noise(masked=noise)
        # s_x, (B, C, D); the decoder of MAE sees the class token too, I-JEPA has none
        context = self.encoder(images, context_index, all_tokens=self.target == "pixels")
        return self.predictor(context, context_index, target_index, noise)

    @torch.no_grad()
    def targets(self, images: Tensor, target_index: Tensor) -> Tensor:
        """What is to be predicted, (M, B, K, T).

        EMA features, normed once more without affine; or pixels, normed patch by patch if wanted.
        """
        if self.target_encoder is None:
            pixels = patchify(images, self.encoder.patch)  # (B, N, p * p * 3)
            pixels = torch.stack([take(pixels, index) for index in target_index])
            if not self.norm_pixels:
                return pixels
            # The variance is MAE's: unbiased, unlike that of F.layer_norm.
            variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
            return (pixels - mean) / (variance + 1e-6).sqrt()
        features = self.target_encoder(images)  # (B, N, D): targets see the whole image
        # eps is F.layer_norm's own 1e-5 here, not the model's 1e-6, as in the released code.
        features = F.layer_norm(features, features.shape[-1:])
        return torch.stack([take(features, index) for index in target_index])

    @torch.no_grad()
    def update_target(self, momentum: float) -> None:
        """target <- momentum * target + (1 - momentum) * encoder, parameter by parameter."""
        if self.target_encoder is None:
            return
        target: list[Tensor] = list(self.target_encoder.parameters())
        online: list[Tensor] = list(self.encoder.parameters())
        torch._foreach_lerp_(target, online, 1.0 - momentum)


def build(config: Config) -> MaskedImageModel:
    """The model of a resolved config, with the weights its seed gives, on the CPU."""
    size, patch = parse_arch(config.arch)
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
            outputs=3 * patch**2 if config.target == "pixels" else size.width,
        )
        if config.target == "pixels":
            encoder.apply(initialise_mae)
            predictor.apply(initialise_mae)
    encoder.recompute = predictor.recompute = config.runtime.recompute == "on"
    return MaskedImageModel(
        encoder, predictor, target=config.target, norm_pixels=config.norm_pixels
    )


def build_positions(config: Config) -> Positions:
    side, width, p = config.side, config.predictor.width, config.positions
    bias: Literal["project", "mask_token"] = (
        "project" if config.compat == "released" else "mask_token"
    )
    match p.kind:
        case "sincos" | "learned":
            return Positions(side, width, base=p.kind, bias=bias)
        case "stochastic":
            if p.sigma is None:
                raise ValueError("positions.sigma is not resolved")
            covariance: Literal["fixed", "projected"] = (
                "fixed" if p.covariance == "fixed" else "projected"
            )
            return StochasticPositions(
                side, width, p.sigma, base=p.base, covariance=covariance, bias=bias, share=p.share
            )
        case unknown:
            assert_never(unknown)
