"""Fine-tuning: trains the whole encoder with labels, from its pretrained weights.

There are I-JEPA's 1 % recipe and MAE's. The first is one paragraph (I-JEPA, appendix A.2); where it
is silent, MAE's choices are used: five epochs of warmup, a final rate of 1e-6, betas 0.9 and
0.999, tokens averaged before a new norm that replaces the encoder's last one, a head initialised at
2e-5, trained positions, incomplete batches dropped. 3e-5 is read as the rate itself, not as a rate
per 256 images. The last epoch counts; the best one on test is the reading of the papers.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.base import schedules
from stopmim.base.console import Ticker, say
from stopmim.base.errors import DataError
from stopmim.base.random_keys import numpy_generator, torch_generator
from stopmim.data.crops import normalise
from stopmim.data.images import Images
from stopmim.data.survey import check_like
from stopmim.evals.features import stats_for
from stopmim.evals.inputs import Inputs
from stopmim.evals.randaugment import rand_augment
from stopmim.evals.recipes import Tuning
from stopmim.evals.showing import batches, read
from stopmim.evals.views import FINETUNE
from stopmim.method.encoder import EPS, VisionTransformer


def finetune(inputs: Inputs, label: str, recipe: Tuning, *, every_epoch: bool = False) -> list[int]:
    """Trains a copy of the encoder; returns the number of correct test images after each epoch.

    Without `every_epoch`, only the last epoch is tested, and the others count 0. Test images
    are resized bicubically, as in MAE; training images are random crops of the same size, flipped
    and RandAugmented.
    """
    y, test_y = inputs.labels_of(label)
    if len(y.unique()) < 2:
        raise DataError(f"{label}: all {len(y)} training images are of one class")
    for part in (inputs.train, inputs.test):
        check_like(part, stats_for(inputs.encoder))
    tuner = _Tuner(inputs, int(y.max()) + 1, recipe)
    steps = max(1, len(y) // recipe.batch_size)
    correct = []
    with Ticker("fine-tuning", recipe.epochs * steps) as ticker:
        for epoch in range(recipe.epochs):
            tuner.train(inputs.train, y, epoch, steps, ticker)
            tested = every_epoch or epoch == recipe.epochs - 1
            correct.append(tuner.correct(inputs.test, test_y) if tested else 0)
    return correct


class _Tuner:
    """A classifier on a copy of the encoder, and its optimizer."""

    def __init__(self, inputs: Inputs, classes: int, recipe: Tuning) -> None:
        assert isinstance(inputs.encoder, VisionTransformer)
        self.recipe, self.seed, self.precision = recipe, inputs.seed, inputs.precision
        self.device, self.classes = torch.device(inputs.device), classes
        self.view = replace(inputs.shown.test, mode="bicubic")
        self.stats = stats_for(inputs.encoder)
        self.in_colour = (self.stats.channels, self.stats.kind) == (3, "uint8")
        if not self.in_colour and not inputs.untrained:
            say("finetune: RandAugment is for 8-bit RGB: images are only cropped and flipped")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_generator("finetune", self.seed).initial_seed())
            self.model = Classifier(inputs.encoder, classes, recipe.drop_path).to(self.device)
        self.optimizer = torch.optim.AdamW(groups(self.model, recipe), lr=recipe.lr)
        # The head starts at 2e-5: unscaled, its gradients would underflow in float16.
        scaled = self.precision == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    def train(self, images: Images, y: Tensor, epoch: int, steps: int, ticker: Ticker) -> None:
        """Trains for one epoch of `steps` updates."""
        generator = torch_generator("finetune", self.seed, epoch)
        order = torch.randperm(len(y), generator=generator)[: steps * self.recipe.batch_size]
        parts, crop = order.tensor_split(steps), FINETUNE.train.at(self.view.size)

        def show(i: int) -> Tensor:
            rng = numpy_generator("finetune", self.seed, epoch, i)
            shown = crop(read(images, i), rng)
            if not self.in_colour:
                return shown
            pixels = shown.permute(1, 2, 0).numpy()
            return torch.from_numpy(rand_augment(pixels, rng).copy()).permute(2, 0, 1)

        shown = batches(show, (part.tolist() for part in parts))
        for i, (part, pixels) in enumerate(zip(parts, shown, strict=True)):
            step = epoch * steps + i
            for group in self.optimizer.param_groups:
                group["lr"] = group["scale"] * rate(self.recipe, step, steps)
            rng = numpy_generator("mix", self.seed, step)
            x = erase(normalise(pixels.to(self.device), self.stats), self.recipe.erase, rng)
            wanted = F.one_hot(y[part], self.classes).float().to(self.device)
            x, wanted = mix(x, wanted, self.recipe, rng)
            logits = self._logits(x, torch_generator("drop", self.seed, step))
            loss = F.cross_entropy(logits.float(), wanted, label_smoothing=self.recipe.smoothing)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            ticker.update(step + 1, f"loss {loss.item():.3f}")

    @torch.no_grad()
    def correct(self, images: Images, y: Tensor) -> int:
        """Number of test images that are classified correctly."""
        parts = (part.tolist() for part in torch.arange(len(images)).split(256))
        found = [
            self._logits(normalise(pixels.to(self.device), self.stats)).argmax(dim=1).cpu()
            for pixels in batches(lambda i: self.view(read(images, i)), parts)
        ]
        return int((torch.cat(found) == y).sum())

    def _logits(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        enabled = self.precision is not None
        with torch.autocast(self.device.type, self.precision, enabled):
            return self.model(x, generator)


def rate(recipe: Tuning, step: int, steps_per_epoch: int) -> float:
    """Learning rate of the last layers at `step`."""
    total, warmup = recipe.epochs * steps_per_epoch, round(recipe.warmup_epochs * steps_per_epoch)
    rates = {"start": 0.0, "peak": recipe.lr, "final": recipe.final_lr}
    return schedules.warmup_cosine(step, total=total, warmup=warmup, **rates)


class Classifier(nn.Module):
    """A copy of an encoder, mean pooling over patches, a new norm and a linear layer."""

    def __init__(self, encoder: VisionTransformer, classes: int, drop_path: float) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).train()
        # Positions are a buffer in the encoder; here they are trained.
        self.encoder.pos_embed = nn.Parameter(encoder.pos_embed.detach().clone())
        self.encoder.norm = nn.Identity()  # type: ignore[assignment]
        self.fc_norm = nn.LayerNorm(encoder.width, eps=EPS)
        self.head = nn.Linear(encoder.width, classes)
        nn.init.trunc_normal_(self.head.weight, std=2e-5)
        nn.init.zeros_(self.head.bias)
        depth = len(self.encoder.blocks)
        self.drop = [drop_path * i / max(1, depth - 1) for i in range(depth)]

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits (B, K); with a generator, blocks are dropped for some images."""
        x = self.encoder.with_class(self.encoder.embed(images))
        for block, chance in zip(self.encoder.blocks, self.drop, strict=True):
            x = x + self._keep(block.attn(block.norm1(x)), chance, generator)  # type: ignore[operator]
            x = x + self._keep(block.mlp(block.norm2(x)), chance, generator)  # type: ignore[operator]
        patches = images.shape[-2] * images.shape[-1] // self.encoder.patch**2
        return self.head(self.fc_norm(x[:, -patches:].mean(dim=1)))  # a class token comes first

    def _keep(self, x: Tensor, chance: float, generator: torch.Generator | None) -> Tensor:
        if generator is None or not chance:
            return x
        kept = torch.rand(len(x), 1, 1, generator=generator) >= chance
        return x * (kept / (1 - chance)).to(x)


