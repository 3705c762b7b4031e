"""A worker process that dies, fails or hangs ends the run in one line that names the image."""

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # which an optimizer imports; it creates a cache folder, once per user

from stopmim import Run, pretrain
from stopmim.base.errors import InterruptedRunError, ResourceError
from stopmim.data.loading import Reader, loader
from stopmim.data.sources.scenes import Scenes
from stopmim.data.workers import Watched, batches, default_workers
from stopmim.method.build import configure
from tiny import NoiseImages, assert_same_run, tiny

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
        (lambda: time.sleep(60), "noise 23: not read within 2 s"),
    ],
    ids=["kill", "segfault", "abort", "exit", "raise", "hang"],
)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_ends_with_the_name_of_the_image_its_worker_was_reading(
    tmp_path: Path, act: Callable[[], object], said: str, workers: int
) -> None:
    config = tiny(runtime={"workers": workers, "worker_timeout": 2 if "within" in said else 60})
    begin = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        pretrain(Trap(act), tmp_path / "run", config)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 7
    assert time.monotonic() - begin < 30


class Once:
    """Does something the first time that any process calls it."""

    def __init__(self, folder: Path, act: Callable[[], object]) -> None:
        self.mark, self.act = folder / "done", act

    def __call__(self) -> None:
        if not self.mark.exists():
            self.mark.touch()
            self.act()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("act", [kill, stop], ids=["killed", "stopped"])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_worker_that_is_lost_once_is_replaced_and_no_sample_is_another(
    tmp_path: Path, act: Callable[[], object], workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = 2 if act is stop else 60
    config = configure(tiny(runtime={"workers": workers, "worker_timeout": limit}))
    found = list(loader(Trap(Once(tmp_path, act)), config, 0, device=CPU))
    want = list(loader(NoiseImages(), configure(tiny()), 0, device=CPU))
    assert len(found) == len(want) == 10
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a.images, b.images)
        assert a.images.stride() == b.images.stride()  # as it lay in the worker's memory
        assert torch.equal(a.augmentation, b.augmentation)
    said = capsys.readouterr().err
    assert said.count("noise 23") == 1
    assert "another process tries again" in said


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_trained_is_saved_before_an_image_ends_the_run(
    tmp_path: Path, workers: int
) -> None:
    """Image 23 is looked at before the first update, belongs to number 2 and, in the second epoch,
    to number 9: it breaks in between."""
    slow = Trap(Late(tmp_path / "late", 3))
    config = tiny(runtime={"workers": workers, "worker_timeout": 2, "save_every": 100})
    with pytest.raises(ResourceError, match="noise 23: not read within 2 s"):
        pretrain(slow, tmp_path / "run", config)
    made = len(Run(tmp_path / "run").metrics)
    assert made > 5
    assert Run(tmp_path / "run").checkpoint.name == f"step-{made:08}"
    whole = pretrain(NoiseImages(), tmp_path / "whole", tiny())
    assert_same_run(pretrain(NoiseImages(), tmp_path / "run", tiny()), whole)


