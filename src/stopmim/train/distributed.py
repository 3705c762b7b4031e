"""Training on several GPUs, one process (rank) each: joining, agreeing, sharding, failing.

torchrun or a SLURM job step starts the ranks and numbers them in the environment (`RANK` of
`WORLD_SIZE`). Rank 0 owns the run directory and the terminal. A rank that fails leaves a note; the
others find it when their next collective breaks and exit silently, so that a failure is one line
from the rank that knows the reason.
"""

import atexit
import contextlib
import datetime
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from stopmim._version import __version__
from stopmim.base.console import console, is_first_rank
from stopmim.base.errors import ResourceError, UserError
from stopmim.base.waiting import within
from stopmim.config.schema import Config, flatten
from stopmim.method.model import MaskedImageModel
from stopmim.runs.run import git_state

TIMEOUT = 600  # seconds that a rank may be silent; STOPMIM_TIMEOUT overrides it
GRACE = 3.0  # seconds for healthy ranks to notice that one has failed
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_BROKEN = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
_kept: list[BaseException] = []  # keeps alive what must not be torn down at exit


@dataclass(frozen=True)
class World:
    """This process among those that train together; by default it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine: the index of its GPU
    store: Store | None = None  # reaches other ranks even when collectives fail

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, in order; every rank must call it."""
        if self.store is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def answer(self) -> None:
        """Tells the other ranks that this one is alive: they ask when one does not answer."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # gone, or silent, with rank 0
                within(GRACE, partial(self.store.set, f"here/{self.rank}", ""))

    def mean_(self, values: Tensor) -> Tensor:
        """Averages `values` over the ranks, in place."""
        if self.store is not None:
            if values.is_cuda:  # NCCL divides on the way
                dist.all_reduce(values, dist.ReduceOp.AVG)
            else:
                dist.all_reduce(values)
                values /= self.size
        return values


ALONE = World()


# ------------------------------------------------------------------------- start and end


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Joins the world that the environment describes, or raises; never falls back to one rank."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    world = _join()
    console.quiet = not world.first
    try:
        yield world
        world.gather(None)  # no rank exits before rank 0 has saved
    except BaseException as error:
        raise _first_failure(world, error) from None
    finally:
        console.quiet = False
    dist.destroy_process_group()


def _join() -> World:
    if missing := [name for name in _NAMES if name not in os.environ]:
        raise ResourceError(
            f"{missing[0]} is not set, but {'WORLD_SIZE' if missing[0] == 'RANK' else 'RANK'} "
            f"is; start with torchrun, or unset both to train in one process"
        )
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Restarted ranks would read stale keys of the dead ones, and hang or fail.
        needed = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        raise _on_rank_0(f"torchrun --max-restarts: needs {needed}; set it")
    given = os.environ.get("STOPMIM_TIMEOUT", TIMEOUT)
    try:
        timeout = datetime.timedelta(seconds=float(given))
    except (ValueError, OverflowError):
        raise _on_rank_0(f"STOPMIM_TIMEOUT: expected seconds, like 600, got {given!r}") from None
    both = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if both else "gloo"
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        own = PrefixStore("group", store)
        dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=size, store=own)
        # A rank that failed and exited while others still connect would break their rendezvous.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(size)], timeout)
        return World(rank, size, int(os.environ["LOCAL_RANK"]), store)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ResourceError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the others at "
            f"{where}: {str(error).splitlines()[0]}; check that all ranks were started"
        ) from None


def _on_rank_0(text: str) -> UserError:
    """An error that every rank finds by itself; only rank 0 prints its message."""
    return UserError(text if is_first_rank() else "")


def is_broken(error: BaseException) -> bool:
    """Whether a collective failed, most likely because another rank is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)
    )


