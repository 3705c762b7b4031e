"""Section 2 of the paper: patchify, mask, encode the context, predict, compare with a target.

`get_target` of the paper is `MaskedImageModel.targets`: features of the EMA encoder (I-JEPA), or
pixels (MAE).

Shapes: B images, C context patches, M target blocks of K patches or L cells of 2x2 patches, N
patches, D width, T numbers to predict per patch: D features, or its p * p * 3 pixels.
"""

import copy
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.method.encoder import VisionTransformer, take
from stopmim.method.predictor import Noise, Predictor

Target = Literal["features", "pixels"]


class Batch(NamedTuple):
    images: Tensor  # (B, 3, H, W), normalised
    context: Tensor  # (B, C) int64 patch numbers
    targets: Tensor  # (M, B, K) int64 patch numbers
    cells: Tensor | None = None  # (M, B, L) from masking.cells, for `lowres`


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
        lowres: the targets are predicted at half the resolution too, the paper's rival of blurred
            places: the mean ("bilinear") or the largest value ("max") of every 2x2 cell, at its
            centre.
    """

    target_encoder: VisionTransformer | None

    def __init__(
        self,
        encoder: VisionTransformer,
        predictor: Predictor,
        *,
        target: Target = "features",
        norm_pixels: bool = True,
        lowres: Literal["bilinear", "max"] | None = None,
    ) -> None:
        super().__init__()
        positions = predictor.positions
        if lowres and (positions.uncertain or isinstance(positions.table, nn.Parameter)):
            raise ValueError("lowres is for certain sine-cosine positions")
        self.target, self.norm_pixels, self.lowres = target, norm_pixels, lowres
        self.encoder = encoder
        self.predictor = predictor
        self.target_encoder = None
        if target == "features":
            self.target_encoder = copy.deepcopy(encoder).requires_grad_(False)

    def branch(self, name: Literal["target", "context"] = "target") -> VisionTransformer:
        """The target encoder, which the papers evaluate, or the trained one: MAE has but one."""
        return self.encoder if name == "context" else self.target_encoder or self.encoder

    def forward(self, batch: Batch, noise: Noise | Tensor | None = None) -> tuple[Tensor, ...]:
        """(predicted, target), both (M, B, K, T). What training calls, and the only thing.

        With `lowres` four: then both again at half the resolution, (M, B, L, D).
        """
        if self.lowres:
            return self._at_both_scales(batch)
        target = self.targets(batch.images, batch.targets)
        return self.predict(batch.images, batch.context, batch.targets, noise), target

    def _at_both_scales(self, batch: Batch) -> tuple[Tensor, ...]:
        if batch.cells is None:
            raise ValueError("lowres needs the cells of the targets, as masking.cells gives them")
        context = self.encoder(batch.images, batch.context)
        predicted = self.predictor(context, batch.context, batch.targets)
        # The first patch of a cell is at its upper left: the centre is half a patch from it.
        half = torch.full((2,), 0.5, device=batch.cells.device)
        predicted_low = self.predictor(context, batch.context, batch.cells, moved_by=half)
        # The four patches of a cell beside the targets, so that the image is encoded once.
        side = self.encoder.side
        four = [batch.cells + step for step in (0, 1, side, side + 1)]
        both = self.targets(batch.images, torch.cat([batch.targets, *four], dim=-1))
        sizes = [x.shape[-1] for x in (batch.targets, *four)]
        target, *cell = both.split(sizes, dim=2)
        cell = torch.stack(cell)  # (4, M, B, L, D)
        low = cell.mean(dim=0) if self.lowres == "bilinear" else cell.amax(dim=0)
        return predicted, target, predicted_low, low

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
    def update_target(self, momentum: float | Tensor) -> None:
        """target <- momentum * target + (1 - momentum) * encoder, parameter by parameter."""
        if self.target_encoder is None:
            return
        target: list[Tensor] = list(self.target_encoder.parameters())
        online: list[Tensor] = list(self.encoder.parameters())
        if not isinstance(momentum, Tensor):
            torch._foreach_lerp_(target, online, 1.0 - momentum)
            return
        # That takes no weight which is on the device. With decay 1, SGD that climbs along the
        # encoder does: target - w (target - encoder), in one pass over the memory.
        torch._fused_sgd_(
            target,
            online,
            [],
            weight_decay=1.0,
            momentum=0.0,
            lr=(1.0 - momentum).float(),
            dampening=0.0,
            nesterov=False,
            maximize=True,
            is_first_step=False,
        )
