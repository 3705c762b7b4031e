"""Inputs of an evaluation: an encoder by name, images in two splits, labels, features."""

import copy
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from stopmim.base.console import say
from stopmim.base.errors import DataError, UserError
from stopmim.base.random_keys import seed_of
from stopmim.data.channels import Form
from stopmim.data.images import Images
from stopmim.data.skip import both_without_skipped, without_skipped
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.sources.scanning import refuse_unknown
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import split_by_class, underlying, without_loose
from stopmim.data.survey import check_like
from stopmim.data.transform import seeing
from stopmim.evals import cache
from stopmim.evals.features import frozen, stats_for
from stopmim.evals.recipes import TASKS
from stopmim.evals.request import ImageRequest
from stopmim.evals.results import Measured, Result, Selection, wilson_interval
from stopmim.evals.showing import Kept
from stopmim.evals.views import TrainView, View, Views, middle, native_size
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.method.encoder import Encoder, VisionTransformer, initialise, initialise_mae
from stopmim.method.positions import sincos_2d
from stopmim.runs import checkpoint
from stopmim.weights.load import load_encoder
from stopmim.weights.vit import Branch

QUESTIONS = ("count", "distance", "shape")  # labels of scenes; colour is visible in one pixel
NO_IMAGES = Arrays(np.empty((0, 1, 1, 3), np.uint8), {}, [], "none")  # for videos alone
FEW_IMAGES = 10_000  # up to this many are compared with eight untrained networks, more with four


@dataclass(frozen=True, eq=False)
class Inputs:
    """An encoder, and the images it is measured on; features are computed on first use.

    It uses `label`, `size`, `crops`, `seed`, `device` and `precision` of the request.
    """

    encoder: Encoder
    train: Images = NO_IMAGES  # labelled, to fit on
    test: Images = NO_IMAGES
    request: ImageRequest = ImageRequest()  # noqa: RUF009
    untrained: bool = False  # this is the encoder before training, measured for comparison
    kept: Kept = field(default_factory=Kept, repr=False)  # views, shared with untrained twins
    _drawn: list[Tensor] = field(default_factory=list, init=False, repr=False)  # random views

    def __post_init__(self) -> None:
        patch = getattr(self.encoder, "patch", 1)
        if self.size % patch:
            raise UserError(f"--size {self.size}: not a multiple of the patch size, {patch}")

    def untrained_twins(self) -> Iterator[Self]:
        """Yields the same with random weights; nothing if the initialisation is unknown."""
        if isinstance(self.encoder, VisionTransformer):
            for seed in range(self.seed, self.seed + self.random_inits):
                yield replace(self, encoder=untrained(self.encoder, seed), untrained=True)

    @property
    def random_inits(self) -> int:
        """Number of untrained networks to compare with: each takes as long as the encoder."""
        few = len(self.train) + len(self.test) <= FEW_IMAGES
        asked = self.request.random_inits
        return (8 if few else 4) if asked is None else asked

    @property
    def without_images(self) -> bool:
        return not len(self.test)

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def size(self) -> int:
        """Size of the images shown to the encoder."""
        return self.request.size or native_size(self.encoder)

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.request.device)

    @cached_property
    def precision(self) -> torch.dtype | None:
        return choose_precision(self.request.precision, self.device)

    @cached_property
    def shown(self) -> Views:
        """Views of training images, where they are random, and of test images."""
        if self.request.crops is not None:
            return TASKS[self.request.crops].views(self.encoder).at(self.size)
        return Views(TrainView(self.size), self.usual)

    @property
    def usual(self) -> View:
        """View of an image unless a recipe sets another one; low-shot always uses it."""
        return middle(self.encoder, self.test, self.size)

    @cached_property
    def labels(self) -> list[str]:
        """Names of the labels to predict."""
        return choose_labels(self.train, self.test, self.request.label)

    def labels_of(self, name: str) -> tuple[Tensor, Tensor]:
        """Labels of both parts, (N,) and (n,), where equal numbers mean equal classes."""
        y, test_y = (torch.from_numpy(images.labels[name]) for images in (self.train, self.test))
        ours, theirs = (getattr(images, "classes", None) for images in (self.train, self.test))
        if name == "class" and ours and theirs and ours != theirs:
            # The parts may number classes differently, and train may lack some.
            names = list(dict.fromkeys([*ours, *theirs]))
            test_y = torch.tensor([names.index(c) for c in theirs])[test_y]
        return y, test_y

    def features(self, images: Images, view: View | TrainView, draw: int = 0) -> Tensor:
        """Features (N, L * D) of the last L blocks, cached; `draw` numbers a random view."""
        numbers, how = (self.seed, draw), (self.device, self.precision)
        return frozen(self.encoder, images, view, numbers, *how, kept=self.kept)

    @cached_property
    def train_x(self) -> Tensor:
        return self.features(self.train, self.shown.test)

    @cached_property
    def test_x(self) -> Tensor:
        return self.features(self.test, self.shown.test)

    @property
    def copies(self) -> int:
        """Number of test images with exactly the features of a training image, if computed.

        0 for a collapsed encoder, to which different images are the same.
        """
        if not {"train_x", "test_x"} <= vars(self).keys():
            return 0
        ours, theirs = (self._rows(x) for x in (self.train_x, self.test_x))
        different = set(ours)
        return sum(row in different for row in theirs) if 2 * len(different) > len(ours) else 0

    def _rows(self, x: Tensor) -> list[bytes]:
        """The last block of features `x`, image by image."""
        last = np.ascontiguousarray(x[:, -self.encoder.width :].numpy())
        return last.view(f"V{last[0].nbytes}")[:, 0].tolist()

    def random_views(self, count: int) -> list[Tensor]:
        """Features of `count` random views of the training images."""
        for i in range(len(self._drawn), count):
            self._drawn.append(self.features(self.train, self.shown.train, i))
        return self._drawn[:count]

    def last(self, x: Tensor) -> Tensor:
        """The last block of features `x`, float32 on the device."""
        return x[:, -self.encoder.width :].to(self.device).float()

    def graded(
        self, protocol: str, label: str, correct: Tensor | int, selection: Selection, train: int,
        setting: str,
    ) -> Measured:  # fmt: skip
        """Accuracy, given which test images (n,), or how many, are correct; fitted to `train`."""
        n, right = len(self.test), correct if isinstance(correct, int) else int(correct.sum())
        interval = wilson_interval(right, n)
        result = Result("accuracy", protocol, label, right / n, interval, n, selection, self.seed)
        result = replace(result, train=train, setting=setting)
        return Measured(result, None if isinstance(correct, int) else correct)

    def key(self, labels: Sequence[str]) -> str:
        """Cache key of images, `labels` and views; the device changes no more than rounding."""
        images = [cache.of_images(part, labels) for part in (self.train, self.test)]
        return cache.key(*images, self.shown, self.seed, str(self.precision))