class Late:
    """Hangs from the second time on, whatever process calls it."""

    def __init__(self, file: Path, second: int) -> None:
        self.file, self.second = file, second

    def __call__(self) -> None:
        with self.file.open("a") as file:
            file.write(".")
        if len(self.file.read_text()) >= self.second:
            time.sleep(8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_is_answered_while_an_image_is_waited_for(tmp_path: Path, workers: int) -> None:
    """Without a limit on the image, or one that is far away."""
    trainer, sent = os.getpid(), tmp_path / "sent"

    def hang() -> None:
        with (tmp_path / "times").open("a") as file:
            file.write(".")
        if len((tmp_path / "times").read_text()) == 2:
            time.sleep(0.5)  # until the updates before have been made
            sent.write_text(str(time.time()))
            os.kill(trainer, signal.SIGTERM)
            time.sleep(20)

    limit = 0 if workers else 300
    config = tiny(runtime={"workers": workers, "worker_timeout": limit, "save_every": 100})
    with pytest.raises(InterruptedRunError, match="stopped and saved at step") as caught:
        pretrain(Trap(hang), tmp_path / "run", config)
    assert caught.value.exit_code == 143
    assert time.time() - float(sent.read_text()) < 10
    made = len(Run(tmp_path / "run").metrics)
    assert Run(tmp_path / "run").checkpoint.name == f"step-{made:08}"


class Noting(NoiseImages):
    """Notes the process that reads; slow enough to be met while it does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def read(self, i: int) -> np.ndarray:
        (self.folder / str(os.getpid())).touch()
        time.sleep(0.01)
        return super().read(i)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_in_memory_or_on_disk_and_no_process(
    tmp_path: Path, number: signal.Signals | None
) -> None:
    notes, temporary = tmp_path / "pids", tmp_path / "tmp"
    for folder in (notes, temporary):
        folder.mkdir()
    shared = set(os.listdir("/dev/shm"))

    def train() -> None:
        tempfile.tempdir = str(temporary)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(InterruptedRunError):
            pretrain(Noting(notes), tmp_path / "run", tiny(runtime={"workers": 2}))

    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    assert child.pid
    if number:
        while not (tmp_path / "run" / "metrics.jsonl").exists() or len(list(notes.iterdir())) < 3:
            time.sleep(0.01)
        os.kill(child.pid, number)
    child.join()
    assert child.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    workers = [int(path.name) for path in notes.iterdir() if int(path.name) != child.pid]
    # Two for sample, health and updates alike, and one that looked at channels before.
    assert len(workers) == 3
    until = time.monotonic() + 30
    while any(map(is_alive, workers)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_alive, workers))
    assert list(temporary.iterdir()) == []
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "torch" in name}


KEYS = [[(0, i), (1, i)] for i in range(6)]


def test_processes_that_stay_are_the_same_for_all_that_is_read(tmp_path: Path) -> None:
    config = configure(tiny(runtime={"workers": 2}))
    with Reader(Noting(tmp_path), config).running() as reader:
        facts = list(reader.facts([[0, 1], [2], [3]]))
        found = list(reader.crops(KEYS))
    assert [row["number"] for some in facts for row in some.rows] == [0, 1, 2, 3]
    want = list(Reader(NoiseImages(), configure(tiny())).crops(KEYS))
    assert all(torch.equal(a.images, b.images) for a, b in zip(found, want, strict=True))
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_one_that_is_killed_while_it_waits_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(tiny(runtime={"workers": 2}))
    want = list(Reader(NoiseImages(), configure(tiny())).crops(KEYS))
    with Reader(NoiseImages(), config).running() as reader:
        list(reader.facts([[0], [1]]))
        process = reader.watched.pool[1].process
        process.kill()
        process.join()
        found = list(reader.crops(KEYS))
    assert all(torch.equal(a.images, b.images) for a, b in zip(found, want, strict=True))
    assert capsys.readouterr().err.count("another process tries again") == 1


def test_lists_that_nobody_waits_for_are_not_answered_later() -> None:
    config = configure(tiny(runtime={"workers": 2}))
    want = list(Reader(NoiseImages(), configure(tiny())).crops(KEYS))
    with Reader(NoiseImages(), config).running() as reader:
        left = reader.crops(reversed(KEYS))
        next(left)
        left.close()
        assert reader.watched.pool == []
        found = list(reader.crops(KEYS))
    assert all(torch.equal(a.images, b.images) for a, b in zip(found, want, strict=True))


def test_a_slow_image_within_the_limit_is_read() -> None:
    config = configure(tiny(runtime={"workers": 2, "worker_timeout": 30}))
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
        (4, {"LOCAL_WORLD_SIZE": "0", "SLURM_CPUS_PER_TASK": ""}, 3),
        (4, {"LOCAL_WORLD_SIZE": "x", "SLURM_CPUS_PER_TASK": "9" * 5000}, 3),
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
