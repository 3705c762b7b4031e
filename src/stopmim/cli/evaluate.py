"""``stopmim eval``: the options of every protocol. As cli.py: parse, call one function, print."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro import MISSING
from tyro.conf import Positional, arg, subcommand

RecipeName = Literal[
    "auto", "own", "imagenet", "imagenet_lars", "imagenet_mae", "cifar100", "places205", "inat18",
    "clevr_count", "clevr_dist",
]  # fmt: skip


def option(metavar: str) -> Any:
    """Of an option that may be left out: what its value is called in the help.

    Its text says what happens without it, and "(default: None)" would say it once more and worse.
    """
    return arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Asked:
    """What all evaluations of a frozen encoder on images have in common."""

    data: Annotated[str | None, option("DATA")] = None
    """images with labels, in a train and a test part: a folder that has both, or scenes:N:SIZE:SEED
    (tested on SEED + 1); default: scenes:4096 of the encoder's size"""
    train: Annotated[str | None, option("DATA")] = None
    """labelled images to fit on, if the parts lie in different places; with --test"""
    test: Annotated[str | None, option("DATA")] = None
    """labelled images to test on"""
    hold_out: Annotated[float | None, option("SHARE")] = None
    """for --data in one part: test on this share of each class, as 0.2, and fit on the rest"""
    skip: Annotated[Path | None, option("FILE.jsonl")] = None
    """leave out the images that it lists, of both parts: see `stopmim check --fix-list`"""
    label: Annotated[tuple[str, ...], option("NAME ...")] = ()
    """which labels, as count distance; default: all"""
    branch: Literal["target", "context"] = "target"
    """which encoder of a run: the EMA, which the papers evaluate, or the trained one"""
    size: Annotated[int | None, option("INT")] = None
    """edge of the images shown; default: what the encoder was made for"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """of the encoder; auto: bf16 on a GPU, fp32 on a CPU"""
    seed: int = 0
    """of every split and draw"""
    out: Annotated[Path | None, option("FILE|RUN")] = None
    """where a line per number goes; default: results.jsonl of the run, if ENCODER is one"""

    def request(self, **more: Any) -> Any:
        from stopmim.evals.command import Request

        mine = {f.name: getattr(self, f.name) for f in fields(self) if f.name in _REQUEST}
        return Request(**mine | more)


Encoder = Annotated[Positional[str], arg(metavar="ENCODER")]
Selections = Literal["held-out", "paper", "both"]
_REQUEST = {
    *(
        "data",
        "train",
        "test",
        "hold_out",
        "skip",
        "label",
        "branch",
        "size",
        "device",
        "precision",
        "seed",
        "out",
    ),
    *("selection", "layers", "recipe", "views", "per_class", "list", "released", "videos"),
    *("video_size",),
}


@dataclass(frozen=True)
class Knn(Asked):
    """Labels by the vote of the most similar training images."""

    encoder: Encoder = MISSING
    """run, checkpoint, released file, timm:NAME, or random:ARCH@SIZE"""
    selection: Selections = "held-out"
    """where k is chosen: on train, or, as papers do, on test"""

    def __call__(self) -> None:
        from stopmim.evals.command import evaluate

        print(evaluate(self.encoder, self.request(), ("knn",)))


@dataclass(frozen=True)
class Linear(Asked):
    """Linear classifiers on the last block and on the last four."""

    encoder: Encoder = MISSING
    """run, checkpoint, released file, timm:NAME, or random:ARCH@SIZE"""
    selection: Selections = "held-out"
    """where settings are chosen: on a fifth of train, or, as papers do, on test"""
    layers: Literal["last", "last4", "both"] = "both"
    recipe: RecipeName = "auto"
    """a published recipe, or own: a grid of rates; auto: solved to the optimum if that is quick"""
    views: int = 0
    """random views of the training images to train on in turn; published: one per epoch"""

    def __call__(self) -> None:
        from stopmim.evals.command import evaluate

        print(evaluate(self.encoder, self.request(), ("linear",)))


@dataclass(frozen=True)
class Lowshot(Asked):
    """Logistic regression on few labels: the 1 % protocol."""

    encoder: Encoder = MISSING
    """run, checkpoint, released file, timm:NAME, or random:ARCH@SIZE"""
    per_class: int = 25
    """labelled images of each class, drawn by the seed"""
    list: Annotated[Path | None, option("FILE")] = None
    """file names of the labelled images instead, as 1percent.txt"""
    released: bool = False
    """as the released code: test features standardised among themselves, images resized to SIZE"""

    def __call__(self) -> None:
        from stopmim.evals.command import evaluate

        print(evaluate(self.encoder, self.request(), ("lowshot",)))


@dataclass(frozen=True)
class Finetune(Asked):
    """Train the whole encoder with few labels."""

    encoder: Encoder = MISSING
    """run, checkpoint, released file, or random:ARCH@SIZE"""
    recipe: Literal["one-percent", "one-percent-huge", "mae-base", "mae-large", "mae-huge"] = (
        "one-percent"
    )
    selection: Selections = "held-out"
    """the last epoch, or, as papers may do, the best one on test"""
    per_class: int = 25
    """labelled images of each class, drawn by the seed; 0: all"""
    list: Annotated[Path | None, option("FILE")] = None
    """file names of the labelled images instead, as 1percent.txt"""
    epochs: Annotated[int | None, option("INT")] = None
    """default: as in the recipe"""
    batch_size: Annotated[int | None, option("INT")] = None
    """default: as in the recipe"""
    lr: Annotated[float | None, option("FLOAT")] = None
    """default: as in the recipe"""
    weight_decay: Annotated[float | None, option("FLOAT")] = None
    """default: as in the recipe"""
    random_init: bool = False
    """fine-tune from random weights as well, to have that number beside; takes twice as long"""

    def __call__(self) -> None:
        from stopmim.evals.command import tune

        names = ("epochs", "batch_size", "lr", "weight_decay")
        changes = {name: getattr(self, name) for name in names}
        request = self.request(recipe="auto")
        print(tune(self.encoder, request, self.recipe, changes, beside=self.random_init))


@dataclass(frozen=True)
class Tracking:
    """Carry the masks of objects through videos: DAVIS, or drawn ones."""

    encoder: Encoder
    """run, checkpoint, released file, timm:NAME, or random:ARCH@SIZE"""
    videos: Annotated[str, arg(metavar="VIDEOS")] = "scenes"
    """a folder of DAVIS, or scenes[:count[:size[:seed]]]"""
    video_size: Annotated[int | None, option("INT")] = None
    """edge of the shorter side of a frame; default: 480, and twice the encoder's for scenes"""
    year: Annotated[Literal["2016", "2017"] | None, option("2016|2017")] = None
    """of DAVIS: one object a video, or several; default: what the folder has a list of"""
    n_last_frames: int = 7
    """that labels are taken from, besides the first one"""
    neighbourhood: int = 12
    """patches in each direction that labels may come from; 0: any"""
    topk: int = 5
    """patches that a patch takes its labels from"""
    temperature: float = 0.1
    compat: Annotated[Literal["released"] | None, option("released")] = None
    """as DINO's code: frames are not resized to whole patches, red is divided by 0.228"""
    pictures: Annotated[Path | None, option("FOLDER")] = None
    """write what was found: PNGs as the DAVIS evaluation reads them, and a sheet per video"""
    branch: Literal["target", "context"] = "target"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    out: Annotated[Path | None, option("FILE|RUN")] = None
    """where a line per number goes; default: results.jsonl of the run, if ENCODER is one"""

    def __call__(self) -> None:
        from stopmim.evals.command import Request, track

        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "encoder"}
        names = ("n_last_frames", "neighbourhood", "topk", "temperature", "compat")
        how = {name: given.pop(name) for name in names}
        print(track(self.encoder, Request(**given, tracking=how)))