def open_encoder(name: str, branch: Branch = "target") -> Encoder:
    """Opens anything `load_encoder` reads, or ``random:ARCH@SIZE``, an untrained encoder."""
    if not name.startswith("random:"):
        return load_encoder(name, branch)
    found = re.fullmatch(r"random:(\w+)@([1-9]\d*)", name)
    if not found:
        raise UserError(f"{name}: expected random:ARCH@SIZE, e.g. random:vit_b16@224")
    try:
        return seeing(untrained(VisionTransformer.from_arch(found[1], int(found[2])), 0))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def open_at(name: str, branch: Branch = "target") -> tuple[Encoder, int | None]:
    """Opens an encoder and returns it with the step of its checkpoint, None for foreign files."""
    # os.path also takes names that are too long: they are refused like any other file.
    if any(os.path.exists(os.path.join(name, file)) for file in ("run.json", "manifest.json")):

        def read(path: Path) -> tuple[Encoder, int | None]:  # of one and the same checkpoint
            return open_encoder(str(path), branch), checkpoint.state(path).get("step")

        return checkpoint.read_newest(Path(name), read)
    return open_encoder(name, branch), None


def untrained(encoder: VisionTransformer, seed: int) -> VisionTransformer:
    """Copy of `encoder` with freshly initialised weights."""
    twin = copy.deepcopy(encoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("untrained", seed))
        # On the CPU, so that the weights do not depend on the device.
        twin.cpu().apply(initialise_mae if twin.start == "mae" else initialise)
        for token in twin.parameters(recurse=False):  # the class token, if there is one
            nn.init.normal_(token, std=0.02)
    # Learned positions are reset as well; the class token has none.
    twin.pos_embed.zero_()[0, -(twin.side**2) :] = sincos_2d(twin.side, twin.width)
    return twin.eval()


