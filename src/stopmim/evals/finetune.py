"""Fine-tuning: the whole encoder trained with labels, from its pretrained weights.

I-JEPA's 1 % recipe and MAE's. The first is stated in a paragraph (I-JEPA, appendix A.2); where that
is silent, MAE's choice is taken: five epochs of warm-up, a last rate of 1e-6, betas 0.9 and 0.999,
tokens averaged before a new norm and without the encoder's last one, a head that begins at 2e-5,
positions that are trained, incomplete batches left out. 3e-5 is read as the rate itself, not as a
rate per 256 images. The last epoch counts; the best one on test is the reading of the papers.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stopmim.base import schedules
from stopmim.base.console import Ticker
from stopmim.base.errors import DataError, UserError
from stopmim.base.random_keys import numpy_generator, torch_generator
from stopmim.data.crops import normalise
from stopmim.data.images import Images
from stopmim.evals.features import batches, read
from stopmim.evals.inputs import paired_labels
from stopmim.evals.linear import Selection
from stopmim.evals.randaugment import rand_augment
from stopmim.evals.results import Result, accuracy
from stopmim.evals.views import FINETUNE, View
from stopmim.method.encoder import EPS, VisionTransformer


@dataclass(frozen=True)
class Tuning:
    """How an encoder is fine-tuned."""

    epochs: int = 50
    batch_size: int = 512
    lr: float = 3e-5
    weight_decay: float = 0.05
    layer_decay: float = 0.75
    warmup_epochs: float = 5
    final_lr: float = 1e-6
    smoothing: float = 0.1  # of labels
    drop_path: float = 0.0  # of the last block; the first has none
    mixup: float = 0.0  # alpha of its beta distribution; 0: none
    cutmix: float = 0.0
    erase: float = 0.0  # chance that a part of an image is noise

    def __post_init__(self) -> None:
        least = {"epochs": 1, "batch_size": 1, "lr": 0, "weight_decay": 0}
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise UserError(
                    f"finetune: {name} must be {low} or more, got {getattr(self, name)}"
                )


def _mae(epochs: int, base: float, layer_decay: float, drop_path: float) -> Tuning:
    mixing = {"mixup": 0.8, "cutmix": 1.0, "erase": 0.25}
    return Tuning(epochs, 1024, base * 1024 / 256, 0.05, layer_decay, drop_path=drop_path, **mixing)


RECIPES = {
    "one-percent": Tuning(),  # ViT-L/16
    "one-percent-huge": Tuning(weight_decay=0.4),  # ViT-H/14 and ViT-H/16 at 448 px
    "mae-base": _mae(100, 5e-4, 0.65, 0.1),
    "mae-large": _mae(50, 1e-3, 0.75, 0.2),
    "mae-huge": _mae(50, 1e-3, 0.75, 0.3),
}


def finetune(
    encoder: VisionTransformer,
    train: Images,
    test: Images,
    label: str,
    recipe: Tuning,
    *,
    view: View,
    selections: Sequence[Selection] = ("held-out",),
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: torch.dtype | None = None,
) -> list[Result]:
    """Accuracy on `test` of a copy of `encoder`, trained on all of `train`; nothing is chosen.

    Args:
        view: of test images, bicubic as MAE has it. Training images are random crops of its size,
            flipped and RandAugmented.
        selections: "held-out" is the last epoch, "paper" the epoch that is best on test.
    """
    view = replace(view, mode="bicubic")
    y, test_y = paired_labels(train, test, label)
    if len(y.unique()) < 2:
        raise DataError(f"{label}: all {len(y)} training images are of one class")
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_generator("finetune", seed).initial_seed())
        model = Classifier(encoder, int(y.max()) + 1, recipe.drop_path).to(device)
    optimizer = torch.optim.AdamW(groups(model, recipe), lr=recipe.lr)
    # The head begins at 2e-5: what it hands down would be 0 in float16.
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    steps = max(1, len(y) // recipe.batch_size)
    correct = []
    with Ticker("fine-tuning", recipe.epochs * steps) as ticker:
        for epoch in range(recipe.epochs):
            generator = torch_generator("finetune", seed, epoch)
            order = torch.randperm(len(y), generator=generator)[: steps * recipe.batch_size]
            parts = order.tensor_split(steps)
            shown = batches(_crops(train, view, seed, epoch), (part.tolist() for part in parts))
            for i, (part, images) in enumerate(zip(parts, shown, strict=True)):
                at = epoch * steps + i
                for group in optimizer.param_groups:
                    group["lr"] = group["scale"] * rate(recipe, at, steps)
                rng = numpy_generator("mix", seed, at)
                x = normalise(images.to(device))
                wanted = F.one_hot(y[part], int(y.max()) + 1).float().to(device)
                x, wanted = mix(erase(x, recipe.erase, rng), wanted, recipe, rng)
                with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
                    logits = model(x, torch_generator("drop", seed, at))
                loss = F.cross_entropy(logits.float(), wanted, label_smoothing=recipe.smoothing)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                ticker.update(at + 1, f"loss {loss.item():.3f}")
            last = epoch == recipe.epochs - 1
            tested = last or "paper" in selections
            correct.append(_test(model, test, test_y, view, device, precision) if tested else 0)
    best = int(np.argmax(correct))
    common: dict[str, Any] = {"seed": seed, "train": len(y)}
    return [
        accuracy(
            "finetune" if selection == "held-out" else "finetune best epoch",
            label,
            correct[-1 if selection == "held-out" else best],
            len(test_y),
            selection="none" if selection == "held-out" else "paper",
            setting=f"{recipe.epochs if selection == 'held-out' else best + 1} epochs",
            **common,
        )
        for selection in selections
    ]


def rate(recipe: Tuning, step: int, steps_per_epoch: int) -> float:
    return schedules.warmup_cosine(
        step,
        total=recipe.epochs * steps_per_epoch,
        warmup=round(recipe.warmup_epochs * steps_per_epoch),
        start=0.0,
        peak=recipe.lr,
        final=recipe.final_lr,
    )


class Classifier(nn.Module):
    """A copy of an encoder, the average of its patches, a new norm and a linear layer."""

    def __init__(self, encoder: VisionTransformer, classes: int, drop_path: float) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).train()
        # The table of positions is a buffer; here it is trained too.
        self.encoder.pos_embed = nn.Parameter(encoder.pos_embed.detach().clone())
        self.encoder.norm = nn.Identity()  # type: ignore[assignment]
        self.fc_norm = nn.LayerNorm(encoder.width, eps=EPS)
        self.head = nn.Linear(encoder.width, classes)
        nn.init.trunc_normal_(self.head.weight, std=2e-5)
        nn.init.zeros_(self.head.bias)
        depth = len(self.encoder.blocks)
        self.drop = [drop_path * i / max(1, depth - 1) for i in range(depth)]

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits (B, K). Blocks are left out for some images if there is a generator."""
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
    """Parameters by their rate and whether they decay, as MAE's util/lr_decay.py."""
    found: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        scale = recipe.layer_decay ** (len(model.drop) + 1 - layer_of(name, len(model.drop)))
        decays = p.ndim > 1 and name not in ("encoder.pos_embed", "encoder.cls_token")
        decay = recipe.weight_decay if decays else 0.0
        new = {"params": [], "scale": scale, "weight_decay": decay}
        found.setdefault((scale, decays), new)["params"].append(p)
    return list(found.values())


