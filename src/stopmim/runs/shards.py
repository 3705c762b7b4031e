"""Checkpoints in pieces: every rank writes what it holds, and any number of ranks can read it.

`model.safetensors` and `optimizer.safetensors` hold the pieces of rank 0, `model.1.safetensors` and
`optimizer.1.safetensors` those of rank 1, and so on. A tensor is the concatenation of its pieces
along the first dimension, as FSDP2 cuts it. Ranks other than 0 write to a folder of their own, from
which rank 0 moves the files into the checkpoint before that is sealed: after a kill in between, the
previous checkpoint is the newest.

A checkpoint may come from elsewhere, with a manifest that confirms anything: only files that it
lists are read, and whatever the optimizer's kernels assume about a tensor is checked here.
"""

import contextlib
import json
import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from stopmim.base.errors import CheckpointError
from stopmim.base.faults import faultpoint
from stopmim.base.files import read_regular, remove
from stopmim.gpu.sharding import is_sharded

State = dict[str, Tensor]
NAMES = ("model", "optimizer")
SLOTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for every parameter
STAGING = ".shards"  # the folder of the ranks other than 0
ADVICE = "remove this checkpoint to resume from the one before"


@dataclass(frozen=True)
class Staged:
    """Pieces of the other ranks, on disk."""

    folder: Path
    problem: str | None  # why a rank could not write its own
    bad: str | None  # a tensor with values that are not finite

    def move_to(self, checkpoint: Path) -> None:
        """Moves them into a checkpoint; raises OSError if a rank could not write its own."""
        if self.problem:
            raise OSError(self.problem)
        for file in sorted(self.folder.iterdir()):
            os.rename(file, checkpoint / file.name)
        self.folder.rmdir()


def local(states: tuple[State, State]) -> tuple[State, State]:
    """The pieces of this rank; tensors that are not sharded belong to rank 0."""
    first = dist.get_rank() == 0
    found: tuple[State, State] = {}, {}
    for state, own in zip(states, found, strict=True):
        for name, x in state.items():
            piece = cast(Any, x).to_local() if is_sharded(x) else x
            if first or (is_sharded(x) and piece.numel()):
                own[name] = piece.detach().cpu().contiguous()
    return found


def stage(run: Path, states: tuple[State, State], bad: str | None) -> Staged:
    """Writes the pieces of all ranks but the first into the `run` that rank 0 names.

    Every rank must call it. `bad` names a tensor of this rank that is not finite; the result has
    one of any rank.
    """
    folder, rank = run / "checkpoints" / STAGING, dist.get_rank()
    if rank == 0:
        sweep(run)
        with contextlib.suppress(OSError):  # the run itself is gone: rank 0 notices when it saves
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
    named = [folder]
    dist.broadcast_object_list(named)  # the run may have been moved, which only rank 0 knows
    folder = named[0]
    problem = None
    if rank:
        try:
            for name, state in zip(NAMES, states, strict=True):
                file = folder / f"{name}.{rank}.safetensors"
                save_file(state, file)
                faultpoint("save.shard")
        except (OSError, safetensors.SafetensorError) as error:
            problem = f"rank {rank}: {error}"
    reports: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(reports, (problem, bad))
    problems, bads = zip(*reports, strict=True)
    return Staged(folder, next(filter(None, problems), None), next(filter(None, bads), None))


def sweep(run: Path) -> None:
    """Removes the leftovers of an interrupted save."""
    remove(run / "checkpoints" / STAGING)


def read(
    checkpoint: Path, name: str, reader: Callable[[Path], State] = load_file
) -> Mapping[str, Tensor]:
    """The whole tensors of the model or the optimizer, each assembled on access."""
    try:
        listed = json.loads(read_regular(checkpoint / "manifest.json"))["files"].keys()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{checkpoint / 'manifest.json'}: lists no files") from None
    files = [f"{name}.safetensors"]
    while (file := f"{name}.{len(files)}.safetensors") in listed:
        files.append(file)
    return Whole([reader(checkpoint / file) for file in files], str(checkpoint))


def unlisted(checkpoint: Path, listed: Container[str]) -> Path | None:
    """A file named like a piece of `checkpoint` that is not `listed`, if there is one."""
    found = (file for name in NAMES for file in checkpoint.glob(f"{name}.*safetensors"))
    return next((file for file in sorted(found) if file.name not in listed), None)


def finite(x: Tensor, name: str, source: str) -> Tensor:
    """`x`; raises CheckpointError if it has values that are not finite."""
    if not x.isfinite().all():
        raise CheckpointError(f"{source}: {name} has values that are not finite; {ADVICE}")
    return x


def slot_of(slots: Mapping[str, Tensor], name: str, parameter: Tensor, source: str) -> Tensor:
    """The slot `name`; raises CheckpointError unless it is one that AdamW has for `parameter`.

    AdamW itself does not check: with a slot that is too small, its kernel writes past the end.
    """
    source = f"{source}: optimizer.safetensors"
    is_step = name.endswith("/step")
    want = (torch.float32, ()) if is_step else (parameter.dtype, tuple(parameter.shape))
    value = slots.get(name)
    have = None if value is None else (value.dtype, tuple(value.shape))
    if value is None or have != want:
        got = "missing" if have is None else f"{have[0]} {have[1]}"
        raise CheckpointError(
            f"{source}: {name} is {got}, the optimizer has {want[0]} {want[1]}; {ADVICE}"
        )
    if not name.endswith("/exp_avg") and (value < 0).any():
        raise CheckpointError(f"{source}: {name} is below 0; {ADVICE}")
    return finite(value, name, source)


class Whole(Mapping[str, Tensor]):
    """Tensors assembled from the pieces of all ranks, which are read from disk on use."""

    def __init__(self, pieces: list[State], source: str) -> None:
        self.pieces, self.source = pieces, source

    def __getitem__(self, name: str) -> Tensor:
        found = [pieces[name] for pieces in self.pieces if name in pieces]
        if not found:
            raise KeyError(name)
        if len(found) == 1:
            return found[0]
        # torch would raise an error of its own, or convert them to a common dtype.
        if len({(x.dtype, x.shape[1:]) for x in found}) > 1 or not all(x.ndim for x in found):
            kinds = " and ".join(f"{x.dtype} {tuple(x.shape)}" for x in found[:3])
            raise CheckpointError(
                f"{self.source}: pieces of {name[:80]} do not fit: {kinds}; {ADVICE}"
            )
        return torch.cat(found)

    def __iter__(self) -> Iterator[str]:
        return iter({name: None for pieces in self.pieces for name in pieces})

    def __len__(self) -> int:
        return sum(1 for _ in self)
