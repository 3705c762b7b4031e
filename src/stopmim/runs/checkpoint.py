"""Checkpoints: written atomically, verified before use, never pickled.

``checkpoints/step-XXXXXXXX/`` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and
`manifest.json` (sha256 and size of the others). It is written to a temporary folder, synced and
renamed, so that a kill never leaves half of one. "Latest" is not stored anywhere: it is the newest
step whose checksums verify.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stopmim._version import __version__
from stopmim.base.console import warn
from stopmim.base.errors import CheckpointError, StorageError
from stopmim.base.faults import faultpoint
from stopmim.base.sandbox import read_tree
from stopmim.config.schema import Config
from stopmim.gpu.sharding import like, whole
from stopmim.method.build import build
from stopmim.method.model import MaskedImageModel

State = dict[str, Tensor]

FORMAT = 1
SAVES_TO_FAIL = 3  # failed saves in a row, for example on a full disk, that end a run


@dataclass
class Saver:
    """Saves the checkpoints of a run; survives a disk that is full for a while."""

    run: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    config: Config
    writes: bool = True  # one rank writes; the others take part in gathering sharded tensors
    failed: int = 0

    def save(self, step: int, *, final: bool) -> None:
        weights, slots = gathered(self.model, self.optimizer, keep=self.writes)
        if not self.writes:
            return
        try:
            self._write(step, weights, slots)
            self.failed = 0
        except (OSError, safetensors.SafetensorError) as error:
            self.failed += 1
            what = f"{self.run}: the checkpoint of step {step} could not be written: {error}"
            if final or self.failed == SAVES_TO_FAIL:
                raise StorageError(f"{what}; make room and run the same command again") from None
            warn(f"{what}; training continues")

    def _write(self, step: int, weights: State, slots: State) -> None:
        """Writes the checkpoint of `step`, then removes all but the newest `runtime.keep`."""
        folder = self.run / "checkpoints"
        final = folder / f"step-{step:08d}"
        temporary = folder / f".tmp-{step:08d}-{uuid4().hex}"
        scaler = self.scaler.state_dict() if self.scaler else None
        about = {"step": step, "config": self.config.model_dump(mode="json"), "scaler": scaler}
        sweep(self.run)
        temporary.mkdir(parents=True)
        try:
            faultpoint("save.begin")
            save_file(weights, temporary / "model.safetensors")
            faultpoint("save.model")
            save_file(slots, temporary / "optimizer.safetensors")
            (temporary / "state.json").write_text(json.dumps(about, indent=1))
            sums = {
                path.name: {"sha256": _sha256(path), "bytes": path.stat().st_size}
                for path in sorted(temporary.iterdir())
            }
            manifest = {"format": FORMAT, "stopmim": __version__, "step": step, "files": sums}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            os.umask(mask := os.umask(0))
            for path in temporary.iterdir():
                path.chmod(0o666 & ~mask)  # safetensors creates files with mode 0600
                _sync(path)
            _sync(temporary)
            faultpoint("save.synced")
            if final.exists():  # damaged, or the run would have resumed from it
                shutil.rmtree(final)
            os.rename(temporary, final)
            _sync(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        faultpoint("save.renamed")
        prune(final, self.config.runtime.keep)


def prune(newest: Path, keep: int) -> None:
    """Removes all but the `keep` last checkpoints up to `newest`, which is known to be intact.

    Later ones are damaged, or the run would have resumed from them: they do not count.
    """
    run = newest.parents[1]
    for old in [path for path in _steps(run) if path <= newest][:-keep]:
        # A folder that cannot be removed (a link, a file open on NFS) does not fail the save.
        shutil.rmtree(old, ignore_errors=True)
        faultpoint("save.pruned")


def sweep(run: Path) -> None:
    """Removes the leftovers of interrupted saves."""
    for path in (run / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def latest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and what is wrong with newer ones."""
    damaged = []
    for path in reversed(_steps(run)):
        if problem := verify(path):
            damaged.append(problem)
        else:
            return path, damaged
    return None, damaged


def newest_intact(run: Path) -> Path:
    """The newest intact checkpoint of a run; raises CheckpointError if there is none."""
    path, damaged = latest(run)
    if path is None:
        raise CheckpointError(damaged[0] if damaged else f"{run}: no checkpoint in it yet")
    return path


