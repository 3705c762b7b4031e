"""Copies tensors that training will change: first on their device, then to the host."""

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from stopmim.base.memory import is_out_of_memory
from stopmim.gpu.devices import memory_of

SPARE = 0.1  # fraction of memory that must stay free beside a copy
STAGE = 2**25  # bytes of pinned memory on the way to the host


def has_room(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Whether a copy fits into memory now, and leaves some free."""
    size, memory = sum(x.nbytes for x in tensors), memory_of(device)
    return memory is None or memory.free - size > SPARE * memory.total


def cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Copies on the same device, or None if memory runs out."""
    try:
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def on_host(tensors: Mapping[str, Tensor], ready: torch.cuda.Event | None) -> dict[str, Tensor]:
    """Contiguous tensors in main memory; those of a GPU are copied once `ready` has passed.

    Meant for a thread beside training. It has its own CUDA stream, so that updates do not queue
    behind its copies, and one pinned buffer: copies to other memory would delay kernel launches.
    """
    if ready is None:
        return {name: x.contiguous() for name, x in tensors.items()}
    found = {}
    stream = _stream(next(iter(tensors.values())).device)
    with torch.cuda.stream(stream):  # and its device, which a new thread does not have
        stage = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True)
        stream.wait_event(ready)
        for name, x in tensors.items():
            found[name] = torch.empty(x.shape, dtype=x.dtype)
            source, host = (y.flatten().view(torch.uint8) for y in (x, found[name]))
            for piece, place in zip(source.split(STAGE), host.split(STAGE), strict=True):
                stage[: len(piece)].copy_(piece, non_blocking=True)
                stream.synchronize()
                place.copy_(stage[: len(piece)])
    return found


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # torch hands out 32 streams of each priority in turn. This one must not be that of a recording,
    # which would end with an error if a thread copied on it.
    return torch.cuda.Stream(device, priority=-1)
