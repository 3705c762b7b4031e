"""How well a run is, measured now and then on a few images that are always the same.

The loss alone does not tell: its targets move, and it falls in a collapse as it does in learning.
What tells is how much of the targets the images decide, in how many directions, and how much of
that the predictor knows beyond what the place of a patch gives away. `doctor.py` draws the
conclusions; step 0, the untrained network, is what everything is compared with.

Shapes: n probe images, N patches, D width, T numbers of a target, M target blocks of K patches.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.random_keys import numpy_generator, torch_generator
from stopmim.config.schema import Config
from stopmim.data.crops import normalise
from stopmim.data.images import Images
from stopmim.data.loading import read_crops
from stopmim.gpu.sharding import whole
from stopmim.method.build import build_sampler
from stopmim.method.masks import Masks
from stopmim.method.model import MaskedImageModel

PROBE = 128  # images, of each of which two crops are looked at
CHUNK = {"cpu": 32, "cuda": PROBE}  # images at a time: for a cache, for few launches
VECTORS = 4096  # targets the effective rank is taken of, or as many as are twice the width
NEAREST = 10  # neighbours that are asked for their label
LOWEST = 100.0  # skill: where images decide nothing it would be minus infinity
FEWEST = 200  # updates between two measurements that nobody asked for more often
COST = 0.015  # share of the training time they may take
# Probe for probe image a measurement takes 0.8 to 0.9 of the time of an update (measured, CPU).
UPDATES_PER_PROBE = 0.9


def due_every(config: Config) -> int:
    """Updates between two measurements; 0 is never."""
    wanted = config.runtime.health_every
    if wanted is not None:
        return wanted
    return max(FEWEST, math.ceil(UPDATES_PER_PROBE * PROBE / config.optim.batch_size / COST))


class Probe(NamedTuple):
    """What is looked at: the same crops and masks in every measurement of a run."""

    views: Tensor  # (2, n, 3, S, S) uint8: two crops of each image
    masks: Masks  # of one image, (1, C) and (M, 1, K): the same for all, so that places compare
    labels: dict[str, Tensor]  # (n,) each; only those of few enough classes


def probe(images: Images, config: Config, count: int = PROBE) -> Probe:
    """`count` of the images, or all if they are fewer; those that cannot be read are replaced."""
    count = min(count, len(images))
    chosen = numpy_generator("probe", config.seed).choice(len(images), count, replace=False)
    # Two crops of each image; epochs below 0 are nobody else's.
    keys = [[(-1, i), (-2, i)] for i in chosen.tolist()]
    pairs = [loaded.images for loaded in read_crops(images, config, keys)]  # each (2, 3, S, S)
    usable = [k for k, pair in enumerate(pairs) if pair.numel()]
    none = torch.empty(2, 0, 3, config.image_size, config.image_size, dtype=torch.uint8)
    views = torch.stack([pairs[k] for k in usable], dim=1) if usable else none
    labels = {
        name: torch.from_numpy(np.asarray(values)[chosen[usable]].astype(np.int64))
        for name, values in images.labels.items()
    }
    few = {name: y for name, y in labels.items() if 1 < len(y.unique()) <= len(y) // 8}
    return Probe(views, _masks(config), few)


def _masks(config: Config) -> Masks:
    return build_sampler(config).draw(1, torch_generator("probe", config.seed))


class Health:
    """The measurements of one run.

    Nothing here draws from a generator of the run or changes the model, so that a run is the same
    with and without.
    """

    def __init__(self, probe: Probe, device: torch.device, amp: torch.dtype | None = None) -> None:
        self.probe, self.device, self.amp = probe, device, amp
        self.chunk = CHUNK[device.type]

    @torch.no_grad()
    def measure(self, model: MaskedImageModel) -> dict[str, float]:
        """Numbers for a line of metrics.jsonl; the comments beside them say what each is."""
        if self.probe.views.shape[1] < 2:  # one image says nothing of how images differ
            return {}
        first = [self._part(model, part) for part in self.probe.views[0].split(self.chunk)]
        tokens, predicted, target = (torch.cat(x, dim=-3) for x in zip(*first, strict=True))
        if not model.target.learned:  # pixels tell nothing of the encoder
            seen, again = (self._whole(model, view, features=True) for view in self.probe.views)
            own = {"feature_rank": effective_rank(_thinned(seen))}
        else:
            seen, again, own = tokens, self._whole(model, self.probe.views[1]), {}
        return {
            "target_rank": effective_rank(_thinned(tokens)),
            "target_spread": float(tokens.flatten(0, 1).std(dim=0).mean()),  # 0: all the same
            "target_image_share": _image_share(tokens.transpose(0, 1)),
            **_predictions(predicted, target),
            "noise_to_signal": noise_to_signal(model, self._context(model)),
            "neighbours": neighbour_score(seen.mean(1), again.mean(1)),
            **{
                f"knn_{name}": label_agreement(seen.mean(1), y.to(seen.device))
                for name, y in self.probe.labels.items()
            },
            **own,
        }

    def _whole(self, model: MaskedImageModel, pixels: Tensor, *, features: bool = False) -> Tensor:
        """`_tokens` of all images, a few at a time."""
        parts = pixels.split(self.chunk)
        return torch.cat([self._tokens(model, part, features=features) for part in parts])

    def _part(self, model: MaskedImageModel, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (n, N, D), and of the masked ones prediction and target (M, n, K, D)."""
        images = normalise(pixels.to(self.device))
        context = self.probe.masks.context.to(self.device).expand(len(images), -1)
        targets = self.probe.masks.targets.to(self.device).expand(-1, len(images), -1)
        # Without noise: what the predictor says of the mean position. Only the shapes are drawn.
        drawn = model.predictor.draw(context, targets, torch_generator("probe", device=self.device))
        still = drawn.zeros()
        with torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None):
            predicted = model.predict(images, context, targets, still).float()
        tokens = self._tokens(model, pixels)
        wanted = self.probe.masks.targets[:, 0].to(self.device)  # (M, K)
        return tokens, predicted, tokens[:, wanted].transpose(0, 1)

    def _context(self, model: MaskedImageModel) -> Tensor | None:
        """What the encoder makes of the context of some images, (n, C, D), if noise needs it."""
        if not model.predictor.positions.conditioned:
            return None
        images = normalise(self.probe.views[0, : self.chunk].to(self.device))
        index = self.probe.masks.context.to(self.device).expand(len(images), -1)
        with torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None):
            return model.encoder(images, index).float()

    def _tokens(self, model: MaskedImageModel, pixels: Tensor, *, features: bool = False) -> Tensor:
        """The targets of every patch, (n, N, T); or what the encoder makes of it, (n, N, D)."""
        images = normalise(pixels.to(self.device))
        every = torch.arange(model.encoder.side**2, device=self.device)
        with torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None):
            if features:
                return model.encoder(images).float()
            return model.targets(images, every.expand(1, len(images), -1))[0].float()


