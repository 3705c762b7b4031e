"""Batches of the views that an encoder is shown, made ahead by all cores while it works.

Images that can be read together are resized many at a time by threads, outside of Python. All
others are read by worker processes: decoders hold Python's lock, so that threads take turns.

Shapes: N images, B of a batch, C channels, S pixels along one edge of a view.
"""

import mmap
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stopmim.base.errors import DataError, UserError
from stopmim.base.memory import main_memory
from stopmim.base.random_keys import numpy_generator
from stopmim.data import workers
from stopmim.data.channels import Form, as_kind
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images, read_together
from stopmim.evals.views import TrainView, View

PIXELS = 256 * 224 * 224  # pixels of a batch on a GPU
PARTS = 8  # parts of a batch, each made by one core
FEW = 256  # images for which processes are not worth starting
SHARE = 0.25  # of the free memory of a device that views may take there
WORKERS = "STOPMIM_WORKERS"  # number of processes; 0: none, by default one per core


class Reader(Protocol):
    """Images, or `workers.Watched` ones."""

    def read(self, i: int) -> np.ndarray: ...

    def name(self, i: int) -> str: ...


class Part(NamedTuple):
    """Images `begin` to `end`, to be written to the rows from `row` on of a batch of a ring."""

    slot: int
    row: int
    begin: int
    end: int


def read(images: Reader, i: int) -> np.ndarray:
    """Reads image `i`, or raises a DataError that names it."""
    try:
        pixels = images.read(i)
        if pixels.ndim != 3 or (found := as_kind(pixels)) is None:
            raise BadImageError(f"{pixels.dtype} {pixels.shape}; expected numbers (H, W, C)")
        return found
    except BadImageError as error:
        raise DataError(
            f"{images.name(i)}: {error}; images are never left out silently: fix or remove it, or "
            f"leave it out with --skip FILE, see stopmim check --fix-list"
        ) from None


