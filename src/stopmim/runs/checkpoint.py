"""Checkpoints: their files, verified before use, never pickled; saver.py writes them.

``checkpoints/step-XXXXXXXX/`` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and
`manifest.json` (sha256 and size of the others). It is written to a temporary folder, synced and
renamed, so that a kill never leaves half of one. "Latest" is not stored anywhere: it is the newest
step whose checksums verify.
"""

import contextlib
import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar
from uuid import uuid4

import safetensors
import torch
from torch import Tensor, nn

from stopmim._version import __version__
from stopmim.base.errors import CheckpointError
from stopmim.base.faults import faultpoint
from stopmim.base.files import holes, open_to_read, read_regular, remove
from stopmim.base.memory import is_out_of_memory
from stopmim.base.sandbox import BYTES, HOLES, read_tree
from stopmim.config.schema import Config
from stopmim.data.pixels import stats_of
from stopmim.data.transform import seeing
from stopmim.gpu.sharding import like, whole
from stopmim.method.build import build
from stopmim.method.model import MaskedImageModel
from stopmim.runs import shards
from stopmim.runs.identity import about_if_any, foreign

State = dict[str, Tensor]
Found = TypeVar("Found")

FORMAT = 2  # 1 without pieces of other ranks, see shards.py
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that weights may have
TEMPORARY = ".tmp-"  # folders that begin like this are being written or removed


class LaterFormatError(CheckpointError):
    """A checkpoint of a later version, which must not be skipped in favour of an older one."""


def prune(newest: Path, keep: int) -> None:
    """Removes all but the `keep` last checkpoints up to `newest`, which is known to be intact.

    Later ones are damaged, or the run would have resumed from them: they do not count.
    """
    run = newest.parents[1]
    for old in [path for path in steps(run) if path <= newest][:-keep]:
        # A failure to remove (a link, a file open on NFS) does not fail the save. Renamed first, so
        # that a reader finds all of a checkpoint or nothing.
        if not old.is_symlink():
            with contextlib.suppress(OSError):
                old = old.rename(old.with_name(f"{TEMPORARY}{uuid4().hex}"))
            remove(old)
        faultpoint("save.pruned")


def sweep(run: Path) -> None:
    """Removes the leftovers of interrupted saves."""
    for path in (run / "checkpoints").glob(f"{TEMPORARY}*"):
        remove(path)


def latest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and what is wrong with newer ones.

    Raises:
        CheckpointError: it belongs to another run.
    """
    damaged = list[str]()
    passed = set[Path]()
    while left := [path for path in steps(run) if path not in passed]:
        path = left[-1]
        passed.add(path)
        try:
            problem = verify(path) or misnamed(path)
            other = None if problem else foreign(about_if_any(run), state(path))
        except LaterFormatError:
            raise
        except (CheckpointError, FileNotFoundError) as error:
            problem = str(error)
        if problem:
            # A live run may have removed it meanwhile, after saving a newer one.
            damaged += [problem] if path.exists() else []
        elif other:
            raise CheckpointError(
                f"{path}: a checkpoint of another run: {other}; put back the one of this run, "
                f"or move it away with stopmim repair {quote(str(run))}"
            )
        else:
            return path, damaged
    return None, damaged


def newest_intact(run: Path) -> Path:
    """The newest intact checkpoint of a run; raises CheckpointError if there is none."""
    path, damaged = latest(run)
    if path is None:
        raise CheckpointError(damaged[0] if damaged else f"{run}: no checkpoint in it yet")
    return path


def read_newest(path: Path, read: Callable[[Path], Found]) -> Found:
    """`read` of the checkpoint `path`, or of the newest one of the run `path`.

    A run that is training may remove it meanwhile; then there is a newer one to read.
    """
    if not (path / "run.json").exists():
        return read(path)
    while True:
        newest = newest_intact(path)
        try:
            return read(newest)
        except (CheckpointError, OSError):
            if newest.exists():
                raise


def verify(path: Path) -> str | None:
    """Returns what is wrong with the checkpoint at `path`, in one line, or None."""
    try:
        files = json.loads(read_regular(path / "manifest.json"))["files"]
        seen, unwritten = set[tuple[int, int]](), 0
        for name, want in files.items():
            file = path / Path(name).name  # never elsewhere
            found = file.stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe or a device might never end
                return f"{file}: not a regular file"
            if found.st_size != want["bytes"]:
                return f"{file}: {found.st_size} bytes, not {want['bytes']}"
            if (found.st_dev, found.st_ino) in seen:  # hashing it a thousand times would take hours
                return f"{file}: the same file as another one"
            seen.add((found.st_dev, found.st_ino))
            with open_to_read(file, BYTES) as opened:
                unwritten += holes(opened)
            if unwritten > HOLES:  # a small archive can hold terabytes of them
                return f"{file}: a sparse file: {unwritten} bytes are not on the disk"
            if sha256(file) != want["sha256"]:
                return f"{file}: sha256 is not the recorded one"
        if extra := shards.unlisted(path, files):
            return f"{extra}: manifest.json does not list it"
        missing = {"model.safetensors", "optimizer.safetensors", "state.json"} - set(files)
        return f"{path}: manifest.json does not list {min(missing)}" if missing else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{path}: {type(error).__name__}: {error}"


def state(path: Path) -> dict[str, Any]:
    """`state.json` of a verified checkpoint: step, config, loss scaler, identity of its run."""
    try:
        manifest = json.loads(read_regular(path / "manifest.json"))
        if manifest["format"] > FORMAT:
            raise LaterFormatError(
                f"{path}: format {manifest['format']}, made by stopmim {manifest.get('stopmim')}; "
                f"this is {__version__}, which reads formats up to {FORMAT}: upgrade stopmim"
            )
        found: dict[str, Any] = json.loads(read_regular(path / "state.json"))
        step, config = found["step"], found["config"]
        if not isinstance(step, int) or step < 0 or not isinstance(config, dict):
            raise ValueError("no step or no config")
    except FileNotFoundError:  # a live run may have removed it
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path / 'state.json'}: not a run's: {what[:200]}") from None
    return found


def misnamed(path: Path) -> str | None:
    """Problem with the name of a verified checkpoint, or None: names tell which one is newest."""
    step = state(path)["step"]
    return None if path.name == f"step-{step:08d}" else f"{path}: holds step {str(step)[:20]}"


def lines_logged(path: Path) -> int:
    """Number of lines of metrics.jsonl when the checkpoint `path` was saved; 0 if unknown."""
    try:
        found = state(path).get("logged")
    except (CheckpointError, OSError):
        return 0
    return found if isinstance(found, int) else 0


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Loads the checkpoint at `path` into `model` and `optimizer`; every tensor must fit.

    A checkpoint from before the first update leaves `optimizer` without a state.
    """
    try:
        weights = shards.read(path, "model")
        slots = shards.read(path, "optimizer") if optimizer else {}
    except (OSError, safetensors.SafetensorError) as error:
        if is_out_of_memory(error):  # the file itself is intact
            raise
        raise CheckpointError(f"{path}: unreadable: {error}") from None
    want = model.state_dict()
    check_fit(weights, want, str(path))
    own = {}
    for name, x in weights.items():  # a float64 may be too large for float32
        own[name] = like(shards.finite(x.to(want[name].dtype), name, str(path)), want[name])
    model.load_state_dict(own)
    if optimizer is None or not slots:
        return
    used = 0
    for name, parameter in _named(model, optimizer):
        for slot in shards.SLOTS:
            used += 1
            value = shards.slot_of(slots, f"{name}/{slot}", parameter, str(path))
            # Fused AdamW keeps its step counter on the parameter's device, in float32.
            value = value.to(parameter.device)
            optimizer.state[parameter][slot] = like(value, parameter) if value.ndim else value
    if used != len(slots):
        raise CheckpointError(f"{path}: optimizer.safetensors has entries of another model")


