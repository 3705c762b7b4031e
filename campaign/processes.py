"""Commands in processes of their own: what they say, what they cost, and what they leave behind.

A command is a fork of this process, which has loaded everything: it takes milliseconds to start.
It leads a session, so that whatever it starts can be found, measured and ended.
"""

import atexit
import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from limits import limit_memory
from stopmim.__main__ import run

GIB = 1 << 30
SHM = Path("/dev/shm")
POLL = 0.005  # seconds between two looks at whether a command has ended
SAMPLE = 0.1  # seconds between two looks at its memory
GRACE = 8.0  # seconds in which what a command has started must end after it; workers look every 5
LOUDEST = 1 << 20  # bytes of what a command says that are kept
PR_SET_PDEATHSIG = 1

_libc: Any = ctypes.CDLL(None)


@dataclass(frozen=True)
class Limits:
    """A command beyond them is ended, and its case has failed."""

    seconds: float = 60.0
    memory: int = 3 * GIB  # resident bytes of all its processes, above those of this one
    file: int | None = None  # bytes of a file, as RLIMIT_FSIZE
    space: int | None = None  # bytes of address space above those of this process, as RLIMIT_AS


USUAL = Limits()


@dataclass(frozen=True)
class Ended:
    """A command that is over."""

    code: int  # negative: the signal that ended it
    said: str  # on stderr
    printed: str
    seconds: float
    cpu: float  # seconds of it and of the processes that it has waited for
    memory: int  # most resident bytes of all its processes, above those of this one
    beyond: str  # the limit that it went beyond, or ""
    left: tuple[str, ...]  # processes, files in TMPDIR and shared memory that it has left behind

    @property
    def errors(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("stopmim: error:")]

    def __str__(self) -> str:
        lines = self.said.strip().splitlines() or ["(silent)"]
        return f"code {self.code} after {self.seconds:.1f} s: {lines[-1][:300]!r}"


@dataclass
class Started:
    """A command that runs: `job` in a fork, with a folder for what it says and a TMPDIR of its own.

    `job` returns the exit code, or raises SystemExit, as `stopmim_command` does.
    """

    job: Callable[[], int | None]
    folder: Path
    limits: Limits = USUAL
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.seen = set[int]()  # every process of it
        self.old = shared_memory()
        self.base, self.memory, self.beyond = resident(os.getpid()), 0, ""
        self.start = self.sampled = time.monotonic()
        self.code: int | None = None
        # Pipes, not files: a limit on the size of files must not silence it.
        self.pipes = {name: os.pipe() for name in ("out", "err")}
        self.text = {name: b"" for name in self.pipes}
        sys.stdout.flush()
        sys.stderr.flush()
        # Until it is a command, Ctrl-C ends it as it does a Python that is not ready yet.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.pid = os.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if not self.pid:
            self._run()
        for reader, writer in self.pipes.values():
            os.close(writer)
            os.set_blocking(reader, False)

    def _run(self) -> NoReturn:
        """Body of the child."""
        die_with_parent()
        os.setsid()
        for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), *self._writers())):
            os.dup2(fd, number)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        os.environ |= {"TMPDIR": str(self.temporary), **self.env}
        tempfile.tempdir = None  # so that it is chosen anew
        self._limit()
        # Also where a shell has started the campaign in the background, and so without Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ended(self.job)

    def _writers(self) -> list[int]:
        return [writer for _, writer in self.pipes.values()]

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.limits.file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limits.file,) * 2)
        if self.limits.space is not None:
            limit_memory(self.limits.space)

    def is_over(self) -> bool:
        """Whether it has ended by itself, or been ended for going beyond its limits."""
        if self.code is not None:
            return True
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        now = time.monotonic()
        self._listen()
        if pid:
            self.memory = max(self.memory, usage.ru_maxrss * 1024 - self.base)
            self.code = os.waitstatus_to_exitcode(status)
            self.seconds, self.cpu = now - self.start, usage.ru_utime + usage.ru_stime
        elif now - self.sampled > SAMPLE:
            self.sampled = now
            self._measure(now)
        return self.code is not None

    def _listen(self) -> None:
        for name, (reader, _) in self.pipes.items():
            with contextlib.suppress(BlockingIOError):
                while part := os.read(reader, 1 << 16):
                    self.text[name] = (self.text[name] + part)[:LOUDEST]

    def _measure(self, now: float) -> None:
        pids = in_session(self.pid)
        self.seen |= set(pids)
        self.memory = max(self.memory, sum(max(0, resident(pid) - self.base) for pid in pids))
        if self.memory > self.limits.memory:
            self.beyond = f"{self.memory >> 20} MiB"
        elif now - self.start > self.limits.seconds:
            self.beyond = f"{self.limits.seconds:g} s"
        if self.beyond:
            kill_all(pids)

    def signal(self, number: int) -> None:
        if not self.is_over():
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Waits at most that long; returns whether it is over."""
        until = time.monotonic() + seconds
        while not self.is_over() and time.monotonic() < until:
            time.sleep(POLL)
        return self.is_over()

    def finish(self) -> Ended:
        """Waits for the end, and for the end of everything that it has started."""
        while not self.is_over():
            time.sleep(POLL)
        assert self.code is not None
        for name, (reader, _) in self.pipes.items():
            os.close(reader)
            (self.folder / name).write_bytes(self.text[name])
        printed, said = (text.decode(errors="replace") for text in self.text.values())
        left = tuple(self._left())
        cost = self.seconds, self.cpu, self.memory
        return Ended(self.code, said, printed, *cost, self.beyond, left)

    def _left(self) -> list[str]:
        until = time.monotonic() + GRACE
        while (alive := in_session(self.pid)) and time.monotonic() < until:
            self.seen |= set(alive)
            time.sleep(POLL * 10)
        found = [f"process {pid} ({name_of(pid)})" for pid in alive]
        kill_all(alive)
        found += [f"file {path}" for path in sorted(self.temporary.iterdir())]
        new = shared_memory() - self.old
        return found + [f"shared memory {x}" for x in new if owner(x) in self.seen | {self.pid}]


def command(
    words: list[str],
    folder: Path,
    limits: Limits = USUAL,
    *,
    env: Mapping[str, str] | None = None,
    before: Callable[[], object] = lambda: None,
) -> Started:
    """Starts ``stopmim WORDS``, after `before` in the same process."""

    def job() -> None:
        before()
        sys.argv = ["stopmim", *words]
        run()

    return Started(job, folder, limits, env or {})


def ended(job: Callable[[], int | None]) -> NoReturn:
    """Ends this fork with `job`, as Python ends a program; exceptions are shown."""
    code: object = 1
    try:
        code = job() or 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # joins, as Python does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ------------------------------------------------------------------------------ of processes


def in_session(leader: int) -> list[int]:
    """The processes of a session that are alive; zombies are not."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            about = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
            state, _, _, session = about.split()[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(session) == leader and state not in "ZX":
            found.append(pid)
    return found


def resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def shared_memory() -> set[str]:
    return {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()


def owner(name: str) -> int | None:
    """The process that made a segment of shared memory: torch writes its number into the name."""
    found = re.search(r"\D(\d+)_", name)
    return int(found[1]) if found else None