@dataclass(frozen=True, eq=False)
class Showing:
    """A view of every image; `draw`, a seed and a number, is for random views."""

    images: Images
    view: View | TrainView
    draw: tuple[int, int] = (0, 0)

    @cached_property
    def first(self) -> tuple[Tensor, Form]:
        """The first view (C, S, S), and channels and type of its image: all must have the same."""
        pixels = read(self.images, 0)
        return self._show(pixels, 0), Form.of(pixels)

    def batches(self, device: torch.device, size: int | None = None) -> Iterator[Tensor]:
        """Yields views (B, C, S, S) on `device`, `size` at a time; the next overwrites them.

        They are uint8, or float32 in stored units for images of another type.

        By default 256; on a GPU more if they are small, to keep it busy, fewer if they are large.
        """
        if not len(self.images):
            return
        if size is None:
            height, width = self.first[0].shape[1:]
            suited = max(1, min(2048, PIXELS // (height * width)))
            size = 256 if device.type == "cpu" else suited
        made = self._made(min(size, len(self.images)))
        yield from made if device.type == "cpu" else _copied(made, device)

    def _made(self, size: int) -> Iterator[Tensor]:
        """The batches in main memory, in a ring that all cores write to."""
        n, length = len(self.images), -(-size // PARTS)
        processes = 0 if self._together(0, 1) is not None else worker_processes(n)
        ahead = workers.AHEAD * (processes or torch.get_num_threads())  # parts that are being made
        # The batch in use, and the batches that parts ahead belong to: the first may be half done.
        slots = 2 + -(-ahead // -(-size // length))
        view = self.first[0].movedim(0, 2).numpy()
        ring = _memory((slots, size, *view.shape), view.dtype, shared=processes > 0)
        parts = (
            Part(start // size % slots, row, start + row, min(start + row + length, stop))
            for start, stop in ((i, min(i + size, n)) for i in range(0, n, size))
            for row in range(0, stop - start, length)
        )
        if processes:
            watched = workers.Watched(self.images, processes, 0, f"{WORKERS}=")
            fill = partial(self._fill, ring, watched)
            made = workers.batches(fill, map(list, parts), watched, lambda part: range(*part[2:]))
        else:
            made = _by_threads(partial(self._fill, ring, self.images), parts, ahead)
        for (slot, row, begin, end), obstacle in made:
            if obstacle:
                raise DataError(obstacle)
            stop = row + end - begin
            if stop == size or end == n:
                yield torch.from_numpy(ring[slot, :stop]).permute(0, 3, 1, 2)

    def _fill(self, ring: np.ndarray, images: Reader, part: Any) -> tuple[Any, str]:
        """Writes the views of `part` to `ring`; returns it, and why an image is unreadable."""
        slot, row, begin, end = part
        try:
            if (shown := self._together(begin, end)) is not None:
                # By numpy: torch would start threads of its own in each of ours.
                ring[slot, row : row + end - begin] = shown.movedim(1, 3).numpy()
            else:
                for i in range(begin, end):
                    ring[slot, row + i - begin] = self._one(images, i).movedim(0, 2).numpy()
        except DataError as error:
            return part, str(error)
        return part, ""

    def _together(self, begin: int, end: int) -> Tensor | None:
        """Views (B, C, S, S) of images that are read together; None for random views."""
        if isinstance(self.view, TrainView):
            return None
        pixels = read_together(self.images, np.arange(begin, end))
        pixels = None if pixels is None else as_kind(pixels)
        return None if pixels is None else self.view(pixels)

    def _one(self, images: Reader, i: int) -> Tensor:
        if i == 0:
            return self.first[0]  # a large image takes seconds
        pixels = read(images, i)
        found, others = Form.of(pixels), self.first[1]
        if found != others:
            what = f"{found}, where the others have {others}"
            raise DataError(f"{images.name(i)}: {what}; leave it out with --skip FILE")
        return self._show(pixels, i)

    def _show(self, pixels: np.ndarray, i: int) -> Tensor:
        if isinstance(self.view, View):
            return self.view(pixels)
        return self.view(pixels, numpy_generator("view", *self.draw, i))


def worker_processes(n: int) -> int:
    """Processes to read `n` images with; 0 to read them in this one."""
    asked = os.environ.get(WORKERS, "")
    if asked and not re.fullmatch("[0-9]{1,9}", asked):
        raise UserError(f"{WORKERS}={asked}: expected a number of processes, or 0 for none")
    # Only a fork shares the memory that workers write to.
    if n <= FEW or sys.platform != "linux":
        return 0
    return min(int(asked) if asked else workers.cores(), n // PARTS)


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any], *, shared: bool) -> np.ndarray:
    """Memory, `shared` with processes that are forked later, which takes no room in /dev/shm."""
    if not shared:
        return np.empty(shape, dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def _by_threads(
    fill: Callable[[Part], tuple[Part, str]], parts: Iterable[Part], ahead: int
) -> Iterator[tuple[Part, str]]:
    """Yields what `fill` returns for each of `parts`, in order, working at most `ahead` ahead."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        due = deque[Future[tuple[Part, str]]]()
        for part in parts:
            due.append(pool.submit(fill, part))
            if len(due) > ahead:
                yield due.popleft().result()
        while due:
            yield due.popleft().result()


def _copied(batches: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yields the batches on a GPU, each copied while it works on the one before."""
    stream = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            there = upload(batch, device)
        here = torch.cuda.current_stream(device)
        here.wait_stream(stream)
        there.record_stream(here)
        yield there


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of `tensor` on a GPU, which need not have arrived; the original may be overwritten.

    Pinned first: from any other memory the CPU would wait for the GPU. By numpy: threads of torch,
    `Tensor.pin_memory` too, would wait for each other on cores that are busy decoding.
    """
    pinned = torch.empty_like(tensor, pin_memory=True)
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned.to(device, non_blocking=True)


class Kept:
    """Views made for one encoder, on its device, for the next one that is shown the same.

    All of them take up to a quarter of the memory that was free there; what does not fit is made
    again.
    """

    def __init__(self) -> None:
        self.views: dict[str, list[Tensor]] = {}
        self.nbytes = 0

    def batches(
        self, key: str, showing: Showing, device: torch.device, size: int | None = None
    ) -> Iterator[Tensor]:
        """The batches of `showing` on `device`, kept under `key` if there is room."""
        if key in self.views:
            yield from self.views[key]
            return
        if not (n := len(showing.images)):
            return
        total = self.nbytes + n * showing.first[0].nbytes
        # Asked once: views that began to fit in between would lack the first.
        fits, held = total <= SHARE * (self.nbytes + _free(device)), list[Tensor]()
        for batch in showing.batches(device, size):
            if fits:  # on a CPU the next batch overwrites this one
                held.append(batch.clone() if device.type == "cpu" else batch)
            yield batch
        if fits:
            self.views[key], self.nbytes = held, total


def _free(device: torch.device) -> int:
    """Bytes free on `device`; 0 if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = main_memory()
    return memory.free if memory else 0


def batches(show: Callable[[int], Tensor], order: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """Yields batches (B, C, S, S), made by threads, with one prefetched."""
    threads = torch.get_num_threads()

    def part(numbers: Sequence[int]) -> Tensor:
        return torch.stack([show(i) for i in numbers])

    with ThreadPoolExecutor(threads) as pool:
        ahead: Iterator[Tensor] | None = None
        for numbers in order:
            # One task per thread, not per image: submitting a small image costs more than reading.
            size = -(-len(numbers) // threads)
            parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
            now, ahead = ahead, pool.map(part, parts)
            if now is not None:
                yield torch.cat(list(now))
        if ahead is not None:
            yield torch.cat(list(ahead))
