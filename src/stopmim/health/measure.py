"""Measures the health of a run from time to time, on a few images that are always the same.

The loss alone cannot tell: its targets move, and it falls in a collapse as it does in learning. The
telling numbers are how much of the targets depends on the images, in how many directions, and how
much of that the predictor knows beyond what the position of a patch gives away. They are compared
with those of the untrained network, at step 0; `doctor.py` draws the conclusions.

Shapes: n sample images, N patches, D width, T numbers of a target, M target blocks of K patches.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stopmim.base.random_keys import numpy_generator, torch_generator
from stopmim.config.schema import Config
from stopmim.data.crops import normalise
from stopmim.data.images import Images, labels_at
from stopmim.data.loading import Reader
from stopmim.data.pixels import stats_of
from stopmim.gpu.sharding import whole
from stopmim.method.build import build_sampler
from stopmim.method.model import MaskedImageModel
from stopmim.method.predictor import Predictor

Forward = Callable[[MaskedImageModel, Tensor], Tensor]  # of normalised images (n, C, S, S)

SAMPLE = 128  # images, with two crops each
CHUNK = {"cpu": 32, "cuda": SAMPLE}  # images at a time: fits a cache, or takes few launches
VECTORS = 4096  # targets the effective rank is computed from; at least twice their width
NEAREST = 10  # neighbours whose labels are compared
LOWEST = 100.0  # skill is cut off at minus this: where images decide nothing it would be -infinity
FEWEST = 200  # updates between two measurements, unless the config asks for more
COST = 0.015  # share of the training time that measurements may take
# A measurement takes 0.8 to 0.9 of the time of an update of as many images (measured, CPU).
UPDATES_PER_SAMPLE = 0.9


def due_every(config: Config) -> int:
    """Updates between two measurements; 0 is never."""
    wanted = config.runtime.health_every
    if wanted is not None:
        return wanted
    return max(FEWEST, math.ceil(UPDATES_PER_SAMPLE * SAMPLE / config.optim.batch_size / COST))


class Health:
    """Measures models on SAMPLE images, or all if there are fewer, without unreadable ones.

    Draws from no generator of the run and does not change the model, so that a run is the same
    with and without measurements.
    """

    def __init__(
        self,
        images: Images,
        config: Config,
        device: torch.device,
        amp: torch.dtype | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.device, self.amp, self.chunk = device, amp, CHUNK[device.type]
        count, total = min(SAMPLE, len(images)), len(images)
        chosen = numpy_generator("probe", config.seed).choice(total, count, replace=False)
        # Two crops of each image; no epoch of training is below 0.
        keys = [[(-1, i), (-2, i)] for i in chosen.tolist()]
        reader = reader or Reader(images, config)
        pairs = [loaded.images for loaded in reader.crops(keys)]  # each (2, C, S, S)
        usable = [k for k, pair in enumerate(pairs) if pair.numel()]
        self.stats = stats_of(config)
        none = torch.empty(2, 0, self.stats.channels, config.image_size, config.image_size)
        # (2, n, C, S, S) in stored units
        self.views = torch.stack([pairs[k] for k in usable], dim=1) if usable else none
        labels = {
            name: torch.from_numpy(values.astype(np.int64))
            for name, values in labels_at(images, chosen[usable]).items()
        }
        # (n,) each; only labels with few enough classes
        self.labels = {x: y for x, y in labels.items() if 1 < len(y.unique()) <= len(y) // 8}
        masks = build_sampler(config).draw(1, torch_generator("probe", config.seed))
        # (1, C) and (M, 1, K): the same for all images, so that positions compare
        self.context, self.targets = masks.context.to(device), masks.targets.to(device)

    @torch.no_grad()
    def measure(self, model: MaskedImageModel) -> dict[str, float]:
        """Numbers for a line of metrics.jsonl; docs/analyse.md explains each."""
        if self.views.shape[1] < 2:  # one image does not show how images differ
            return {}
        first, second = self.views
        tokens = self._run(patch_targets, model, first)  # (n, N, T)
        predicted = self._run(self._predict, model, first, dim=1)  # (M, n, K, T)
        target = tokens[:, self.targets[:, 0]].transpose(0, 1)
        # Fixed targets say nothing about the encoder.
        learned = model.target.learned
        seen = model.target.last(tokens) if learned else self._run(patch_features, model, first)
        again = self._run(patch_features, model, second)
        return {
            "target_rank": effective_rank(_thinned(model.target.last(tokens))),
            "target_spread": float(tokens.flatten(0, 1).std(dim=0).mean()),  # 0: all the same
            "target_image_share": _image_share(tokens.transpose(0, 1)),
            **_predictions(predicted, target),
            "noise_to_signal": noise_to_signal(model, self._context(model)),
            "neighbours": neighbour_score(seen.mean(1), again.mean(1)),
            **{
                f"knn_{name}": label_agreement(seen.mean(1), y.to(seen.device))
                for name, y in self.labels.items()
            },
            **({} if learned else {"feature_rank": effective_rank(_thinned(seen))}),
        }

    def _run(self, forward: Forward, model: MaskedImageModel, view: Tensor, dim: int = 0) -> Tensor:
        """`forward` of all images of a view, in the precision of training, joined along `dim`."""
        chunks = (
            normalise(pixels.to(self.device), self.stats) for pixels in view.split(self.chunk)
        )
        with torch.autocast(self.device.type, dtype=self.amp, enabled=self.amp is not None):
            return torch.cat([forward(model, images).float() for images in chunks], dim)

    def _predict(self, model: MaskedImageModel, images: Tensor) -> Tensor:
        """Predictions of the masked patches (M, n, K, T), without noise: at the mean position."""
        context = self.context.expand(len(images), -1)
        targets = self.targets.expand(-1, len(images), -1)
        # Only the shapes of the draw are used.
        drawn = model.predictor.draw(context, targets, torch_generator("probe", device=self.device))
        return model.predict(images, context, targets, drawn.zeros())

    def _context(self, model: MaskedImageModel) -> Tensor | None:
        """Features of context tokens (n, C, D) of a few images, if the noise is made from them."""
        if not model.predictor.positions.conditioned:
            return None
        view = self.views[0, : self.chunk]
        return self._run(lambda m, x: m.encoder(x, self.context.expand(len(x), -1)), model, view)


@torch.no_grad()
def patch_targets(model: MaskedImageModel, images: Tensor) -> Tensor:
    """Targets at every patch, (n, N, T)."""
    every = torch.arange(model.encoder.side**2, device=images.device)
    return model.targets(images, every.expand(1, len(images), -1))[0]


@torch.no_grad()
def patch_features(model: MaskedImageModel, images: Tensor) -> Tensor:
    """Learned features of every patch, (n, N, D): the targets, unless they are fixed.

    If the targets have several layers, the last one.
    """
    if not model.target.learned:
        return model.encoder(images)
    return model.target.last(patch_targets(model, images))


# ------------------------------------------------------------------------------ the numbers


def effective_rank(features: Tensor) -> float:
    """RankMe (arXiv 2210.02885) of features (n, D): from 1, a collapse, to D.

    The paper takes singular values. Here they are roots of the eigenvalues of the D x D Gram
    matrix in float64: the same numbers, and fast for large n.
    """
    x = features.double()
    values = torch.linalg.eigvalsh(x.T @ x).clamp(min=0).sqrt()
    p = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny) + 1e-7
    return float(torch.exp(-(p * p.log()).sum()))


def _thinned(tokens: Tensor) -> Tensor:
    """Every k-th of the tokens (n, N, D), as rows: a rank needs more rows than columns."""
    rows = tokens.flatten(0, 1)
    return rows[:: max(1, len(rows) // max(VECTORS, 2 * rows.shape[1]))]


def _image_share(tokens: Tensor) -> float:
    """Share of the variance of tokens (positions, images, D) that the position does not explain.

    0: the tokens are a table of positions, the same for all images.
    """
    within = tokens.var(dim=1).sum(-1).mean()
    return float(within / tokens.flatten(0, 1).var(dim=0).sum().clamp(min=1e-12))


def _predictions(predicted: Tensor, target: Tensor) -> dict[str, float]:
    """Composition and quality of predictions (M, n, K, D)."""
    p, t = (x.transpose(1, 2).flatten(0, 1) for x in (predicted, target))  # (positions, n, D)
    mean = F.normalize(t.flatten(0, 1).mean(dim=0), dim=0)
    along = (p @ mean).square().sum() / p.square().sum().clamp(min=1e-12)
    # The baseline knows the mean target at every position, over these images, and nothing else.
    baseline = t.var(dim=1).sum(-1).mean().clamp(min=1e-12)
    return {
        "predicted_mean_share": float(along),  # 1: the mean target, whatever is seen
        "predicted_image_share": _image_share(p),  # 0: the position alone, whatever is seen
        # Share of what the images decide about the targets that is predicted; 0: none of it.
        "skill": max(-LOWEST, float(1 - (p - t).square().sum(-1).mean() / baseline)),
    }


def norms(model: MaskedImageModel) -> dict[str, float]:
    """Norms of A and of m~, which the paper follows, for a line of metrics.jsonl.

    The released code has the bias of A in place of m~, and nothing if StoP is off: 0.
    """
    a = whole(model.predictor.noise_layer.weight.detach())
    return {"norm_A": float(a.norm()), "norm_mask_token": float(_shared(model.predictor).norm())}


def _shared(predictor: Predictor) -> Tensor:
    """The vector that all masked tokens share, unsharded; 0 if there is none."""
    bias = predictor.positions.shared(predictor.noise_layer if predictor.noisy_masked else None)
    return torch.zeros(()) if bias is None else whole(bias.detach())


@torch.no_grad()
def noise_to_signal(model: MaskedImageModel, context: Tensor | None = None) -> float:
    """Power of the noise of masked tokens over that of psi + m~; 0 without uncertainty.

    In the released code the bias of A replaces m~. `context` (n, C, D) are features of context
    tokens, for noise that is made from them.
    """
    predictor, positions = model.predictor, model.predictor.positions
    if not predictor.noisy_masked:
        return 0.0
    signal = (whole(positions.table) + _shared(predictor)).square().sum(-1).mean()
    return float(positions.power(whole(predictor.noise_layer.weight), context) / signal)


def neighbour_score(first: Tensor, second: Tensor) -> float:
    """Share of cases where a crop is more similar to its image's other crop than to another crop.

    From 0.5, chance, to 1. `first` and `second` (n, D) are centred here: what all images share
    would make all of them similar.
    """
    if len(first) < 2:
        return 0.5
    mean = torch.cat([first, second]).mean(dim=0)
    near = F.normalize(first - mean, dim=1) @ F.normalize(second - mean, dim=1).T  # (n, n)
    own = near.diagonal()[:, None]
    wins = (near < own).float() + 0.5 * (near == own)
    return float((wins.sum() - 0.5 * len(near)) / (len(near) * (len(near) - 1)))


def label_agreement(features: Tensor, labels: Tensor) -> float:
    """Share of the nearest other images (cosine) that have the same label."""
    x = F.normalize(features - features.mean(dim=0), dim=1)
    near = (x @ x.T).fill_diagonal_(-2)
    index = near.topk(min(NEAREST, len(x) - 1), dim=1).indices
    return float((labels[index] == labels[:, None]).float().mean())
