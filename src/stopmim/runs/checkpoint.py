"""Checkpoints: their files, verified before use, never pickled; saver.py writes them.

``checkpoints/step-XXXXXXXX/`` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and
`manifest.json` (sha256 and size of the others). It is written to a temporary folder, synced and
renamed, so that a kill never leaves half of one. "Latest" is not stored anywhere: it is the newest
step whose checksums verify.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from stopmim._version import __version__
from stopmim.base.errors import CheckpointError
from stopmim.base.faults import faultpoint
from stopmim.base.memory import is_out_of_memory
from stopmim.base.sandbox import read_tree
from stopmim.config.schema import Config
from stopmim.gpu.sharding import like, whole
from stopmim.method.build import build
from stopmim.method.model import MaskedImageModel
from stopmim.runs import shards

State = dict[str, Tensor]

FORMAT = 2  # 1 without pieces of other ranks, see shards.py


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
            if sha256(path / name) != want["sha256"]:
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
        weights = shards.read(path, "model")
        slots = shards.read(path, "optimizer") if optimizer else {}
    except (OSError, safetensors.SafetensorError) as error:
        if is_out_of_memory(error):  # nothing is wrong with the file
            raise
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
    fill(model, shards.read(path, "model", read_tree), str(path))
    return model.eval()


def fill(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Fills a `module` on the meta device with float32 copies of `weights`, all or none."""
    check_fit(weights, module.state_dict(), source)
    for key, value in weights.items():
        if not value.is_floating_point():
            raise CheckpointError(f"{source}: {key} is {value.dtype}, not floating point")
        if not value.isfinite().all():
            raise CheckpointError(f"{source}: {key} has values that are not finite")
    own = {key: value.detach().to(torch.float32, copy=True) for key, value in weights.items()}
    module.load_state_dict(own, assign=True)


def check_fit(weights: Mapping[str, Tensor], want: State, source: str) -> None:
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


def live(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """Weights and optimizer state by name: the tensors themselves, which an update changes."""
    slots = {
        f"{name}/{slot}": value.detach()
        for name, parameter in _named(model, optimizer)
        for slot, value in optimizer.state[parameter].items()
    }
    return {name: x.detach() for name, x in model.state_dict().items()}, slots


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True
) -> tuple[State, State]:
    """Unsharded weights and optimizer state on the CPU; empty without `keep`.

    Every rank of a sharded model must call it; only the one that writes needs the result.
    """
    found: tuple[State, State] = {}, {}
    for pieces, wholes in zip(live(model, optimizer), found, strict=True):
        for name, piece in pieces.items():
            x = whole(piece)
            if keep:
                wholes[name] = x.cpu()
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


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
