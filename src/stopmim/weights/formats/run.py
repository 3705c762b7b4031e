"""Our own run directories and checkpoints; runs/checkpoint.py defines and writes them."""

from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import Any

from stopmim.config.schema import Config
from stopmim.method.encoder import Encoder, ImageEncoder
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint
from stopmim.runs.identity import begun
from stopmim.weights.format import Contents, Format, WeightFile


class OwnRun(Format):
    name = "stopmim run"

    def recognises(self, file: WeightFile) -> bool:
        return isdir(file.path)  # any other folder is refused by `checkpoint.load_model`

    def model(self, file: WeightFile) -> MaskedImageModel:
        return checkpoint.load_model(file.path)

    def seeing(self, file: WeightFile, encoder: Encoder) -> ImageEncoder:
        found: Any = encoder  # `checkpoint.load_model` gave it the transform of its config
        return found

    def contents(self, file: WeightFile) -> Contents:
        path, epoch = file.path, None
        is_run = (path / "run.json").exists()

        def read(newest: Path) -> tuple[Contents, dict[str, Any]]:  # both of the same checkpoint
            return super(OwnRun, self).contents(WeightFile(newest)), checkpoint.state(newest)

        found, state = checkpoint.read_newest(path, read)
        config = Config.model_validate(state["config"], strict=False)
        if is_run:
            per_epoch = begun(path)["data"]["images"] // config.optim.batch_size
            epoch = state["step"] // max(1, per_epoch)
        project = self.name if is_run else "stopmim checkpoint"
        about = {"config": config, "epoch": epoch, "step": state["step"]}
        return replace(found, path=path, project=project, **about)