def verify(path: Path) -> str | None:
    """Returns what is wrong with the checkpoint at `path`, in one line, or None."""
    try:
        files = json.loads((path / "manifest.json").read_bytes())["files"]
        for name, want in files.items():
            if (path / name).stat().st_size != want["bytes"]:
                return f"{path / name}: {(path / name).stat().st_size} bytes, not {want['bytes']}"
            if _sha256(path / name) != want["sha256"]:
                return f"{path / name}: sha256 is not the recorded one"
        missing = {"model.safetensors", "optimizer.safetensors", "state.json"} - set(files)
        return f"{path}: manifest.json does not list {min(missing)}" if missing else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{path}: {type(error).__name__}: {error}"


def state(path: Path) -> dict[str, Any]:
    """`state.json` of a verified checkpoint: step, config, loss scaler."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest['format']}, made by stopmim {manifest['stopmim']}; "
            f"this is {__version__}, which reads formats up to {FORMAT}: upgrade stopmim"
        )
    return json.loads((path / "state.json").read_bytes())


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Loads the checkpoint at `path` into `model` and `optimizer`; every key must match."""
    try:
        weights = load_file(path / "model.safetensors")
        slots = load_file(path / "optimizer.safetensors") if optimizer else {}
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: unreadable: {error}") from None
    want = model.state_dict()
    check_fit(weights, want, str(path))
    model.load_state_dict({name: like(x, want[name]) for name, x in weights.items()})
    if optimizer is None:
        return
    used = 0
    for name, parameter in _named(model, optimizer):
        for slot in ("step", "exp_avg", "exp_avg_sq"):
            if (value := slots.get(f"{name}/{slot}")) is not None:
                used += 1
                # Fused AdamW keeps its step counter on the parameter's device, in float32.
                value = value.to(parameter.device)
                optimizer.state[parameter][slot] = like(value, parameter) if value.ndim else value
    if used != len(slots):
        raise CheckpointError(f"{path}: optimizer.safetensors has entries of another model")


def load_model(path: Path) -> MaskedImageModel:
    """Loads the model of a run directory or of one of its checkpoints, in evaluation mode."""
    if (path / "run.json").exists():
        path = newest_intact(path)
    elif not (path / "manifest.json").exists():
        raise CheckpointError(
            f"{path}: neither a run, nor one of its checkpoints (no manifest.json), nor a folder "
            f"with weights that stopmim knows; name the file itself"
        )
    elif problem := verify(path):
        raise CheckpointError(f"{problem}; expected a run directory or one of its checkpoints")
    try:
        config = Config.model_validate_json(json.dumps(state(path)["config"]))
        with torch.device("meta"):
            model = build(config)
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path / 'state.json'}: not a run's: {what}") from None
    fill(model, read_tree(path / "model.safetensors"), str(path))
    return model.eval()


def fill(module: nn.Module, weights: State, source: str) -> None:
    """Fills a `module` on the meta device with float32 copies of `weights`, all or none."""
    check_fit(weights, module.state_dict(), source)
    for key, value in weights.items():
        if not value.is_floating_point():
            raise CheckpointError(f"{source}: {key} is {value.dtype}, not floating point")
        if not value.isfinite().all():
            raise CheckpointError(f"{source}: {key} has values that are not finite")
    own = {key: value.detach().to(torch.float32, copy=True) for key, value in weights.items()}
    module.load_state_dict(own, assign=True)


def check_fit(weights: State, want: State, source: str) -> None:
    """Raises CheckpointError unless `weights` has exactly the keys and shapes of `want`."""
    have, need = ({key: tuple(x.shape) for key, x in some.items()} for some in (weights, want))
    problems = [f"missing {key} {need[key]}" for key in need.keys() - have.keys()]
    problems += [f"unexpected {key[:80]} {have[key]}" for key in have.keys() - need.keys()]
    problems += [
        f"{key} is {have[key]}, the model has {need[key]}"
        for key in need.keys() & have.keys()
        if have[key] != need[key]
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        said = "; ".join(sorted(problems)[:3])
        raise CheckpointError(f"{source}: does not fit this model: {said}{more}")


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True
) -> tuple[State, State]:
    """Unsharded weights and optimizer state on the CPU; empty without `keep`.

    Every rank of a sharded model must call it; only the one that writes needs the result.
    """
    slots = {
        f"{name}/{slot}": value
        for name, parameter in _named(model, optimizer)
        for slot, value in optimizer.state[parameter].items()
    }
    found: tuple[State, State] = {}, {}
    for pieces, wholes in zip((model.state_dict(), slots), found, strict=True):
        for name, piece in pieces.items():
            x = whole(piece.detach())
            if keep:
                wholes[name] = x.cpu().contiguous()
    return found


def _named(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the optimizer's parameters by name: an index would depend on the order of groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def _steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-????????"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
