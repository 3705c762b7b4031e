"""Several processes that train one model: who they are, what they share, and how they end.

torchrun, or a SLURM job step, starts one process per GPU and says in the environment which is which
(`RANK` of `WORLD_SIZE`). The first one, rank 0, owns the run directory and the terminal. If a rank
fails it leaves a note; the others find it when their next collective breaks and leave without a
word, so that a failure is one line from the rank that knows why.
"""

import atexit
import contextlib
import datetime
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from stopmim.base.console import console
from stopmim.base.errors import ResourceError, UserError
from stopmim.method.model import MaskedImageModel

TIMEOUT = 600  # seconds a rank may be silent; STOPMIM_TIMEOUT changes it
GRACE = 3.0  # seconds in which ranks that are well find out that one is not
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_BROKEN = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
_kept: list[BaseException] = []


@dataclass(frozen=True)
class World:
    """This process among those that train together; by default there is only this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine: the number of its GPU
    store: Store | None = None  # reaches the other ranks while collectives do not

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in the order of ranks; all of them must call it."""
        if self.store is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def mean_(self, values: Tensor) -> Tensor:
        """Replaces `values` by their mean over the ranks."""
        if self.store is not None:
            dist.all_reduce(values)
            values /= self.size
        return values


ALONE = World()


# ------------------------------------------------------------------------- begin and end


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """The world that the environment describes. It is joined, or it is an error: never half."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    world = _join()
    console.quiet = not world.first
    try:
        yield world
        world.gather(None)  # nobody leaves before rank 0 has saved
    except BaseException as error:
        raise _last_words(world, error) from None
    finally:
        console.quiet = False
    dist.destroy_process_group()


def _join() -> World:
    if missing := [name for name in _NAMES if name not in os.environ]:
        raise ResourceError(
            f"{missing[0]} is not set, though {'WORLD_SIZE' if missing[0] == 'RANK' else 'RANK'} "
            f"is; start with torchrun, or unset both to train in one process"
        )
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        # Restarted ranks would meet the keys of those that died, and hang or die themselves.
        raise _said_once(
            "torchrun --max-restarts: works only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
            "environment; set it"
        )
    try:
        timeout = datetime.timedelta(seconds=float(os.environ.get("STOPMIM_TIMEOUT", TIMEOUT)))
    except (ValueError, OverflowError):
        given = os.environ["STOPMIM_TIMEOUT"]
        raise _said_once(f"STOPMIM_TIMEOUT: expected seconds, as 600, got {given!r}") from None
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    both = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if both else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        # Who fails and leaves while others still connect would make them fail to.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(size)], timeout)
        return World(rank, size, int(os.environ["LOCAL_RANK"]), store)
    except (RuntimeError, ValueError) as error:
        raise ResourceError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the others at "
            f"{where}: {str(error).splitlines()[0]}; are all of them started?"
        ) from None


def _said_once(text: str) -> UserError:
    """Of what every rank finds out by itself."""
    return UserError(text if os.environ["RANK"] == "0" else "")


def is_broken(error: BaseException) -> bool:
    """Whether this is a collective that failed, most likely because another rank is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)
    )


def _last_words(world: World, error: BaseException) -> BaseException:
    """`error` if this rank is the first to fail, else one without a message, same exit code."""
    assert world.store is not None
    code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
    code = ResourceError.exit_code if is_broken(error) else code
    who, lost = world.rank, list[int]()
    try:
        world.store.set_timeout(datetime.timedelta(seconds=GRACE))
        note = world.store.compare_set("failed", "", f"{who} {code}")
        world.store.set(f"here/{who}", "")
        who, code = map(int, note.split())
        if who == world.rank and is_broken(error):
            lost = _missing(world, "here", GRACE)
        world.store.set(f"left/{world.rank}", "")  # the last thing a rank asks of the store,
        if world.first:  # which may go with rank 0
            _missing(world, "left", GRACE if who == 0 else 2 * GRACE)
    except RuntimeError:  # no store: rank 0 kept it, so it is rank 0 that failed, and said why
        who, code = 0, ResourceError.exit_code
    _end_at_once(code, error)
    if who != world.rank:
        quiet = UserError("")
        quiet.exit_code = code
        return quiet
    if is_broken(error):
        return ResourceError(
            f"rank {', '.join(map(str, lost)) or '?'} of {world.size} does not answer: killed, or "
            f"silent for {os.environ.get('STOPMIM_TIMEOUT', TIMEOUT)} s; "
            f"run the same command to go on"
        )
    return error


def _end_at_once(code: int, error: BaseException) -> None:
    """The process will not take its group apart when it ends: with a rank gone, that can hang."""
    _kept.append(error)  # its frames hold the group

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)


def _missing(world: World, key: str, seconds: float) -> list[int]:
    """The ranks that have not set `key` by then."""
    assert world.store is not None
    until = time.monotonic() + seconds
    ranks = list(range(world.size))
    while ranks and time.monotonic() < until:
        time.sleep(0.02)
        ranks = [rank for rank in ranks if not world.store.check([f"{key}/{rank}"])]
    return ranks


def agree(world: World, about: Mapping[str, Any]) -> None:
    """Raises UserError unless every rank has the same `about`."""
    first, *others = world.gather(dict(about))
    for rank, other in enumerate(others, start=1):
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise UserError(
                    f"rank {rank} has another {key}: {other.get(key)!r}, rank 0 has "
                    f"{first.get(key)!r}; start every rank with the same config, code and data"
                )


# --------------------------------------------------------------------------- the model


def spread(model: MaskedImageModel, world: World, kind: Literal["ddp", "fsdp"]) -> nn.Module:
    """What to call in place of `model` so that all ranks train it; `model` stays what is saved."""
    if world.store is None:
        return model
    if kind == "ddp":
        # Nothing is unused. But without looking, torch sorts the buckets anew after the first step,
        # a resumed run then adds up in another order, and more than two ranks differ in bits.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        with warnings.catch_warnings():
            # torch 2.13 wants another name for broadcast_buffers, which 2.11 does not have.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=True,
            )
    from torch.distributed.fsdp import fully_shard  # half a second, for those who want it

    # It warns of changing an output in place, which nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    # Never predictor_embed alone: it is also used outside of its own forward, on the noise.
    encoders = (model.encoder, model.target_encoder) if model.target_encoder else (model.encoder,)
    for block in (block for encoder in encoders for block in encoder.blocks):
        fully_shard(block)
    for block in model.predictor.predictor_blocks:
        fully_shard(block)
    for part in (*encoders, model.predictor, model):
        fully_shard(part)
    return model


def average_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass averages over ranks: only the last part of a batch has to."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = now
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        cast(Any, model).set_requires_gradient_sync(now)
