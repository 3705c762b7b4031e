"""The loss of one part of a batch, and two statistics that reveal a collapse. This is compiled."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from stopmim.method.model import Batch, Target
from stopmim.method.predictor import Noise


class Loss(NamedTuple):
    loss: Tensor
    target_std: Tensor  # over images and places, mean over components: 0 is collapse
    predicted_std: Tensor


def masked_loss(model: nn.Module, target: Target, batch: Batch, noise: Noise) -> Loss:
    """Loss of the masked patches of `batch`; `model` may be wrapped for several GPUs."""
    pairs = model(batch, noise)  # prediction, target: (M, B, K, T) each, and maybe more
    loss = target.loss(pairs)
    with torch.no_grad():  # logged, not trained on
        spread = [x.float().flatten(0, 2).std(dim=0).mean() for x in (pairs[1], pairs[0])]
    return Loss(loss, *spread)
