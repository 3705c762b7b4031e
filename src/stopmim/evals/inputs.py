"""What an evaluation is given: an encoder by its name, images in two parts, labels to ask for."""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from stopmim.base.errors import DataError, UserError
from stopmim.base.random_keys import seed_of
from stopmim.data.images import Images
from stopmim.data.skip import both_without_skipped, without_skipped
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import split_by_class, underlying
from stopmim.evals.views import View
from stopmim.method.encoder import Encoder, VisionTransformer, initialise, initialise_mae
from stopmim.method.positions import sincos_2d
from stopmim.runs import checkpoint
from stopmim.runs.run import Run
from stopmim.weights.load import load_encoder

QUESTIONS = ("count", "distance", "shape")  # of scenes; colour is seen in a single pixel


def open_encoder(name: str, branch: Literal["target", "context"] = "target") -> Encoder:
    """What `load_encoder` opens, or ``random:ARCH@SIZE``, an encoder before any training."""
    if not name.startswith("random:"):
        return load_encoder(name, branch)
    found = re.fullmatch(r"random:(\w+)@([1-9]\d*)", name)
    if not found:
        raise UserError(f"{name}: expected random:ARCH@SIZE, as random:vit_b16@224")
    try:
        return untrained(VisionTransformer.from_arch(found[1], int(found[2])), 0)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def open_at(
    name: str, branch: Literal["target", "context"] = "target"
) -> tuple[Encoder, int | None]:
    """The encoder, and the step of its checkpoint; None if it is of no run of ours."""
    path = Path(name)
    if (path / "run.json").exists():
        path = Run(path).checkpoint  # chosen once: the next one may be there in a moment
        name = str(path)
    encoder = open_encoder(name, branch)  # verifies the checkpoint
    step = checkpoint.state(path).get("step") if (path / "manifest.json").exists() else None
    return encoder, step


def untrained(encoder: VisionTransformer, seed: int) -> VisionTransformer:
    """The same architecture with the weights it would begin with."""
    twin = copy.deepcopy(encoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("untrained", seed))
        # On the CPU, so that the twin is the same whatever the device.
        twin.cpu().apply(initialise_mae if twin.start == "mae" else initialise)
        for token in twin.parameters(recurse=False):  # of the class, where there is one
            nn.init.normal_(token, std=0.02)
    # Some have learned their positions; all begin with, or without, a class token that has none.
    patches = twin.side**2
    twin.pos_embed.zero_()[0, -patches:] = sincos_2d(twin.side, twin.width)
    return twin.eval()


def native_size(encoder: Encoder) -> int:
    """Edge of the images that it was made for; 224 if it does not say."""
    return getattr(encoder, "side", 14) * getattr(encoder, "patch", 16)


def middle(encoder: Encoder, images: Images, size: int | None = None) -> View:
    """The usual view: 256 px and then the middle 224 of photographs, all of a rendered scene."""
    size = size or native_size(encoder)
    return View(size if isinstance(underlying(images), Scenes) else round(size * 256 / 224), size)


def open_pair(
    data: str | None,
    train: str | None,
    test: str | None,
    encoder: Encoder,
    *,
    hold_out: float | None = None,
    skip: str | Path | None = None,
    seed: int = 0,
) -> tuple[Images, Images]:
    """Images to fit on and images to test on.

    `data` alone means its train and its test part, or with `hold_out` that share of each class to
    test on. Scenes have as many of both, the test scenes with the next seed. Nothing at all means
    scenes that no preset was chosen on. `skip` is a list of images to leave out of both.
    """
    if hold_out is not None and (data is None or not 0 < hold_out < 1):
        raise UserError(f"--hold-out {hold_out:g}: expected a share of --data, as 0.2")
    if data is None and train is None and test is None:
        size = native_size(encoder)
        data = f"scenes:4096:{size}:3"
    if data is not None:
        if train is not None or test is not None:
            raise UserError("eval: --data is both parts in one: leave out --train and --test")
        if hold_out is not None:
            if open_test(data) is not None:
                raise UserError(
                    f"--hold-out {hold_out:g}: {data} has a test part: leave --hold-out out, or "
                    f"give the training images alone as --data"
                )
            return split_by_class(without_skipped(open_images(data), skip), hold_out, seed)
        return both_without_skipped(open_images(data, "train"), open_images(data, "test"), skip)
    if train is None or test is None:
        raise UserError("eval: --train and --test belong together; or give --data")
    return both_without_skipped(open_images(train), open_images(test), skip)


def choose_labels(train: Images, test: Images, wanted: Sequence[str]) -> list[str]:
    """Names of the labels to ask for, each known of both parts and worth asking for."""
    common = [name for name in train.labels if name in test.labels]
    if not common:
        raise DataError("eval: the images have no labels: put them in one folder per class")
    if not wanted:
        if isinstance(underlying(train), Scenes):
            wanted = [name for name in common if name in QUESTIONS]
        else:  # beside a class, other numbers are facts about the file, as its width
            wanted = ["class"] if "class" in common else common
    for name in wanted:
        if name not in common:
            raise UserError(f"--label {name}: no such label; there is {', '.join(common)}")
        for part, images in (("training", train), ("test", test)):
            if hidden := int((images.labels[name] < 0).sum()):
                raise DataError(
                    f"{name}: {hidden} of {len(images)} {part} images have a label below zero, "
                    f"which stands for a label that is not told"
                )
        first = int(train.labels[name][0])
        if (train.labels[name] == first).all():
            raise DataError(
                f"{name}: all {len(train)} training images are of one class: nothing to tell apart"
            )
    return list(wanted)


def paired_labels(train: Images, test: Images, name: str) -> tuple[Tensor, Tensor]:
    """Labels of both parts, (N,) and (n,), where the same number means the same class."""
    y, test_y = (torch.from_numpy(images.labels[name]) for images in (train, test))
    ours, theirs = (getattr(images, "classes", None) for images in (train, test))
    if name == "class" and ours and theirs and ours != theirs:
        # A class of the test part may have another number there, or be missing in train.
        names = list(dict.fromkeys([*ours, *theirs]))
        test_y = torch.tensor([names.index(c) for c in theirs])[test_y]
    return y, test_y
