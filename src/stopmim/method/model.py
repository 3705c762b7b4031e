"""Section 2 of the paper: encode the context, predict the masked blocks, compare with a target.

`get_target` of the paper is a `Target`: it owns what is predicted, from which encoder it comes, how
it is normed, and the loss. `Features` is I-JEPA, `Pixels` is MAE. Whether an encoder follows slowly
(EMA) is a property of the target, and not the same question as what is predicted.

Shapes: B images, C context patches, M target blocks of K patches or L cells of 2x2 patches, N
patches, D width, T numbers to predict per patch: D features, or its p * p * C pixels.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.gpu.blocks import take
from stopmim.method.encoder import Start, VisionTransformer
from stopmim.method.masks import Masks, MaskSampler, Sizes, cells, nearness
from stopmim.method.positions import Positions
from stopmim.method.predictor import Noise, Predictor


class Batch(NamedTuple):
    images: Tensor  # (B, C, H, W), normalised; C is 3 for RGB
    context: Tensor  # (B, C) int64 patch numbers
    targets: Tensor  # (M, B, K) int64 patch numbers
    cells: Tensor | None = None  # (M, B, L) from masks.cells, for `HalfResolution`


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) -> (B, N, p * p * C): pixels by row, column and channel, the order of MAE."""
    x = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, rows, p, cols, p)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


# ------------------------------------------------------------------------------ targets