def _first_failure(world: World, error: BaseException) -> BaseException:
    """`error` if this rank failed first, else a silent error with the first one's exit code."""
    assert world.store is not None
    code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
    code = ResourceError.exit_code if is_broken(error) else code
    who, lost = world.rank, list[int]()
    try:
        # Requests have no limit of their own: rank 0 may host the store, and be stopped.
        note = within(GRACE, partial(_leave_note, world.store, who, code))
        who, code = map(int, note.split())
        if who == world.rank and is_broken(error):
            lost = within(2 * GRACE, partial(_missing, world, "here", GRACE))
        within(GRACE, partial(world.store.set, f"left/{world.rank}", ""))  # a rank's last request
        if world.first:  # it leaves last, for the store may be its own
            _missing(world, "left", GRACE if who == 0 else 2 * GRACE)
    except RuntimeError:  # the store is gone with rank 0, which failed and said why
        who, code = 0, ResourceError.exit_code
    except TimeoutError:  # rank 0 is silent: rank 1 says so, unless a rank has more to say
        who, lost = (1, [0]) if is_broken(error) else (who, lost)
    # Exit without destroying the group, which can hang if a rank is gone.
    _kept.append(error)  # its frames reference the group

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)
    if who != world.rank:
        quiet = UserError("")
        quiet.exit_code = code
        return quiet
    if is_broken(error):
        patience = os.environ.get("STOPMIM_TIMEOUT", TIMEOUT)
        return ResourceError(
            f"rank {', '.join(map(str, lost)) or '?'} of {world.size} does not answer: killed, or "
            f"silent for {patience} s; run the same command to resume"
        )
    return error


def _leave_note(store: Store, rank: int, code: int) -> bytes:
    """Notes the failure of this rank, and returns the note of the rank that failed first."""
    store.set_timeout(datetime.timedelta(seconds=GRACE))
    note = store.compare_set("failed", "", f"{rank} {code}")
    store.set(f"here/{rank}", "")
    return note


def _missing(world: World, key: str, seconds: float) -> list[int]:
    """The ranks that have not set `key` after `seconds`."""
    assert world.store is not None
    until = time.monotonic() + seconds
    ranks = list(range(world.size))
    while ranks and time.monotonic() < until:
        time.sleep(0.02)
        ranks = [rank for rank in ranks if not world.store.check([f"{key}/{rank}"])]
    return ranks


def agree(world: World, config: Config, images: str) -> None:
    """Raises UserError if a rank has another config, other code, or other images."""
    states = world.gather(git_state())
    known = next((state for state in states if state is not None), None)
    # A rank without git, or with one that took too long, cannot say that it has other code.
    code = {"version": __version__, "git state": states[world.rank] or known}
    about = dict(flatten(config.model_dump(mode="json"))) | code | {"data": images}
    first, *others = world.gather(about)
    for rank, other in enumerate(others, start=1):
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise UserError(
                    f"rank {rank} has another {key}: {other.get(key)!r}, rank 0 has "
                    f"{first.get(key)!r}; start every rank with the same config, code and data"
                )


# --------------------------------------------------------------------------- the model


def parallelise(
    model: MaskedImageModel, world: World, kind: Literal["ddp", "fsdp", "step"]
) -> nn.Module:
    """Returns the module to call so that all ranks train `model`, which stays what is saved.

    "step" wraps nothing: the step averages gradients itself.
    """
    if world.store is None:
        return model
    if kind == "step":
        for x in model.state_dict().values():  # as DDP does when it wraps a model
            dist.broadcast(x, 0)
        return model
    if kind == "ddp":
        # No parameter is unused. But otherwise torch rebuilds its buckets after the first step, so
        # that a resumed run sums in another order and its bits differ on more than two ranks.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers; torch 2.11 does not know the new name.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=True,
            )
    from torch.distributed.fsdp import fully_shard  # takes half a second to import

    # It warns about in-place changes of outputs, which nothing here makes.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    # Never predictor_embed alone: the predictor also applies it to the noise, outside its forward.
    encoders = (model.encoder, model.target_encoder) if model.target_encoder else (model.encoder,)
    blocks = [block for encoder in encoders for block in encoder.blocks]
    for part in (*blocks, *model.predictor.predictor_blocks, *encoders, model.predictor, model):
        fully_shard(part)
    return model


def average_gradients(model: nn.Module, now: bool) -> None:
    """Sets whether the next backward averages over ranks: only a batch's last part has to."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = now
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        cast(Any, model).set_requires_gradient_sync(now)
