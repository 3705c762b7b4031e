"""Repeated work on a GPU as CUDA graphs: recorded once per shape, then replayed.

An update is over a thousand kernels. Launching them one by one often takes the CPU longer than the
GPU needs to run them; replaying a recording is one launch, without any Python. A recording holds
addresses, not values. So the inputs of an update are copied to tensors that stay in place, and
whatever outlasts it (weights, moments, counters) must exist before. Everything else lives in memory
that recordings share, and is overwritten by the next replay.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from stopmim.base.console import warn

WARM = 2  # calls per shape before recording: they compile, load kernels, create moments
SPARE = 0.1  # fraction of GPU memory that recordings must leave free for crops, noise and health

Shapes = tuple[torch.Size | None, ...]


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    names: tuple[str, ...]
    values: Tensor  # one for each name, if there are any, in the shared memory

    def replay(self) -> dict[str, Tensor]:
        self.graph.replay()
        return dict(zip(self.names, self.values.clone(), strict=True))


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one stream for recordings and for the calls before them.

    Autograd remembers the stream of a parameter's first use, and cuBLAS has a workspace per stream.
    """
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Calls `function`; only the values of its tensors may differ between calls of one shape.

    Its arguments are nested tuples or lists of tensors, numbers (which it gets as float64 tensors)
    and None; it returns scalar tensors by name, or nothing. None in place of a tensor counts as
    another shape.
    """

    def __init__(self, function: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self.function, self.device = function, device
        self.inputs: dict[tuple[int, torch.Size], Tensor] = {}
        self.calls: dict[Shapes, int] = {}  # calls that were not replays
        self.recordings: dict[Shapes, Recording] = {}
        self.room = True  # whether recordings fit into memory
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = stream_of(device)
        self.side = torch.cuda.Stream(device)
        self.copied = torch.cuda.current_stream(device).record_event()  # inputs were copied

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """A stream on which to prepare the next inputs while the device works on this call.

        Inputs take many small kernels, which leave most of a GPU idle. Nothing made on other
        streams since the last call may be read here.
        """
        here = torch.cuda.current_stream(self.device)
        # Before this event, inputs of this call are still read, in memory already free for reuse.
        self.side.wait_event(self.copied)
        with torch.cuda.stream(self.side):
            yield
        here.wait_stream(self.side)

    def __call__(self, *arguments: Any) -> dict[str, Tensor]:
        with torch.cuda.device(self.device):
            leaves, spec = tree_flatten(arguments)
            held = [self._held(i, x) for i, x in enumerate(leaves)]
            if any(isinstance(x, Tensor) for x in leaves):
                # Not after numbers alone: what they wait for would hold up the next inputs.
                self.copied.record()
            shapes = tuple(x if x is None else x.shape for x in held)
            if shapes in self.recordings:
                return self.recordings[shapes].replay()
            self.calls[shapes] = self.calls.get(shapes, 0) + 1
            if self.room and self.calls[shapes] > WARM:
                self.room = self._record(shapes, held, spec)
                if self.room:
                    return self.recordings[shapes].replay()
                warn("no memory for CUDA graphs; continuing without them, more slowly")
            if self.recordings:  # a plain call needs their memory; they will be recorded again
                self.recordings.clear()
                torch.cuda.empty_cache()
                self.pool = torch.cuda.graph_pool_handle()  # the old one went with its recordings
            # Each stream waits for the other, so memory of one can be used and freed in the other.
            here = torch.cuda.current_stream()
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                values = self.function(*tree_unflatten(held, spec))
            here.wait_stream(self.stream)
            return values

    def _held(self, i: int, x: Tensor | float | None) -> Tensor | None:
        """Copies `x`, input number `i`, to the tensor that recordings of its shape read."""
        if x is None:
            return None
        shape = x.shape if isinstance(x, Tensor) else torch.Size()
        if (i, shape) not in self.inputs:
            dtype = x.dtype if isinstance(x, Tensor) else torch.float64
            self.inputs[i, shape] = torch.empty(shape, dtype=dtype, device=self.device)
        place = self.inputs[i, shape]
        return place.copy_(x) if isinstance(x, Tensor) else place.fill_(x)

    def _record(self, shapes: Shapes, held: list[Tensor | None], spec: TreeSpec) -> bool:
        """Records one call without running it; False if memory ran out. Waits for the device."""
        here = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(  # other threads may use the device meanwhile
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                values = self.function(*tree_unflatten(held, spec))
                together = torch.stack(tuple(values.values())) if values else torch.empty(0)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            torch.cuda.set_stream(here)  # a failed recording may leave its own stream current
            return False
        self.recordings[shapes] = Recording(graph, tuple(values), together)
        free, total = torch.cuda.mem_get_info()
        return free > SPARE * total
