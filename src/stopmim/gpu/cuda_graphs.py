"""What is done again and again on a GPU as CUDA graphs: recorded for every shape, then played back.

An update is a thousand kernels and more. To launch them one by one takes a processor longer than
many a GPU needs to run them; a recording is one launch, and nothing of Python is left of it. It has
addresses in it, not values. So what an update is made from is copied to tensors that stay where
they are, and what is to outlast it (weights, moments, counters) was there before. All else lives in
memory that the recordings share, and means nothing once another was played.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stopmim.base.console import warn

WARM = 2  # calls of a shape that are made as usual: they compile, load kernels, create moments
SPARE = 0.1  # of a GPU that recordings must leave: crops, noise and health need memory too

Shapes = tuple[torch.Size | None, ...]


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    names: tuple[str, ...]
    values: Tensor  # one for each name, in the shared memory

    def play(self) -> dict[str, Tensor]:
        self.graph.replay()
        return dict(zip(self.names, self.values.clone(), strict=True))


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """One stream for all that is made as usual or recorded: autograd remembers on which one a
    parameter was first used, and cuBLAS has memory of its own for every stream."""
    return torch.cuda.Stream(device)


class Recorded:
    """Calls `function`, in which nothing but tensors may differ from one call to the next.

    Its arguments are tensors, numbers (which it gets as tensors of float64) and None; it returns
    numbers by name, each a tensor.
    """

    def __init__(self, function: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self.function, self.device = function, device
        self.inputs: dict[tuple[int, torch.Size], Tensor] = {}
        self.made: dict[Shapes, int] = {}  # calls that were not played
        self.recordings: dict[Shapes, Recording] = {}
        self.room = True  # for recordings, beside all the rest
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = stream_of(device)
        self.beside = torch.cuda.Stream(device)
        self.taken = torch.cuda.current_stream(device).record_event()  # the inputs were copied

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Where the inputs of the next call are made, while the device is busy with this one.

        They are many small kernels, which leave most of a GPU idle. Nothing made elsewhere since
        the last call may be read here.
        """
        here = torch.cuda.current_stream(self.device)
        # Until then the inputs of this call are read, in memory that is free to be used again.
        self.beside.wait_event(self.taken)
        with torch.cuda.stream(self.beside):
            yield
        here.wait_stream(self.beside)

    def __call__(self, *inputs: Tensor | float | None) -> dict[str, Tensor]:
        with torch.cuda.device(self.device):
            held = [self._held(i, x) for i, x in enumerate(inputs)]
            self.taken.record()
            shapes = tuple(x if x is None else x.shape for x in held)
            if shapes in self.recordings:
                return self.recordings[shapes].play()
            self.made[shapes] = self.made.get(shapes, 0) + 1
            if self.room and self.made[shapes] > WARM:
                self.room = self._record(shapes, held)
                if self.room:
                    return self.recordings[shapes].play()
                warn("no memory for CUDA graphs beside all the rest; going on without, more slowly")
            self._forget()
            return self._as_usual(held)

    def _held(self, i: int, x: Tensor | float | None) -> Tensor | None:
        """A copy of `x`, input number `i`, where all recordings of that shape will look for it."""
        if x is None:
            return None
        if not isinstance(x, Tensor):
            return self._place(i, torch.Size(), torch.float64).fill_(x)
        return self._place(i, x.shape, x.dtype).copy_(x)

    def _place(self, i: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if (i, shape) not in self.inputs:
            self.inputs[i, shape] = torch.empty(shape, dtype=dtype, device=self.device)
        return self.inputs[i, shape]

    def _forget(self) -> None:
        """Gives memory back to a call as usual, which needs as much; recordings are soon redone."""
        if self.recordings:
            self.recordings.clear()
            torch.cuda.empty_cache()
            self.pool = torch.cuda.graph_pool_handle()  # the other went with its recordings

    def _as_usual(self, held: list[Tensor | None]) -> dict[str, Tensor]:
        """Each stream waits for the other, so memory of one can be used and freed in the other."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            values = self.function(*held)
        here.wait_stream(self.stream)
        return values

    def _record(self, shapes: Shapes, held: list[Tensor | None]) -> bool:
        """Whether there was memory for it. Waits for the device, and runs nothing on it."""
        here = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(  # other threads may use the device meanwhile
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                values = self.function(*held)
                together = torch.stack(tuple(values.values()))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            torch.cuda.set_stream(here)  # a recording that fails may stay in its own
            return False
        self.recordings[shapes] = Recording(graph, tuple(values), together)
        free, total = torch.cuda.mem_get_info()
        return free > SPARE * total
