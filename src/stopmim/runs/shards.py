"""Checkpoints in pieces: every rank writes what it holds, and any number of ranks can read it.

`model.safetensors` and `optimizer.safetensors` hold the pieces of rank 0, `model.1.safetensors` and
`optimizer.1.safetensors` those of rank 1, and so on. A tensor is its pieces one after the other,
along the first dimension, as FSDP2 cuts it. Ranks other than 0 write to a folder of their own, from
which rank 0 moves the files into the checkpoint before that is sealed: a kill in between leaves the
checkpoint before.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from stopmim.base.faults import faultpoint
from stopmim.base.files import remove
from stopmim.gpu.sharding import is_sharded

State = dict[str, Tensor]
NAMES = ("model", "optimizer")
STAGING = ".shards"  # the folder of the ranks other than 0


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
    """Writes the pieces of all ranks but the first; every rank must call it.

    `bad` names a tensor of this rank that is not finite; all ranks learn of it.
    """
    folder, rank = run / "checkpoints" / STAGING, dist.get_rank()
    if rank == 0:
        sweep(run)
        with contextlib.suppress(OSError):  # the run itself is gone: rank 0 notices when it saves
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
    dist.barrier()
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
    """The whole tensors of the model or the optimizer, each put together when it is asked for."""
    files = [checkpoint / f"{name}.safetensors"]
    while (file := checkpoint / f"{name}.{len(files)}.safetensors").exists():
        files.append(file)
    return Whole([reader(file) for file in files])


class Whole(Mapping[str, Tensor]):
    """Tensors out of the pieces of all ranks, which are read from disk on use."""

    def __init__(self, pieces: list[State]) -> None:
        self.pieces = pieces

    def __getitem__(self, name: str) -> Tensor:
        found = [pieces[name] for pieces in self.pieces if name in pieces]
        if not found:
            raise KeyError(name)
        return found[0] if len(found) == 1 else torch.cat(found)

    def __iter__(self) -> Iterator[str]:
        return iter({name: None for pieces in self.pieces for name in pieces})

    def __len__(self) -> int:
        return sum(1 for _ in self)