@dataclass(frozen=True)
class Suite(Asked):
    """Everything the data allow, in one table: text, Markdown, HTML and JSON."""

    encoder: Encoder = MISSING
    """run, checkpoint, released file, timm:NAME, or random:ARCH@SIZE"""
    selection: Selections = "held-out"
    """where settings are chosen: on train, or, as papers do, on test"""
    layers: Literal["last", "last4", "both"] = "both"
    recipe: RecipeName = "auto"
    """of linear classifiers: see stopmim eval linear"""
    views: int = 0
    """see stopmim eval linear"""
    per_class: int = 25
    """labelled images of each class in the low-shot protocol"""
    list: Annotated[Path | None, option("FILE")] = None
    """file names of the labelled images instead, as 1percent.txt"""
    videos: Annotated[str | None, option("VIDEOS")] = None
    """for tracking: a folder of DAVIS, or scenes[:count[:size[:seed]]]; default: scenes, if the
    images are"""

    def __call__(self) -> None:
        from stopmim.evals.command import evaluate

        print(evaluate(self.encoder, self.request()))


@dataclass(frozen=True)
class Compare(Asked):
    """Two encoders on the same test images, with a paired test."""

    a: Annotated[Positional[str], arg(metavar="A")] = MISSING
    """run, checkpoint, released file, timm:NAME, or random:ARCH@SIZE"""
    b: Annotated[Positional[str], arg(metavar="B")] = MISSING
    """another one, to be compared with A"""
    selection: Selections = "held-out"
    """where settings are chosen: on train, or, as papers do, on test"""
    layers: Literal["last", "last4", "both"] = "both"
    per_class: int = 25
    """labelled images of each class in the low-shot protocol"""

    def __call__(self) -> None:
        from stopmim.evals.command import contrast

        print(contrast(self.a, self.b, self.request()))


@dataclass(frozen=True)
class Eval:
    """Measure what a frozen encoder knows."""

    protocol: (
        Annotated[Knn, subcommand("knn")]
        | Annotated[Linear, subcommand("linear")]
        | Annotated[Lowshot, subcommand("lowshot")]
        | Annotated[Finetune, subcommand("finetune")]
        | Annotated[Tracking, subcommand("tracking")]
        | Annotated[Suite, subcommand("suite")]
        | Annotated[Compare, subcommand("compare")]
    )

    def __call__(self) -> None:
        self.protocol()