def load_model(path: Path) -> MaskedImageModel:
    """Loads the model of a run directory or of one of its checkpoints, in evaluation mode.

    Its encoders take images as the config says they are.
    """
    return read_newest(path, _load_model)


def _load_model(path: Path) -> MaskedImageModel:
    if not (path / "manifest.json").exists():
        raise CheckpointError(
            f"{path}: neither a run, nor one of its checkpoints (no manifest.json), nor a folder "
            f"with weights that stopmim knows; name the file itself"
        )
    elif problem := verify(path):
        raise CheckpointError(f"{problem}; expected a run directory or one of its checkpoints")
    try:
        config = Config.model_validate_json(json.dumps(state(path)["config"]))
        weights = shards.read(path, "model", read_tree)
        if (blocks := config.predictor.depth or 0) > len(weights):  # before they are built
            raise ValueError(f"{blocks} blocks, but only {len(weights)} tensors")
        with torch.device("meta"):
            model = build(config)
        for encoder in (model.encoder, model.branch()):
            seeing(encoder, stats_of(config))
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path / 'state.json'}: not a run's: {what}") from None
    fill(model, weights, str(path))
    return model.eval()


def fill(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Fills a `module` on the meta device with float32 copies of `weights`, all or none."""
    check_fit(weights, module.state_dict(), source)
    own = {key: value.detach().to(torch.float32, copy=True) for key, value in weights.items()}
    if bad := first_not_finite(own):  # a float64 may be too large for float32
        raise CheckpointError(f"{source}: {bad} has values that are not finite")
    module.load_state_dict(own, assign=True)


def first_not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a value that is not finite, or None."""
    return next((key for key, value in weights.items() if not value.isfinite().all()), None)


def check_fit(weights: Mapping[str, Tensor], want: State, source: str) -> None:
    """Raises CheckpointError unless `weights` has the keys and shapes of `want`, as floats."""
    need = {key: tuple(x.shape) for key, x in want.items()}
    have, kinds = dict[str, tuple[int, ...]](), dict[str, torch.dtype]()
    for key, x in weights.items():
        have[key], kinds[key] = tuple(x.shape), x.dtype
    problems = [f"missing {key} {need[key]}" for key in need.keys() - have.keys()]
    problems += [f"unexpected {key[:80]} {have[key]}" for key in have.keys() - need.keys()]
    problems += [
        f"{key} is {have[key]}, the model has {need[key]}"
        for key in need.keys() & have.keys()
        if have[key] != need[key]
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        first = "; ".join(sorted(problems)[:3])
        raise CheckpointError(f"{source}: does not fit this model: {first}{more}")
    for key, kind in kinds.items():
        if kind not in FLOATS:
            raise CheckpointError(f"{source}: {key} is {kind}, not floating point")


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


def steps(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-????????")
    return sorted(path for path in found if re.fullmatch("step-[0-9]{8}", path.name))


def sha256(path: Path) -> str:
    with open_to_read(path, BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
