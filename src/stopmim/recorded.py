"""Updates as CUDA graphs: recorded once for every size of target block, then played back.

An update is a thousand kernels and more. To launch them one by one takes a processor longer than
many a GPU needs to run them; a recording is one launch, and nothing of Python is left of it. It has
addresses in it, not values. So what an update is made from is copied to tensors that stay where
they are, and what is to outlast it (weights, moments, `broken`) was there before. All else lives in
memory that the recordings share, and means nothing once another was played.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stopmim.mim import Batch
from stopmim.optim import Rates
from stopmim.predictor import Noise

WARM = 2  # updates of a size that are made as usual: they compile, load kernels, create moments

Part = tuple[Batch, Noise]
Size = tuple[torch.Size | None, ...]  # of all that a part consists of


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    names: tuple[str, ...]
    values: Tensor  # one for each name, in the shared memory

    def play(self) -> dict[str, Tensor]:
        self.graph.replay()
        return dict(zip(self.names, self.values.clone(), strict=True))


class Recorded:
    """Makes updates by `update`, in which nothing but tensors may differ from step to step.

    Called with the only part of a batch and the rates of the step, it returns what `update` does.
    """

    def __init__(
        self, update: Callable[[Part, Rates[Tensor]], dict[str, Tensor]], device: torch.device
    ) -> None:
        self.update = update
        self.inputs: dict[tuple[int, torch.Size], Tensor] = {}
        self.now = Rates(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)))
        self.made = Counter[Size]()  # updates as usual
        self.recordings: dict[Size, Recording] = {}
        self.pool = torch.cuda.graph_pool_handle()
        # One stream for all that is made as usual or recorded: autograd remembers on which one a
        # parameter was first used, and cuBLAS has memory of its own for every stream.
        self.stream = torch.cuda.Stream(device)

    def __call__(self, parts: Iterator[Part], now: Rates[float]) -> dict[str, Tensor]:
        ((batch, noise),) = parts
        part = (
            Batch._make(self._held(i, x) for i, x in enumerate(batch)),
            Noise._make(self._held(i, x) for i, x in enumerate(noise, start=len(batch))),
        )
        for held, value in zip(self.now, now, strict=True):
            held.fill_(value)
        size = tuple(x if x is None else x.shape for x in (*batch, *noise))
        if self.made[size] < WARM:
            self.made[size] += 1
            return self._as_usual(part)
        if size not in self.recordings:
            self.recordings[size] = self._record(part)
        return self.recordings[size].play()

    def _held(self, i: int, x: Tensor | None) -> Tensor | None:
        """A copy of `x`, input number `i`, where all recordings of that shape will look for it."""
        if x is None:
            return None
        if (i, x.shape) not in self.inputs:
            self.inputs[i, x.shape] = torch.empty_like(x)
        return self.inputs[i, x.shape].copy_(x)

    def _as_usual(self, part: Part) -> dict[str, Tensor]:
        """Each stream waits for the other, so memory of one can be used and freed in the other."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            values = self.update(part, self.now)
        here.wait_stream(self.stream)
        return values

    def _record(self, part: Part) -> Recording:
        """Waits for the device, and runs nothing on it; other threads may use it meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            values = self.update(part, self.now)
            together = torch.stack(tuple(values.values()))
        return Recording(graph, tuple(values), together)
