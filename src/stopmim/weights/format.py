"""The interface of a weight format: how a file is recognised, read, written and described.

A new format is one file in `formats/` with a subclass of `Format`, and one line in `load.FORMATS`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import exists, isfile  # False for names that no file can have
from pathlib import Path
from typing import Any, ClassVar

from stopmim.base.console import as_line
from stopmim.base.errors import CheckpointError
from stopmim.base.sandbox import metadata, read_json, read_tree
from stopmim.config.schema import Config
from stopmim.data.pixels import RGB, PixelStats, from_tag
from stopmim.data.transform import seeing
from stopmim.method.encoder import EPS, Encoder, ImageEncoder, VisionTransformer
from stopmim.method.model import MaskedImageModel
from stopmim.weights import vit


@dataclass
class WeightFile:
    """A path to weights, read when a format first asks for its content."""

    path: Path
    heads: int | None = None  # given by the user: most files do not state them
    decoder_heads: int | None = None
    content: Any = None  # after the first read

    @classmethod
    def at(cls, path: str | Path, *heads: int | None) -> "WeightFile":
        """The file at `path`, or the one in it if `path` is a folder that `export` wrote."""
        path = Path(path)
        known = any(exists(path / f"{name}.json") for name in ("config", "run", "manifest"))
        if path.suffix == ".onnx" or (isfile(path / "model.onnx") and not known):
            what = "ONNX is written and not read by stopmim; give what it was exported from"
            raise CheckpointError(f"{path}: {what}")
        file, others = path / "model.safetensors", ("run", "manifest", "state")
        is_export = isfile(file) and not any(exists(path / f"{name}.json") for name in others)
        if is_export and isfile(config := path / "config.json"):
            about = read_json(config)  # timm's, or else Hugging Face's
            is_export = isinstance(about, dict) and "pretrained_cfg" in about
        return cls(file if is_export else path, *heads)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def tree(self) -> Any:
        """Nested containers with tensors, read without executing anything."""
        if self.content is None:
            if not exists(self.path):
                what = "no such file or folder; give a run or a file of weights"
                raise CheckpointError(f"{self}: {what}")
            self.content = read_tree(self.path)
        return self.content

    @property
    def epoch(self) -> int | None:
        """The epoch saved beside the weights, if a format has read the tree."""
        epoch = self.content.get("epoch") if isinstance(self.content, Mapping) else None
        # `export` writes 0 if it is unknown; a pickle can hold any number.
        return epoch if isinstance(epoch, int) and 0 < epoch < 10**9 else None

    def tag(self, name: str) -> Any:
        """The tag `name` that `export` wrote to the header or beside the weights, or None."""
        tree = self.tree  # reading it has checked the header
        with vit.refusing(f"{self}: {name} is not ours"):
            if self.path.suffix != ".safetensors":
                tag = tree.get(name) if isinstance(tree, Mapping) else None
            else:
                tag = json.loads(metadata(self.path).get(name, "null"))
            if not isinstance(tag, Mapping | None):
                raise TypeError(f"a {type(tag).__name__}")
        return tag

    def heads_and_eps(self) -> tuple[int | None, float]:
        """Attention heads, as given or else as in the tag of `export`, and the norm epsilon."""
        tag = self.tag(vit.ENCODER_TAG)
        if tag is None:
            return self.heads, EPS
        with vit.refusing(f"{self}: {vit.ENCODER_TAG} is not ours"):
            heads, eps = vit.heads_and_eps(tag["heads"], tag["eps"])
        return self.heads or heads, eps


@dataclass(frozen=True)
class Contents:
    """Everything known about a file; `str` is what ``stopmim inspect`` prints."""

    path: Path
    project: str  # that wrote the file, as far as its keys tell
    encoder: ImageEncoder
    network: str  # what the encoder is, in words
    model: MaskedImageModel | None = None  # with the predictor, if there is one
    no_model: str = ""  # the reason, if `model` is None
    branches: tuple[str, ...] = ()  # the two encoders, if there are two
    epoch: int | None = None
    config: Config | None = None  # of our own runs
    step: int | None = None

    @property
    def stats(self) -> PixelStats | None:
        """Statistics of its images; None: the file does not say how they are normalised."""
        return getattr(self.encoder.transform, "stats", None)

    def facts(self) -> dict[str, str]:
        """Label and value of each fact, in the order in which they are printed."""
        encoder: Any = self.encoder
        side, patch = encoder.side, encoder.patch
        facts = {"file": str(self.path), "project": self.project, "encoder": self.network}
        facts["images"] = f"{side * patch}x{side * patch} pixels, a grid of {side}x{side}"
        if self.stats is None:
            facts["channels"] = f"{encoder.channels}; it is unknown how they are normalised"
        elif self.stats != RGB:
            facts |= self.stats.facts()
        parts = {"encoder": encoder} | ({"predictor": self.model.predictor} if self.model else {})
        millions = {k: sum(p.numel() for p in part.parameters()) / 1e6 for k, part in parts.items()}
        facts["parameters"] = ", ".join(f"{n:.2f} M of the {k}" for k, n in millions.items())
        if self.model:
            facts["predictor"] = self.model.describe()
        counts = {"epoch": self.epoch, "step": self.step}
        facts |= {name: str(value) for name, value in counts.items() if value is not None}
        if c := self.config:
            plan = f"{c.optim.epochs} epochs planned, batch {c.optim.batch_size}, lr {c.optim.lr:g}"
            start = f", initialised from {c.init}" if c.init else ""
            facts["trained"] = f"{plan}, seed {c.seed}{start}"
        facts["load_encoder"] = " or ".join(self.branches) or "its one encoder"
        facts["load_model"] = "yes" if self.model else f"no: {self.no_model}"
        return facts

    def __str__(self) -> str:
        return "\n".join(f"{label:13} {as_line(value)}" for label, value in self.facts().items())


class Format:
    """A weight format: `recognises` and `encoder` read it; `word`, `write` and `card` write it.

    Whatever cannot be read or written in full is refused with a CheckpointError of one line.
    """

    name: ClassVar[str]  # as ``stopmim inspect`` prints it
    word: ClassVar[str] = ""  # for ``export --to``; "" if it is only read
    used_by: ClassVar[str] = ""  # completes "exported for" in the README.md of an export
    library: ClassVar[str] = "stopmim"  # that loads an export, as the hub calls it
    whole_model: ClassVar[bool] = False  # an export has all encoders and the predictor
    card: ClassVar[str] = ""  # how to load an export, for its README.md; by default formats/WORD.md

    def recognises(self, file: WeightFile) -> bool:
        """Whether `file` has this format. The first of `load.FORMATS` that says so reads it."""
        return False

    def encoder(self, file: WeightFile, branch: vit.Branch) -> Encoder:
        """The encoder in evaluation mode: every key used, every parameter filled."""
        return self.model(file).branch(branch)

    def model(self, file: WeightFile) -> MaskedImageModel:
        """Encoders and predictor in evaluation mode, under the same conditions."""
        raise CheckpointError(f"{file}: there is no predictor in it")

    def stats(self, file: WeightFile) -> PixelStats | None:
        """Statistics of the images, from the tag of an export; None: the file does not say.

        A format that reads files by itself, and not by `file.tree`, has no tags.
        """
        tag = None if file.content is None else file.tag(vit.PIXELS_TAG)
        return None if tag is None else from_tag(tag)

    def seeing(self, file: WeightFile, encoder: Encoder) -> ImageEncoder:
        """`encoder`, read from `file`, with the transform for its images."""
        with vit.refusing(f"{file}: {vit.PIXELS_TAG} is not ours"):
            return seeing(encoder, self.stats(file))

    def contents(self, file: WeightFile) -> Contents:
        """Everything known about `file`; an encoder without a usable predictor is enough."""
        try:
            model, no_model = self.model(file), ""
            encoder: Encoder = model.branch()
        except CheckpointError as error:
            encoder, model = self.encoder(file, "target"), None
            no_model = str(error).removeprefix(f"{file}: ")
        both = ("target (EMA, the default)", "context")
        branches = both if model and model.target_encoder else self.branches(file)
        project, network, epoch = self.project(file, encoder), self.network(encoder), file.epoch
        shown = self.seeing(file, encoder)
        return Contents(file.path, project, shown, network, model, no_model, branches, epoch)

    def project(self, file: WeightFile, encoder: Encoder) -> str:
        """The project that wrote the file; `name` unless more is known."""
        return self.name

    def network(self, encoder: Encoder) -> str:
        """The architecture in words."""
        return vit.describe(encoder) if isinstance(encoder, VisionTransformer) else "not a ViT"

    def branches(self, file: WeightFile) -> tuple[str, ...]:
        """Names of the encoders in a file that has two, but no predictor."""
        return ()

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        """Writes `encoder` to `folder`, or all of `contents` if `whole_model`."""
        raise NotImplementedError
