"""``stopmim inspect``, ``export`` and ``features``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from stopmim.cli.options import Branch, DataSource, Device, Heads, Skip, choices, option


@dataclass(frozen=True)
class Inspect:
    """Identify a file: format, network, training progress, and what can be loaded."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """a run, a checkpoint, a Hugging Face folder, or a file of weights"""
    heads: Heads = None

    def __call__(self) -> None:
        from stopmim.weights.inspect import identify

        print(identify(self.file, self.heads))


@dataclass(frozen=True)
class Export:
    """Write an encoder for another library, with a README.md on how to load it."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """anything that `stopmim inspect` recognises"""
    to: Annotated[
        str,
        choices(
            "FORMAT",
            timm="for timm",
            hf="for Hugging Face transformers",
            onnx="for ONNX runtimes",
            safetensors="plain weights",
            ijepa="encoder, target encoder and predictor as I-JEPA's code saves them",
            mae="encoder and decoder under the names of MAE's code",
        ),
    ]
    out: Annotated[Path, arg(metavar="FOLDER")]
    """a new folder"""
    branch: Branch = "target"
    heads: Heads = None
    push: Annotated[str | None, option("USER/NAME")] = None
    """also upload it to this repository on the Hugging Face hub; a new one is private"""

    def __call__(self) -> None:
        from stopmim.weights.export import export

        wanted = self.file, self.to, self.out
        print(export(*wanted, branch=self.branch, heads=self.heads, repo=self.push))


@dataclass(frozen=True)
class Features:
    """Write image features to a table: names, features, and labels if there are any."""

    data: DataSource
    encoder: Annotated[str, arg(metavar="FILE")]
    """anything that `stopmim inspect` recognises, or timm:NAME"""
    out: Annotated[Path, arg(metavar="FILE")]
    """.npz, .csv or .parquet"""
    layers: int = 1
    """number of last blocks to concatenate"""
    pool: Literal["auto", "mean", "cls"] = "auto"
    """mean over patches, or the class token; auto: the class token if there is one"""
    size: Annotated[int | None, option("INT")] = None
    """edge of the view, the same as in evaluations; default: the encoder's own size"""
    skip: Skip = None
    branch: Branch = "target"
    heads: Heads = None
    device: Device = "auto"

    def __call__(self) -> None:
        from stopmim.evals.feature_files import write_features
        from stopmim.weights.load import load_encoder

        options = {field.name: getattr(self, field.name) for field in fields(self)}
        loading = options.pop("encoder"), options.pop("branch"), options.pop("heads")
        print(write_features(encoder=load_encoder(*loading), **options))