def open_pair(encoder: Encoder, request: ImageRequest) -> tuple[Images, Images]:
    """Images to fit on and to test on; by default scenes that no preset was tuned on.

    Scenes are tested on as many scenes with the next seed.
    """
    train, test = _open_pair(encoder, request)
    for part in (train, test):
        check_like(part, stats_for(encoder))
    if "class" in (request.label or ("class",)):
        _check_classes(train, test, request.test or request.data)
    return _labelled(train), _labelled(test)


def _check_classes(train: Images, test: Images, name: str | None) -> None:
    """Refuses test images of a named class that training lacks: no answer could be right."""
    ours, theirs = (getattr(images, "classes", []) for images in (train, test))
    if ours and theirs and ours != theirs and "class" in test.labels:
        present = np.unique(test.labels["class"]).tolist()
        refuse_unknown(name or "test images", [theirs[i] for i in present if i >= 0], ours)


def _open_pair(encoder: Encoder, request: ImageRequest) -> tuple[Images, Images]:
    data, train, test, share = request.data, request.train, request.test, request.hold_out
    if share is not None and (data is None or not 0 < share < 1):
        raise UserError(f"--hold-out {share:g}: expected a share of --data, e.g. 0.2")
    if train is None and test is None:
        if data is None and not (stats := stats_for(encoder)).is_picture:
            what = Form(stats.channels, stats.kind)
            raise UserError(f"eval: --data is missing; this encoder takes images of {what}")
        if data is None:
            data = f"scenes:4096:{native_size(encoder)}:3"
            say(f"eval: no --data: fitted and tested on rendered scenes ({data})")
    elif data is not None:
        raise UserError("eval: --data names both splits: leave out --train and --test")
    elif train is None or test is None:
        raise UserError("eval: --train and --test belong together; or give --data")
    else:
        return both_without_skipped(open_images(train), open_images(test), request.skip)
    if share is None:
        parts = open_images(data, "train"), open_images(data, "test")
        return both_without_skipped(*parts, request.skip)
    if open_test(data) is not None:
        raise UserError(
            f"--hold-out {share:g}: {data} has a test split: leave --hold-out out, or give the "
            f"training images alone as --data"
        )
    images = _labelled(without_skipped(open_images(data), request.skip))
    return split_by_class(images, share, request.seed)


def _labelled(images: Images) -> Images:
    """Leaves out images that lie beside class folders, with a message."""
    rest = without_loose(images)
    if loose := len(images) - len(rest):
        what = "image lies" if loose == 1 else "images lie"
        say(f"eval: {loose:,} {what} beside the class folders, without a label: left out")
    return rest


def choose_labels(train: Images, test: Images, wanted: Sequence[str]) -> list[str]:
    """Returns the labels to predict, after checking that both parts have them."""
    common = [name for name in train.labels if name in test.labels]
    if not common:
        raise DataError(_without_labels(train, test))
    if not wanted:
        if isinstance(underlying(train), Scenes):
            wanted = [name for name in common if name in QUESTIONS]
        else:  # besides a class, other numbers describe the file, such as its width
            wanted = ["class"] if "class" in common else common
    for name in wanted:
        if name not in common:
            raise UserError(f"--label {name}: no such label; there is {', '.join(common)}")
        for part, images in (("training", train), ("test", test)):
            if hidden := int((images.labels[name] < 0).sum()):
                raise DataError(
                    f"{name}: {hidden} of {len(images)} {part} images have a label below zero, "
                    f"which means unknown; label them, or leave them out with --skip FILE"
                )
        if (train.labels[name] == train.labels[name][0]).all():
            which = f"all {len(train)} training images are of one class"
            raise DataError(f"{name}: {which}: nothing to tell apart")
    return list(wanted)


def _without_labels(train: Images, test: Images) -> str:
    """Message that says which images lack labels, and what to do about it."""
    bare = [x for x in (("training ", train), ("test ", test)) if not x[1].labels]
    if not bare:
        ours, theirs = (", ".join(images.labels) for images in (train, test))
        return f"eval: no label in common: training images have {ours}, test images {theirs}"
    which = bare[0][0] if len(bare) == 1 else ""
    hint = getattr(underlying(bare[0][1]), "label_hint", "they need an attribute `labels`")
    scenes = "" if which else "; or leave out --data, to be asked about rendered scenes"
    return f"eval: the {which}images have no labels: {hint}{scenes}"
