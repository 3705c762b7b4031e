"""Faults of one of two ranks: all end within seconds, and the run resumes exactly."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from campaign.cases import Case, Family, need
from campaign.processes import Limits, Started
from campaign.sample import need_same
from kill import SAVING
from ranks import Ended, complaints, finish, start, together
from stopmim import pretrain
from stopmim.base.errors import DataError
from stopmim.config.schema import Config
from stopmim.method.loss import Loss, masked_loss
from stopmim.train import step
from tiny import NoiseImages, tiny

SECONDS = 15.0  # in which every rank has to end after a fault
SILENT = {"STOPMIM_TIMEOUT": "3"}  # seconds after which a rank counts as lost
KINDS: dict[str, Config] = {"ddp": tiny(), "fsdp": tiny(runtime={"parallel": "fsdp"})}


def prepare(folder: Path) -> None:
    for name, config in KINDS.items():
        ended = together(2, folder / "logs", _train(folder / name, config))
        need([rank.code for rank in ended] == [0, 0], str(ended))


def _train(out: Path, config: Config) -> Callable[[int], object]:
    return lambda _: pretrain(NoiseImages(), out, config)


def _at_call(count: int, action: Callable[[], object]) -> None:
    """Does something before the loss is computed for the `count`-th time in this process."""
    calls = 0

    def disturbed(*args: Any) -> Loss:
        nonlocal calls
        calls += 1
        if calls == count:
            action()
        return masked_loss(*args)

    step.__dict__["masked_loss"] = disturbed  # in a fork


def _fail(error: Exception) -> None:
    raise error


def case(case: Case) -> None:
    kinds = (killed, stopped, failing, disagreeing, told, killed_at_any_moment)
    kind = kinds[case.number % len(kinds)]
    parallel = case.dice.choice(list(KINDS))
    case.about = f"{kind.__name__} {parallel}"
    out = case.folder / "run"

    def job() -> None:
        kind(case, out, KINDS[parallel])

    _finished(case, job, "fault")
    if kind is disagreeing:
        need(not out.exists(), "ranks that disagree have left a run")

    def again() -> None:
        ended = together(2, case.folder / "again logs", _train(out, KINDS[parallel]))
        need([rank.code for rank in ended] == [0, 0], f"not resumed: {ended}")

    _finished(case, again, "again")
    need_same(out, case.shared / parallel)


def _finished(case: Case, job: Callable[[], None], name: str) -> None:
    """Runs `job` in a process of its own, whose leavings are looked for."""
    done = Started(job, case.folder / name, Limits(seconds=90)).finish()
    problem = (done.said.strip().splitlines() or [""])[-1]
    need(done.code == 0, f"{name}: {problem[:600]}")
    need(not done.beyond, f"{name}: took more than {done.beyond}")
    need(not done.left, f"{name}: left behind {', '.join(done.left)[:300]}")


def _ends(case: Case, job: Callable[[int], object], env: dict[str, str]) -> list[Ended]:
    """Two ranks to the end: the second must end soon after the first, which has met the fault."""
    processes = start(2, case.folder / "logs", job, env)
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(p.exitcode is not None for p in processes):
        time.sleep(0.01)
    return _soon(case, processes)


def _soon(case: Case, processes: list[BaseProcess]) -> list[Ended]:
    begin = time.monotonic()
    ended = finish(processes, case.folder / "logs", SECONDS + 5)
    need(time.monotonic() - begin < SECONDS, f"not ended after {SECONDS:g} s: {ended}")
    return ended


def _one_line(ended: list[Ended]) -> None:
    lines = complaints(ended)
    need(len(lines) <= 1, f"{len(lines)} lines of error: {lines}")
    need(not any("internal error" in line for line in lines), str(lines))


def killed(case: Case, out: Path, config: Config) -> None:
    """At a step, or inside a save, which rank 0 makes."""
    rank = case.dice.randrange(2)
    places = [f"step.end@{case.dice.randint(1, 10)}"]
    places += [] if rank else [f"{case.dice.choice(SAVING)}@{case.dice.randint(1, 3)}"]
    point = case.dice.choice(places)

    def job(here: int) -> None:
        if here == rank:
            os.environ["STOPMIM_FAULT"] = f"{point}:kill"
        pretrain(NoiseImages(), out, config)

    ended = _ends(case, job, SILENT)
    need(ended[rank].code == -signal.SIGKILL, f"{point} on {rank} was not reached: {ended}")
    need(ended[1 - rank].code in (0, 7), f"{point} on {rank}: {ended}")
    _one_line(ended)


def killed_at_any_moment(case: Case, out: Path, config: Config) -> None:
    rank, seconds = case.dice.randrange(2), case.dice.uniform(0.05, 1.5)
    processes = start(2, case.folder / "logs", _train(out, config), SILENT)
    time.sleep(seconds)
    if (pid := processes[rank].pid) and processes[rank].is_alive():
        os.kill(pid, signal.SIGKILL)
    ended = _soon(case, processes)
    need(ended[1 - rank].code in (0, 7), f"rank {rank} after {seconds:.2f} s: {ended}")
    _one_line(ended)


def stopped(case: Case, out: Path, config: Config) -> None:
    """A rank that is silent; the other one leaves, and whoever started them ends it."""
    rank, count = case.dice.randrange(2), case.dice.randint(1, 6)

    def job(here: int) -> None:
        if here == rank:
            _at_call(count, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        pretrain(NoiseImages(), out, config)

    processes = start(2, case.folder / "logs", job, SILENT)
    begin = time.monotonic()
    other = processes[1 - rank]
    other.join(SECONDS + 10)
    seconds = time.monotonic() - begin
    ended = finish(processes, case.folder / "logs", 0)
    need(seconds < SECONDS + 2, f"rank {1 - rank} waited {seconds:.0f} s for {rank}: {ended}")
    need(ended[1 - rank].code == 7, f"rank {rank} stopped at {count}: {ended}")
    _one_line(ended)


def failing(case: Case, out: Path, config: Config) -> None:
    """An error of one rank is one line, of that rank."""
    rank, count = case.dice.randrange(2), case.dice.randint(1, 9)

    def job(here: int) -> None:
        if here == rank:
            _at_call(count, lambda: _fail(DataError("the images melted")))
        pretrain(NoiseImages(), out, config)

    ended = _ends(case, job, SILENT)
    need(ended[rank].code == 3 and ended[1 - rank].code in (3, 7), str(ended))
    need(complaints(ended) == ["stopmim: error: the images melted"], str(ended))


def disagreeing(case: Case, out: Path, config: Config) -> None:
    """Another config or other images on one rank: refused before the first update."""
    rank, other = case.dice.randrange(2), case.dice.choice(("seed", "lr", "images"))
    changes: dict[str, Any] = {"seed": 1} if other == "seed" else {"optim.lr": 1e-5}

    def job(here: int) -> None:
        mine = here == rank
        images = NoiseImages(48 if mine and other == "images" else 40)
        pretrain(images, out, config, **(changes if mine and other != "images" else {}))

    ended = _ends(case, job, SILENT)
    need([rank.code for rank in ended] == [2, 2], str(ended))
    need(len(complaints(ended)) == 1, str(ended))


def told(case: Case, out: Path, config: Config) -> None:
    """SIGTERM or SIGINT to one rank: both stop at the same step, saved."""
    rank, point = case.dice.randrange(2), case.dice.randint(1, 8)
    action = case.dice.choice(("term", "int"))

    def job(here: int) -> None:
        if here == rank:
            os.environ["STOPMIM_FAULT"] = f"step.end@{point}:{action}"
        pretrain(NoiseImages(), out, config)

    ended = _ends(case, job, SILENT)
    code = 143 if action == "term" else 130
    need([rank.code for rank in ended] == [code, code], str(ended))


FAMILY = Family(
    "rank_faults",
    "a fault of one of two ranks ends both within 15 s; the run resumes exactly",
    quick=12,
    long=60,
    case=case,
    prepare=prepare,
)
