"""Everything that the data allow to be asked of an encoder, beside the same encoder untrained."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stopmim.base.console import say
from stopmim.base.errors import DataError
from stopmim.data.images import Images
from stopmim.data.subset import Subset
from stopmim.data.videos import Year, open_videos
from stopmim.evals import cache
from stopmim.evals.features import frozen, rankme
from stopmim.evals.inputs import choose_labels, middle, paired_labels, untrained
from stopmim.evals.knn import KS, choose_k, knn_predict
from stopmim.evals.linear import Selection, probes, solve
from stopmim.evals.lowshot import LAMBDA, classify, listed, per_class
from stopmim.evals.recipes import OWN, Recipe
from stopmim.evals.results import Result, accuracy
from stopmim.evals.tracking import Tracking, track
from stopmim.evals.views import LOWSHOT, TrainView, View
from stopmim.method.encoder import Encoder, VisionTransformer

PROTOCOLS = ("knn", "linear", "lowshot", "rankme", "tracking")
TRACKED = ("J&F", "J", "F")  # their recall and decay are left to the protocol itself
QUICK = 10**9  # features x classes up to which logistic regression is solved: seconds


@dataclass(frozen=True)
class Options:
    """What is asked, and how. The defaults are the held-out reading of everything."""

    protocols: Sequence[str] = PROTOCOLS
    labels: Sequence[str] = ()  # none: all that there are
    selections: Sequence[Selection] = ("held-out",)
    layers: Sequence[int] = (1, 4)  # last blocks that a linear classifier sees
    recipe: Recipe | None = None  # to train linear classifiers; None: solve if that is quick
    view: View | None = None  # of test images, and of training images unless `views`; see `middle`
    train_view: TrainView | None = None  # for `views`
    views: int = 0  # random views of the training images to train on; recipe.epochs is published
    videos: str | None = None  # for tracking, as `open_videos` reads it; None: no tracking
    few: int | Path = 25  # labelled images per class in the low-shot protocol, or a list of names
    tracking: Tracking = Tracking()  # noqa: RUF009 - frozen
    year: Year | None = None  # of DAVIS; see `open_videos`
    released: bool = False  # low-shot as the released code: statistics of the test set
    seed: int = 0
    device: torch.device | str = "cpu"
    precision: torch.dtype | None = None


class Measured(NamedTuple):
    result: Result
    correct: Tensor | None  # (n,) bool, image by image


def suite(
    encoder: Encoder,
    train: Images,
    test: Images,
    options: Options | None = None,
) -> list[Result]:
    """All results for `encoder`, with the numbers of its untrained twin beside them.

    Args:
        train: labelled images to fit on, test: others to test on.
    """
    options = options or Options()
    if "rankme" in options.protocols and len(test) <= encoder.width:
        say(f"rankme: left out, {len(test)} test images cannot fill {encoder.width} dimensions")

    def ask(some: Encoder) -> list[Measured]:
        seen = measure_videos(some, options) if "tracking" in options.protocols else []
        seen = [m for m in seen if m.result.name in TRACKED]
        return measure(some, train, test, options) + seen

    return beside_untrained(encoder, options.seed, ask)


def beside_untrained(
    encoder: Encoder, seed: int, ask: Callable[[Encoder], list[Measured]]
) -> list[Result]:
    """What `ask` finds for `encoder`, with what it finds for the untrained twin beside it."""
    results = [m.result for m in ask(encoder)]
    if not isinstance(encoder, VisionTransformer):
        return results  # nobody knows how it was before training
    before = {_key(m.result): m.result.value for m in ask(untrained(encoder, seed))}
    return [dataclasses.replace(r, random_init=before.get(_key(r))) for r in results]


def _key(result: Result) -> tuple[str, ...]:
    return result.name, result.protocol, result.label, result.selection


def measure(encoder: Encoder, train: Images, test: Images, options: Options) -> list[Measured]:
    """The protocols of `options` that need images, for each label in turn."""
    names = choose_labels(train, test, options.labels)  # complains before any work
    data = [cache.of_images(images, names) for images in (train, test)]
    few = (
        options.few.read_bytes() if isinstance(options.few, Path) and options.few.is_file() else b""
    )
    asked = (*data, few, options)
    return _kept(encoder, asked, lambda: list(_ask(encoder, train, test, options)))


def measure_videos(
    encoder: Encoder, options: Options, pictures: Path | None = None
) -> list[Measured]:
    """Tracking; nothing without videos. `pictures` is a folder for what was found."""
    if options.videos is None:
        return []
    source, how = options.videos, options.tracking

    def follow() -> list[Measured]:
        if isinstance(encoder, nn.Module):
            encoder.to(options.device)
        videos = open_videos(source, options.year)
        results = track(encoder, videos, how, device=options.device, out=pictures)
        return [Measured(result, None) for result in results]

    # Videos on disk may change behind their name; and a kept answer would draw nothing.
    drawn = source.split(":")[0] == "scenes" and pictures is None
    return _kept(encoder if drawn else None, ("tracking", source, how), follow)


def _kept(
    encoder: Encoder | None, asked: tuple[Any, ...], answer: Callable[[], list[Measured]]
) -> list[Measured]:
    if not isinstance(encoder, nn.Module):
        return answer()
    # Where something is computed changes no more than rounding.
    asked = tuple(dataclasses.replace(a, device="") if isinstance(a, Options) else a for a in asked)
    key = cache.key(cache.of_code("evals", "data"), cache.of_encoder(encoder), *asked)
    if kept := cache.load("answers", key):
        tensors, text = kept
        return [
            Measured(_result(fields), tensors.get(str(i)))
            for i, fields in enumerate(json.loads(text))
        ]
    found = answer()
    text = json.dumps([dataclasses.asdict(m.result) for m in found])
    # Cloned: they are rows of one tensor, which would be stored whole.
    correct = {str(i): m.correct.clone() for i, m in enumerate(found) if m.correct is not None}
    cache.store("answers", key, correct, text)
    return found


def _result(fields: dict[str, Any]) -> Result:
    interval = fields.pop("interval")  # JSON has made a list of it
    return Result(**fields, interval=interval and tuple(interval))


def _ask(encoder: Encoder, train: Images, test: Images, options: Options) -> Iterator[Measured]:
    kit = _Kit(encoder, train, test, options)
    for label in choose_labels(train, test, options.labels):
        for protocol, ask in (("knn", _knn), ("linear", _linear), ("lowshot", _lowshot)):
            if protocol in options.protocols:
                yield from ask(kit, label)
    if "rankme" in options.protocols and len(test) > encoder.width:
        value = rankme(kit.last(kit.test_x))
        rank = Result("rankme", "rankme", "", value, None, len(test), "none", options.seed)
        yield Measured(rank, None)


# ------------------------------------------------------------------------------ one protocol each


class _Kit:
    """Features and labels, computed when they are asked for, once."""

    def __init__(self, encoder: Encoder, train: Images, test: Images, options: Options) -> None:
        self.encoder, self.train, self.test, self.options = encoder, train, test, options
        self.view = options.view or middle(encoder, test)

    def features(self, images: Images, view: View | TrainView, draw: int = 0) -> Tensor:
        options = self.options
        return frozen(
            self.encoder,
            images,
            view,
            draw=(options.seed, draw),
            device=options.device,
            precision=options.precision,
        )

    @cached_property
    def train_x(self) -> Tensor:
        return self.features(self.train, self.view)

    @cached_property
    def test_x(self) -> Tensor:
        return self.features(self.test, self.view)

    @cached_property
    def views(self) -> list[Tensor]:
        """What a linear classifier is trained on, epoch by epoch."""
        random = self.options.train_view or TrainView(self.view.size)
        many = [self.features(self.train, random, i) for i in range(self.options.views)]
        return many or [self.train_x]

    def last(self, x: Tensor) -> Tensor:
        """The last block alone, where it can be computed with."""
        return x[:, -self.encoder.width :].to(self.options.device).float()

    def labels(self, name: str) -> tuple[Tensor, Tensor]:
        return paired_labels(self.train, self.test, name)


def _knn(kit: _Kit, label: str) -> Iterator[Measured]:
    y, test_y = (labels.to(kit.options.device) for labels in kit.labels(label))
    x, seed = kit.last(kit.train_x), kit.options.seed
    ks = [k for k in KS if k < len(x)] or [1]
    right = (knn_predict(x, y, kit.last(kit.test_x), ks) == test_y).cpu()  # (len(ks), n)
    for selection in kit.options.selections:
        if selection == "held-out":
            i = ks.index(choose_k(x, y, seed, ks))
        else:
            i = int(right.sum(dim=1).argmax())
        yield _measured("knn", label, right[i], selection, seed, len(x), f"k {ks[i]}")


def _linear(kit: _Kit, label: str) -> Iterator[Measured]:
    y, test_y = kit.labels(label)
    options = kit.options
    solvable = options.recipe is None and not options.views
    if solvable and kit.train_x.numel() * len(y.unique()) <= QUICK:
        yield from _solved(kit, label)
        return
    found = probes(
        kit.views,
        y,
        kit.test_x,
        test_y,
        width=kit.encoder.width,
        recipe=options.recipe or OWN,
        layers=options.layers,
        selections=options.selections,
        plain=kit.train_x if "held-out" in options.selections else None,
        seed=options.seed,
        device=options.device,
    )
    for probe in found:
        name = _linear_name(probe.head.layers)
        setting = str(probe.head)
        yield _measured(name, label, probe.correct, probe.selection, options.seed, len(y), setting)
        if probe.selection == "paper":
            best = probe.best_epoch
            result = accuracy(
                f"{name} best epoch",
                label,
                int(probe.epochs[best]),
                len(test_y),
                selection="paper",
                seed=options.seed,
                train=len(y),
                setting=f"{setting}, epoch {best + 1}",
            )
            yield Measured(result, None)


def _solved(kit: _Kit, label: str) -> Iterator[Measured]:
    y, test_y = (labels.to(kit.options.device) for labels in kit.labels(label))
    width, seed = kit.encoder.width, kit.options.seed
    for selection in kit.options.selections:
        for layers in dict.fromkeys(
            min(n, kit.test_x.shape[1] // width) for n in kit.options.layers
        ):
            x, test_x = (a[:, -layers * width :].to(y.device) for a in (kit.train_x, kit.test_x))
            right, l2 = solve(x, y, test_x, test_y, selection=selection, seed=seed)
            setting = f"solved, l2 {l2:g}"
            name = _linear_name(layers)
            yield _measured(name, label, right.cpu(), selection, seed, len(y), setting)


def _linear_name(layers: int) -> str:
    return "linear" if layers == 1 else f"linear last{layers}"


def _lowshot(kit: _Kit, label: str) -> Iterator[Measured]:
    y, test_y = kit.labels(label)
    options, few = kit.options, kit.options.few
    index = per_class(y, few, options.seed) if isinstance(few, int) else listed(kit.train, few)
    view = LOWSHOT["released"].at(kit.view.size) if options.released else kit.view
    # If all of train has been asked for, these are among them.
    if "train_x" in vars(kit) and view == kit.view:
        x = kit.train_x[index]
    else:
        x = kit.features(Subset(kit.train, index), view)
    test_x = kit.test_x if view == kit.view else kit.features(kit.test, view)
    if len(y[index].unique()) < 2:
        raise DataError(f"{label}: the {len(index)} chosen images are all of one class")
    found = classify(
        kit.last(x),
        y[index].to(options.device),
        kit.last(test_x),
        statistics="test" if options.released else "train",
    )
    # Of a class that has fewer, all: then these are fewer than were asked for.
    many = f"{int(y[index].bincount().max())}/class" if isinstance(few, int) else few.name
    released = ", released" if options.released else ""
    setting = f"{many}, lambda {LAMBDA}{released}"
    right = found.cpu() == test_y
    yield _measured("lowshot", label, right, "none", options.seed, len(index), setting)


def _measured(
    protocol: str,
    label: str,
    right: Tensor,
    selection: Literal["none", "held-out", "paper"],
    seed: int,
    train: int,
    setting: str,
) -> Measured:
    result = accuracy(
        protocol,
        label,
        int(right.sum()),
        len(right),
        selection=selection,
        seed=seed,
        train=train,
        setting=setting,
    )
    return Measured(result, right)
