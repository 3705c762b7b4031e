"""A worker process that dies, fails or hangs ends the run in one line that names the image."""

import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from stopmim import pretrain
from stopmim.base.errors import ResourceError
from stopmim.data.loading import loader
from stopmim.data.sources.scenes import Scenes
from stopmim.data.workers import Watched, batches, default_workers
from stopmim.method.build import configure
from tiny import NoiseImages, tiny

BAD = 23

CPU = torch.device("cpu")


class Trap(NoiseImages):
    """Does something at the image numbered `BAD`, in whatever process reads it."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def read(self, i: int) -> np.ndarray:
        if i == BAD:
            self.act()
        return super().read(i)


def sevens(keys: list[tuple[int, int]]) -> np.ndarray:
    return np.stack([np.full(7, number) for _, number in keys])


def fail() -> None:
    raise KeyError("no such\nkey")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def abort() -> None:
    faulthandler.disable()  # pytest's, which would print
    os.abort()


def segfault() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (kill, "died while reading noise 23 "),
        (segfault, "died while reading noise 23 "),
        (abort, "died while reading noise 23 "),
        (lambda: os._exit(3), "died while reading noise 23 "),
        (fail, "failed while reading noise 23: "),
        (lambda: time.sleep(60), "noise 23: not read within 1 s"),
    ],
    ids=["kill", "segfault", "abort", "exit", "raise", "hang"],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_ends_with_the_name_of_the_image_its_worker_was_reading(
    tmp_path: Path, act: Callable[[], object], said: str, workers: int
) -> None:
    config = tiny(runtime={"workers": workers, "worker_timeout": 1})
    begin = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        pretrain(Trap(act), tmp_path / "run", config)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 7
    assert time.monotonic() - begin < 15


def test_a_slow_image_within_the_limit_is_read() -> None:
    config = configure(tiny(runtime={"workers": 2, "worker_timeout": 2}))
    batches = list(loader(Trap(lambda: time.sleep(0.5)), config, 0, device=CPU))
    assert len(batches) == 10


def test_no_memory_for_a_batch_is_said_and_not_waited_for() -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))

    config = configure(tiny(runtime={"workers": 2}))
    with pytest.raises(ResourceError, match=r"out of memory in a worker .* --runtime.workers 1"):
        list(loader(Trap(no_room), config, 0, device=CPU))


def test_long_lists_of_keys_do_not_fill_the_pipe_from_both_ends() -> None:
    """Each of half a megabyte, and its answer of two: no buffer holds them."""
    n = 40_000
    lists = [[(0, i) for i in range(n)] for _ in range(4)]
    watched = Watched(NoiseImages(), 1, 60)
    signal.alarm(30)  # nobody handles it
    found = list(batches(sevens, lists, watched))
    signal.alarm(0)
    assert [int(array[-1, 0]) for array in found] == 4 * [n - 1]


def test_workers_share_what_they_read_whatever_way_processes_start_by_default() -> None:
    """As from Python 3.14 on, where a lambda, or images, would have to be pickled."""
    usual = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("forkserver", force=True)
    try:
        watched = Watched(Trap(lambda: None), 1, 10.0)
        (read,) = batches(lambda keys: sevens(keys)[0].tolist(), [[(0, 5)]], watched)
    finally:
        torch.multiprocessing.set_start_method(usual, force=True)
    assert read == [5] * 7


def test_the_global_state_of_this_process_is_left_alone() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    list(loader(NoiseImages(), configure(tiny(runtime={"workers": 1})), 8, device=CPU))
    list(loader(NoiseImages(), configure(tiny()), 8, device=CPU))
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    assert before == after


@pytest.mark.parametrize(
    ("cores", "environment", "expected"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (4, {}, 3),
        (16, {}, 15),  # a ViT-B on an H200 needs eleven
        (192, {}, 16),
        (96, {"LOCAL_WORLD_SIZE": "8"}, 11),
        (8, {"LOCAL_WORLD_SIZE": "8"}, 1),
        (4, {"LOCAL_WORLD_SIZE": "8"}, 1),
        # SLURM gives each rank cores of its own, whether or not it keeps it to them.
        (12, {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "12"}, 11),
        (96, {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "12"}, 11),
        # In a job of one task, torchrun shares them out.
        (
            96,
            {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "96", "TORCHELASTIC_RUN_ID": "1"},
            11,
        ),
    ],
)
def test_workers_are_as_many_as_a_rank_has_cores_for(
    monkeypatch: pytest.MonkeyPatch, cores: int, environment: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    for name in ("LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_workers(NoiseImages()) == expected
    assert default_workers(Scenes(1, 16)) == 0
