"""What is done again and again on a GPU as CUDA graphs: recorded for every shape, then played back.

An update is a thousand kernels and more. To launch them one by one takes a processor longer than
many a GPU needs to run them; a recording is one launch, and nothing of Python is left of it. It has
addresses in it, not values. So what an update is made from is copied to tensors that stay where
they are, and what is to outlast it (weights, moments, counters) was there before. All else lives in
memory that the recordings share, and means nothing once another was played.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stopmim.console import warn

WARM = 2  # calls of a shape that are made as usual: they compile, load kernels, create moments

Shapes = tuple[torch.Size | None, ...]


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    names: tuple[str, ...]
    values: Tensor  # one for each name, in the shared memory

    def play(self) -> dict[str, Tensor]:
        self.graph.replay()
        return dict(zip(self.names, self.values.clone(), strict=True))


class Recorded:
    """Calls `function`, in which nothing but tensors may differ from one call to the next.

    Its arguments are tensors, numbers (which it gets as tensors of float64) and None; it returns
    numbers by name, each a tensor. If it runs out of memory it must have changed nothing.
    """

    def __init__(self, function: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self.function, self.device = function, device
        self.inputs: dict[tuple[int, torch.Size], Tensor] = {}
        self.made: dict[Shapes, int] = {}  # as usual
        self.recordings: dict[Shapes, Recording] = {}
        self.room = True  # for recordings, beside what a call takes as usual
        self.pool = torch.cuda.graph_pool_handle()
        # One stream for all that is made as usual or recorded: autograd remembers on which one a
        # parameter was first used, and cuBLAS has memory of its own for every stream.
        self.stream = torch.cuda.Stream(device)

    def __call__(self, *inputs: Tensor | float | None) -> dict[str, Tensor]:
        held = [self._held(i, x) for i, x in enumerate(inputs)]
        shapes = tuple(x if x is None else x.shape for x in held)
        if shapes in self.recordings:
            return self.recordings[shapes].play()
        self.made[shapes] = self.made.get(shapes, 0) + 1
        usual = not self.room or self.made[shapes] <= WARM
        try:
            if usual:
                return self._as_usual(held)
            self.recordings[shapes] = self._record(held)
            return self.recordings[shapes].play()
        except torch.OutOfMemoryError:
            if usual and not self.recordings:
                raise
            self._give_up()
            return self._as_usual(held)

    def _held(self, i: int, x: Tensor | float | None) -> Tensor | None:
        """A copy of `x`, input number `i`, where all recordings of that shape will look for it."""
        if x is None:
            return None
        if not isinstance(x, Tensor):
            return self._place(i, torch.zeros((), dtype=torch.float64, device="meta")).fill_(x)
        return self._place(i, x).copy_(x)

    def _place(self, i: int, like: Tensor) -> Tensor:
        if (i, like.shape) not in self.inputs:
            self.inputs[i, like.shape] = torch.empty_like(like, device=self.device)
        return self.inputs[i, like.shape]

    def _give_up(self) -> None:
        """Recordings keep all the memory they use, which what is made as usual cannot have then."""
        warn("the GPU has no memory for recordings; every update is launched kernel by kernel")
        self.room = False
        self.recordings.clear()
        torch.cuda.empty_cache()

    def _as_usual(self, held: list[Tensor | None]) -> dict[str, Tensor]:
        """Each stream waits for the other, so memory of one can be used and freed in the other."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            values = self.function(*held)
        here.wait_stream(self.stream)
        return values

    def _record(self, held: list[Tensor | None]) -> Recording:
        """Waits for the device, and runs nothing on it; other threads may use it meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            values = self.function(*held)
            together = torch.stack(tuple(values.values()))
        return Recording(graph, tuple(values), together)
