"""What is done again and again on a GPU as CUDA graphs: recorded for every shape, then played back.

An update is a thousand kernels and more. To launch them one by one takes a processor longer than
many a GPU needs to run them; a recording is one launch, and nothing of Python is left of it. It has
addresses in it, not values. So what an update is made from is copied to tensors that stay where
they are, and what is to outlast it (weights, moments, counters) was there before. All else lives in
memory that the recordings share, and means nothing once another was played.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stopmim.console import warn

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
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all that is made as usual or recorded: autograd remembers on which one a
    parameter was first used, and cuBLAS has memory of its own for every stream."""
    return torch.cuda.Stream(device)


class Recorded:
    """Calls `function`, in which nothing but tensors may differ from one call to the next.

    Its arguments are tensors, numbers (which it gets as tensors of float64) and None; it returns
    numbers by name, each a tensor. One that runs out of memory is called again, without recordings.
    """

    def __init__(self, function: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self.function, self.device = function, device
        self.inputs: dict[tuple[int, torch.Size], Tensor] = {}
        self.made: dict[Shapes, int] = {}  # calls that were not played
        self.recordings: dict[Shapes, Recording] = {}
        self.room = True  # for recordings, beside all the rest
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = _stream(device)

    def __call__(self, *inputs: Tensor | float | None) -> dict[str, Tensor]:
        with torch.cuda.device(self.device):
            try:
                return self._call(*inputs)
            except torch.OutOfMemoryError:
                if not self.recordings:
                    raise
            # Not above: an exception keeps alive all that the failed call had in its hands.
            self._give_up()
            return self._call(*inputs)

    def _call(self, *inputs: Tensor | float | None) -> dict[str, Tensor]:
        held = [self._held(i, x) for i, x in enumerate(inputs)]
        shapes = tuple(x if x is None else x.shape for x in held)
        if shapes in self.recordings:
            return self.recordings[shapes].play()
        self.made[shapes] = self.made.get(shapes, 0) + 1
        if not self.room or self.made[shapes] <= WARM:
            return self._as_usual(held)
        if not self._record(shapes, held):
            self._give_up()
            return self._as_usual(held)
        return self.recordings[shapes].play()

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

    def _give_up(self) -> None:
        """Recordings keep all the memory they use, and nothing else can have it."""
        warn("no memory for CUDA graphs beside all the rest; going on without them, more slowly")
        self.room = False
        self.recordings.clear()
        self.inputs.clear()
        torch.cuda.empty_cache()

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