@dataclass(frozen=True)
class Target(ABC):
    """Prediction target of a masked patch, and the loss of a prediction.

    A subclass gives `name`, `of` and, where it differs, the loss and the class attributes.
    """

    name: ClassVar[str]  # of the method: "I-JEPA"
    follows: ClassVar[bool] = False  # a copy of the encoder follows it by EMA, and is the teacher
    learned: ClassVar[bool] = False  # targets depend on weights, and so can collapse
    class_token_seen: ClassVar[bool] = False  # by the predictor, beside the context patches
    start: ClassVar[Start] = "jepa"  # how the weights are initialised
    loss_name: ClassVar[str] = "smooth L1"  # of `loss`, for people

    def width(self, encoder: VisionTransformer) -> int:
        """T, the numbers to predict per patch."""
        return encoder.width

    @abstractmethod
    def of(self, teacher: VisionTransformer, images: Tensor, index: Tensor) -> Tensor:
        """Targets (M, B, K, T) at the patches `index` (M, B, K). Called without gradients."""

    def batch(self, images: Tensor, masks: Masks, sizes: Sizes | None) -> Batch:
        """A batch with all that `pairs` needs; `sizes` are those of its rectangles."""
        return Batch(images, *masks)

    def pairs(self, model: "MaskedImageModel", batch: Batch, noise: Noise) -> tuple[Tensor, ...]:
        """Prediction and target, (M, B, K, T) each; more for `loss` may follow."""
        target = model.targets(batch.images, batch.targets)
        return model.predict(batch.images, batch.context, batch.targets, noise), target

    def loss(self, pairs: tuple[Tensor, ...]) -> Tensor:
        """Loss of what `pairs` returns: smooth L1, as in I-JEPA, plus terms after the pair."""
        predicted, target, *terms = pairs  # compared in float32, also under autocast
        return sum(terms, F.smooth_l1_loss(predicted.float(), target.float()))

    def last(self, targets: Tensor) -> Tensor:
        """The part of learned `targets` (..., T) that is the last layer, which is evaluated."""
        return targets

    def check(self, sampler: MaskSampler) -> None:
        """Raises ValueError if these masks cannot be predicted."""
        return

    def check_positions(self, positions: Positions) -> None:
        """Raises ValueError if the target cannot be predicted with these positions."""
        return

    def describe(self) -> str:
        """A phrase for people, "" if the name says it all."""
        return ""

    @property
    def not_exportable(self) -> str:
        """Reason why I-JEPA's layout cannot hold its predictor; "" if it can."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Features(Target):
    """I-JEPA: features of an encoder that follows the trained one slowly and sees all patches.

    Args:
        layers: layers of that encoder, evenly spaced in depth up to the last, that are predicted
            together: T is that many D (Bootleg, arXiv 2603.15553).
        visible: weight of the loss on visible patches: `nearness` (V-JEPA 2.1, arXiv 2603.14482).
        vicreg: weight of `variance_covariance` of the context features, averaged over an image
            (C-JEPA, arXiv 2410.19560). Predictions do not get it: they vary with StoP's noise too.
    """

    layers: int = 1
    visible: float = 0.0
    vicreg: float = 0.0

    name = "I-JEPA"
    follows = True
    learned = True

    def width(self, encoder: VisionTransformer) -> int:
        return self.layers * encoder.width

    def of(self, teacher: VisionTransformer, images: Tensor, index: Tensor) -> Tensor:
        asked = index.transpose(0, 1).flatten(1)  # (B, M * K), of targets that see all N patches
        few = self.layers == 1 and asked.shape[1] * teacher.patch**2 < images[0, 0].numel()
        features = teacher(images, layers=self.layers, asked=asked if few else None)
        # eps is F.layer_norm's own 1e-5 here, not the model's 1e-6, as in the released code.
        layers = features.unflatten(-1, (self.layers, -1))  # each normed separately
        x = F.layer_norm(layers, layers.shape[-1:]).flatten(-2)
        return (x if few else take(x, asked)).unflatten(1, (len(index), -1)).transpose(0, 1)

    def last(self, targets: Tensor) -> Tensor:
        return targets.chunk(self.layers, dim=-1)[-1]

    def pairs(self, model: "MaskedImageModel", batch: Batch, noise: Noise) -> tuple[Tensor, ...]:
        if not (self.visible or self.vicreg):
            return super().pairs(model, batch, noise)
        (images, context, index, _), masked = batch, batch.targets.shape[-1]  # K
        features = model.encoder(images, context)  # (B, C, D)
        every = torch.cat([context.expand(len(index), -1, -1), index], dim=-1)  # (M, B, C + K)
        predicted = model.predictor(features, context, index, noise, visible=self.visible > 0)
        target = model.targets(images, every if self.visible else index)
        terms = [self.vicreg * variance_covariance(features.mean(dim=1))] if self.vicreg else []
        if self.visible:
            seen, wanted = predicted[:, :, :-masked].float(), target[:, :, :-masked].float()
            each = F.smooth_l1_loss(seen, wanted, reduction="none").mean(dim=-1)  # (M, B, C)
            weight = nearness(context, index, model.encoder.side)
            terms.append(self.visible * (each * weight).mean())
        return predicted[:, :, -masked:], target[:, :, -masked:], *terms

    def describe(self) -> str:
        layers = f"{self.layers} layers predicted" if self.layers > 1 else ""
        visible = f"visible patches weigh {self.visible:g}" if self.visible > 0 else ""
        vicreg = f"VICReg {self.vicreg:g}" if self.vicreg > 0 else ""
        return ", ".join(filter(None, (layers, visible, vicreg)))

    @property
    def not_exportable(self) -> str:
        return f"targets of {self.layers} layers" if self.layers > 1 else ""


def variance_covariance(x: Tensor) -> Tensor:
    """Two terms of VICReg (arXiv 2105.04906) of vectors (B, D), with its weights 25 and 1.

    Estimated over the images of one part of a batch on one GPU, better if it is large.
    """
    with torch.autocast(x.device.type, enabled=False):
        x = x.float() - x.float().mean(dim=0)
        covariance = x.T @ x / max(1, len(x) - 1)  # (D, D)
        variance = covariance.diagonal()
        off_diagonal = covariance.square().sum() - variance.square().sum()
        hinge = F.relu(1 - (variance + 1e-4).sqrt()).mean()
        return 25 * hinge + off_diagonal / x.shape[1]


@dataclass(frozen=True)
class HalfResolution(Features):
    """`Features` predicted at half the resolution too: the paper's alternative to uncertain places.

    A coarse target is the mean ("bilinear") or the maximum ("max") over a cell of 2x2 patches, at
    its centre. Both resolutions count the same in the loss.
    """

    side: int
    pool: Literal["bilinear", "max"] = "bilinear"

    def batch(self, images: Tensor, masks: Masks, sizes: Sizes | None) -> Batch:
        assert sizes is not None  # `check` has refused samplers without rectangles
        return Batch(images, *masks, cells(masks.targets, sizes.target, self.side))

    def pairs(self, model: "MaskedImageModel", batch: Batch, noise: Noise) -> tuple[Tensor, ...]:
        if batch.cells is None:
            raise ValueError("half resolution needs the cells of the targets: use Target.batch")
        context = model.encoder(batch.images, batch.context)  # (B, C, D)
        predicted = model.predictor(context, batch.context, batch.targets)
        # The first patch of a cell is its upper left one: the centre is half a patch away.
        half = torch.full((2,), 0.5, device=batch.cells.device)
        coarse = model.predictor(context, batch.context, batch.cells, moved_by=half)
        # The four patches of a cell are asked for beside the targets: one pass of the teacher.
        four = [batch.cells + step for step in (0, 1, self.side, self.side + 1)]
        both = model.targets(batch.images, torch.cat([batch.targets, *four], dim=-1))
        target, *cell = both.split([x.shape[-1] for x in (batch.targets, *four)], dim=2)
        stacked = torch.stack(cell)  # (4, M, B, L, D)
        pooled = stacked.mean(dim=0) if self.pool == "bilinear" else stacked.amax(dim=0)
        return predicted, target, coarse, pooled

    def loss(self, pairs: tuple[Tensor, ...]) -> Tensor:
        return (super().loss(pairs[:2]) + super().loss(pairs[2:])) / 2

    def check(self, sampler: MaskSampler) -> None:
        small = min(sampler.blocks(), key=min, default=None)
        if small is None:
            raise ValueError("needs rectangles; set masking.kind: multiblock")
        if min(small) < 3:
            raise ValueError(
                f"a target of {small.height}x{small.width} on a {self.side}x{self.side} grid need "
                f"not hold one whole cell of 2x2 patches; raise masking.target_scale"
            )

    def check_positions(self, positions: Positions) -> None:
        if positions.uncertain or positions.base == "learned":
            raise ValueError("half resolution is for certain sine-cosine positions")

    def describe(self) -> str:
        return f"also at half the resolution ({self.pool})"


@dataclass(frozen=True)
class Pixels(Target):
    """MAE: the pixels of a patch, normed to mean 0 and variance 1 if `normed`."""

    normed: bool = True

    name = "MAE"
    class_token_seen = True
    start = "mae"
    loss_name = "squared error"

    def width(self, encoder: VisionTransformer) -> int:
        return encoder.channels * encoder.patch**2

    def of(self, teacher: VisionTransformer, images: Tensor, index: Tensor) -> Tensor:
        pixels = patchify(images, teacher.patch)  # (B, N, p * p * C)
        pixels = torch.stack([take(pixels, block) for block in index])
        if not self.normed:
            return pixels
        # The variance is MAE's: unbiased, unlike that of F.layer_norm.
        variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
        return (pixels - mean) / (variance + 1e-6).sqrt()

    def loss(self, pairs: tuple[Tensor, ...]) -> Tensor:
        """Squared error of the masked patches, as in MAE."""
        predicted, target = pairs
        return F.mse_loss(predicted.float(), target.float())

    def describe(self) -> str:
        return "normed pixels" if self.normed else ""


# ------------------------------------------------------------------------------ the model


class MaskedImageModel(nn.Module):
    """Encoder f, predictor g and, if the target wants one, a target encoder that follows f slowly.

    With `Positions` in the predictor this is I-JEPA or MAE; `StochasticPositions` add StoP.
    """

    target_encoder: VisionTransformer | None

    def __init__(
        self, encoder: VisionTransformer, predictor: Predictor, target: Target | None = None
    ) -> None:
        super().__init__()
        self.target = target or Features()
        self.target.check_positions(predictor.positions)
        self.encoder = encoder  # f_theta
        self.predictor = predictor  # g_phi
        self.target_encoder = None
        if self.target.follows:  # starts as a copy; `update_target` moves it
            self.target_encoder = copy.deepcopy(encoder).requires_grad_(False)

    def branch(self, name: Literal["target", "context"] = "target") -> VisionTransformer:
        """The target encoder, which the papers evaluate, or the trained one; MAE has only this."""
        return self.encoder if name == "context" else self.target_encoder or self.encoder

    def forward(self, batch: Batch, noise: Noise | Tensor | None = None) -> tuple[Tensor, ...]:
        """(predicted, target), both (M, B, K, T). The only thing that training calls.

        More follows if the target's loss needs it.
        """
        return self.target.pairs(self, batch, _as_noise(noise))

    def predict(
        self,
        images: Tensor,
        context_index: Tensor,
        target_index: Tensor,
        noise: Noise | Tensor | None = None,
    ) -> Tensor:
        """Predictions (M, B, K, T). A bare tensor as `noise` is for the masked tokens."""
        # s_x, (B, C, D); the decoder of MAE sees the class token too, I-JEPA has none
        context = self.encoder(images, context_index, all_tokens=self.target.class_token_seen)
        return self.predictor(context, context_index, target_index, _as_noise(noise))

    @torch.no_grad()
    def targets(self, images: Tensor, target_index: Tensor) -> Tensor:
        """Targets (M, B, K, T) at the patches `target_index` (M, B, K)."""
        return self.target.of(self.branch(), images, target_index)

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
        # lerp takes no weight from the device; fused SGD (decay 1, maximize) computes the same EMA
        # in one pass over memory: target - w (target - encoder).
        rate = (1.0 - momentum).float()
        off: Any = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
        torch._fused_sgd_(target, online, [], weight_decay=1.0, lr=rate, maximize=True, **off)

    @property
    def method(self) -> str:
        """The name of the method: "I-JEPA + StoP"."""
        return self.target.name + self.predictor.positions.method

    def describe(self) -> str:
        """A phrase for people: method, positions, targets, size of the predictor."""
        positions, depth = self.predictor.positions, len(self.predictor.predictor_blocks)
        size = f"width {positions.width}, depth {depth}"
        phrases = (self.target.name, positions.describe(), self.target.describe(), size)
        return ", ".join(filter(None, phrases))


def _as_noise(noise: Noise | Tensor | None) -> Noise:
    return Noise(masked=noise) if isinstance(noise, Tensor) else noise or Noise()