# ------------------------------------------------------------------------------ the numbers


def effective_rank(features: Tensor) -> float:
    """RankMe (arXiv 2210.02885) of features (n, D): between 1, a collapse, and D.

    From singular values, as there, by way of the eigenvalues of the D x D matrix of products: the
    same in float64, and fast where n is large.
    """
    x = features.double()
    values = torch.linalg.eigvalsh(x.T @ x).clamp(min=0).sqrt()
    p = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny) + 1e-7
    return float(torch.exp(-(p * p.log()).sum()))


def _thinned(tokens: Tensor) -> Tensor:
    """Some of the tokens (n, N, D), evenly spread, as rows: a rank needs more rows than columns."""
    rows = tokens.flatten(0, 1)
    return rows[:: max(1, len(rows) // max(VECTORS, 2 * rows.shape[1]))]


def _image_share(tokens: Tensor) -> float:
    """Share of the variance of tokens (places, images, D) that the place does not explain.

    0: all images look the same, and the targets are a table of positions.
    """
    within = tokens.var(dim=1).sum(-1).mean()
    return float(within / tokens.flatten(0, 1).var(dim=0).sum().clamp(min=1e-12))


def _predictions(predicted: Tensor, target: Tensor) -> dict[str, float]:
    """What predictions (M, n, K, D) are made of, and what they know."""
    p, t = (x.transpose(1, 2).flatten(0, 1) for x in (predicted, target))  # (places, n, D)
    mean = F.normalize(t.flatten(0, 1).mean(dim=0), dim=0)
    along = (p @ mean).square().sum() / p.square().sum().clamp(min=1e-12)
    # Against somebody who knows the mean of every place over these images, and nothing else.
    by_place = t.var(dim=1).sum(-1).mean().clamp(min=1e-12)
    return {
        "predicted_mean_share": float(along),  # 1: the mean target, whatever is seen
        "predicted_image_share": _image_share(p),  # 0: the place alone, whatever is seen
        # Share of what the images decide about the targets that is predicted; 0: none of it.
        "skill": max(-LOWEST, float(1 - (p - t).square().sum(-1).mean() / by_place)),
    }


@torch.no_grad()
def noise_to_signal(model: MaskedImageModel, context: Tensor | None = None) -> float:
    """Power of A n over that of psi + m~, for masked tokens: 0 is certainty about places.

    `context` are features (n, C, D) of context tokens, for noise that is made from them.
    """
    predictor, positions = model.predictor, model.predictor.positions
    if not predictor.noisy_masked:
        return 0.0
    bias = whole(positions.mask_token) if positions.bias == "mask_token" else 0.0
    signal = (whole(positions.table) + bias).square().sum(-1).mean()
    return float(positions.power(whole(predictor.noise_layer.weight), context) / signal)


def neighbour_score(first: Tensor, second: Tensor) -> float:
    """How often a crop is more similar to the other crop of its image than to one of another image.

    Between 0.5, by chance, and 1. `first` and `second` are (n, D), centred here: what all images
    share would make all of them similar.
    """
    if len(first) < 2:
        return 0.5
    mean = torch.cat([first, second]).mean(dim=0)
    near = F.normalize(first - mean, dim=1) @ F.normalize(second - mean, dim=1).T  # (n, n)
    own = near.diagonal()[:, None]
    wins = (near < own).float() + 0.5 * (near == own)
    return float((wins.sum() - 0.5 * len(near)) / (len(near) * (len(near) - 1)))


def label_agreement(features: Tensor, labels: Tensor) -> float:
    """Share of the nearest other images (cosine) that have the label of the image."""
    x = F.normalize(features - features.mean(dim=0), dim=1)
    near = (x @ x.T).fill_diagonal_(-2)
    index = near.topk(min(NEAREST, len(x) - 1), dim=1).indices
    return float((labels[index] == labels[:, None]).float().mean())