def layer_of(name: str, depth: int) -> int:
    """0 for the embedding of patches and positions, i + 1 for block i, depth + 1 for the rest."""
    if name.startswith("encoder.blocks."):
        return int(name.split(".")[2]) + 1
    return 0 if name.startswith("encoder.") else depth + 1


def _crops(train: Images, view: View, seed: int, epoch: int) -> Any:
    crop = FINETUNE.train.at(view.size)

    def show(i: int) -> Tensor:
        rng = numpy_generator("finetune", seed, epoch, i)
        pixels = crop(read(train, i), rng).permute(1, 2, 0).numpy()
        return torch.from_numpy(rand_augment(pixels, rng).copy()).permute(2, 0, 1)

    return show


def erase(images: Tensor, chance: float, rng: np.random.Generator) -> Tensor:
    """Some images (B, 3, H, W) with a part replaced by noise: 2 % to a third of their area."""
    height, width = images.shape[-2:]
    for i in np.flatnonzero(rng.random(len(images)) < chance):
        for _ in range(10):
            area = height * width * rng.uniform(0.02, 1 / 3)
            aspect = np.exp(rng.uniform(np.log(0.3), np.log(1 / 0.3)))
            h, w = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
            if h < height and w < width:
                top, left = rng.integers(0, (height - h, width - w), endpoint=True)
                noise = torch.from_numpy(rng.standard_normal((3, h, w), np.float32))
                images[i, :, top : top + h, left : left + w] = noise.to(images)
                break
    return images


def mix(
    images: Tensor, wanted: Tensor, recipe: Tuning, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Every image blended with another one, or with a part of it, and their labels with them.

    One share for the whole batch, the partner is the image at the same place from the end, and
    mixup and cutmix take turns at random: timm's batch mode.
    """
    kinds = {"mixup": recipe.mixup, "cutmix": recipe.cutmix}
    kinds = {kind: alpha for kind, alpha in kinds.items() if alpha}
    if not kinds:
        return images, wanted
    kind = [*kinds][int(rng.integers(len(kinds)))]
    share, others = float(rng.beta(kinds[kind], kinds[kind])), images.flip(0)
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


@torch.no_grad()
def _test(
    model: Classifier,
    test: Images,
    y: Tensor,
    view: View,
    device: torch.device,
    precision: torch.dtype | None,
) -> int:
    rng, right = numpy_generator("test"), 0
    parts = torch.arange(len(test)).split(256)
    shown = batches(lambda i: view(read(test, i), rng), (part.tolist() for part in parts))
    for part, images in zip(parts, shown, strict=True):
        with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
            logits = model(normalise(images.to(device)))
        right += int((logits.argmax(dim=1).cpu() == y[part]).sum())
    return right
