"""The lines of metrics.jsonl, shown elsewhere too; metrics.jsonl stays the record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from stopmim.errors import UserError

Kind = Literal["none", "tensorboard"]


class Mirror:
    """Writes to RUN/tensorboard, or to nowhere.

    Args:
        step: where the run goes on: what an earlier start wrote after it is taken back.
    """

    def __init__(self, kind: Kind, path: Path, step: int) -> None:
        self.writer: Any = None
        if kind == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "runtime.mirror: tensorboard is not installed; "
                    'pip install "stopmim[tensorboard]"'
                ) from None
            self.writer = SummaryWriter(str(path / "tensorboard"), purge_step=step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        if self.writer is None:
            return
        for key, value in line.items():
            if isinstance(value, Mapping):  # of the untrained network
                for name, start in value.items():
                    self.writer.add_scalar(name, start, 0)
            elif key != "step":
                self.writer.add_scalar(key, value, line["step"])
        self.writer.flush()