def groups(model: Classifier, recipe: Tuning) -> list[dict[str, Any]]:
    """Parameter groups by learning rate and weight decay, as in MAE's util/lr_decay.py."""
    found: dict[tuple[float, bool], dict[str, Any]] = {}
    depth = len(model.drop)
    for name, p in model.named_parameters():
        layer = depth + 1  # embeddings are layer 0, block i is layer i + 1
        if name.startswith("encoder."):
            layer = int(name.split(".")[2]) + 1 if name.startswith("encoder.blocks.") else 0
        scale = recipe.layer_decay ** (depth + 1 - layer)
        decays = p.ndim > 1 and name not in ("encoder.pos_embed", "encoder.cls_token")
        decay = recipe.weight_decay if decays else 0.0
        new = {"params": [], "scale": scale, "weight_decay": decay}
        found.setdefault((scale, decays), new)["params"].append(p)
    return list(found.values())


def erase(images: Tensor, chance: float, rng: np.random.Generator) -> Tensor:
    """Replaces 2 % to a third of some images (B, C, H, W) with noise, in place."""
    channels, height, width = images.shape[1:]
    for i in np.flatnonzero(rng.random(len(images)) < chance):
        for _ in range(10):
            area = height * width * rng.uniform(0.02, 1 / 3)
            aspect = np.exp(rng.uniform(np.log(0.3), np.log(1 / 0.3)))
            h, w = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
            if h < height and w < width:
                top, left = rng.integers(0, (height - h, width - w), endpoint=True)
                noise = torch.from_numpy(rng.standard_normal((channels, h, w), np.float32))
                images[i, :, top : top + h, left : left + w] = noise.to(images)
                break
    return images


def mix(
    images: Tensor, wanted: Tensor, recipe: Tuning, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Blends every image with another one, or pastes a part of it, and mixes labels accordingly.

    As in timm's batch mode: one share for the batch, the reversed batch as partners, and either
    mixup or cutmix.
    """
    alphas = {"mixup": recipe.mixup, "cutmix": recipe.cutmix}
    kinds = [kind for kind, alpha in alphas.items() if alpha]
    if not kinds:
        return images, wanted
    kind = kinds[int(rng.integers(len(kinds)))]
    share, others = float(rng.beta(alphas[kind], alphas[kind])), images.flip(0)
    if kind == "mixup":
        images = images * share + others * (1 - share)
    else:
        height, width = images.shape[-2:]
        h, w = int(height * np.sqrt(1 - share)), int(width * np.sqrt(1 - share))
        y, x = int(rng.integers(height)), int(rng.integers(width))
        top, bottom = max(0, y - h // 2), min(height, y + h // 2)
        left, right = max(0, x - w // 2), min(width, x + w // 2)
        images = images.clone()
        images[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
    return images, wanted * share + wanted.flip(0) * (1 - share)
