"""The claim on a run directory: one process writes to it, as long as it stays where it is.

Processes of one machine are kept apart by a lock on run.lock. Machines that share a file system may
not share its locks: the owner also writes the time into run.lock every few seconds, and another
machine that sees this heartbeat move leaves the run alone.
"""

import contextlib
import datetime
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from stopmim.base.console import say, warn
from stopmim.base.errors import RunInUseError, StorageError
from stopmim.base.files import open_regular, read_regular, write_whole

BEAT = 10.0  # seconds between two heartbeats
WATCH = 60.0  # seconds without one, after which the owner on another machine counts as dead
POLL = 1.0


class Place(NamedTuple):
    """Current location of a claimed run; `problem` says what happened to it, or is ""."""

    path: Path | None  # None: it is gone, or belongs to another process
    problem: str = ""


class Claim:
    """A run directory that this process has locked."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self.lock = path, lock
        self.folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.owner = {
            "claim": secrets.token_hex(8),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": boot_id(),
            "since": now(),
        }
        self.ended = Event()
        self.thread = Thread(target=self._beat, name="heartbeat", daemon=True)

    def write(self) -> None:
        """Writes owner and time into run.lock; every heartbeat has the same length."""
        text = f"{json.dumps(self.owner | {'beat': now()})}\n".encode()
        os.pwrite(self.lock, text, 0)
        os.ftruncate(self.lock, len(text))

    def _beat(self) -> None:
        while not self.ended.wait(BEAT):
            if self.place().problem:
                continue  # it may be another machine's: the next save finds out
            with contextlib.suppress(OSError):  # a full disk, or a server that is away
                self.write()

    def place(self) -> Place:
        """Current location of the run: at its path, elsewhere, or None."""
        if not _is_same(self.path, self.folder):
            moved = _path_of(self.folder)
            if moved is None:
                return Place(None, f"{self.path}: was removed while it ran")
            return Place(moved, f"{self.path}: was moved to {moved} while it ran")
        if not (self.path / "run.lock").exists():
            return Place(self.path, f"{self.path}: run.lock was removed while it ran")
        owner = owner_of(self.path)
        mine = owner.get("claim", self.owner["claim"]) == self.owner["claim"]
        if not mine or not _is_same(self.path / "run.lock", self.lock):
            return Place(None, f"{self.path}: was taken over by {_described(owner)}")
        return Place(self.path)

    def release(self) -> None:
        """Ends the heartbeat and the lock; a run that never started leaves no trace."""
        self.ended.set()
        self.thread.join()
        with contextlib.suppress(OSError):
            if not self.place().problem:
                os.ftruncate(self.lock, 0)
                if not (self.path / "run.json").exists():
                    (self.path / "run.lock").unlink()
                    self.path.rmdir()  # unless there is something else in it
        self.close()

    def close(self) -> None:
        os.close(self.lock)
        os.close(self.folder)


_claims: dict[Path, Claim] = {}  # of the runs that this process has claimed


def _release_in_child() -> None:
    """Closes inherited locks: a worker that outlives a killed parent must not hold them."""
    for claim in _claims.values():
        claim.close()
    _claims.clear()


os.register_at_fork(after_in_child=_release_in_child)


def place_of(path: Path) -> Place:
    """Current location of the run claimed at `path`; `path` itself if none was claimed."""
    claim = _claims.get(path)
    return claim.place() if claim else Place(path)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Locks the run directory `path`; raises StorageError or RunInUseError if it cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = _locked(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
    try:
        claim = Claim(path, handle)
    except BaseException:
        os.close(handle)
        raise
    try:
        claim.write()
        claim.thread.start()
    except OSError as error:  # a full disk
        claim.close()
        raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
    _claims[path] = claim
    try:
        yield  # the lock ends with the process, however that ends
    finally:
        if _claims.pop(path, None):  # not in a child of this process
            claim.release()


def _locked(path: Path) -> int:
    """A descriptor of run.lock, locked; a hard link, to whatever file, is replaced by a copy."""
    lock = path / "run.lock"
    while True:
        handle = open_regular(lock, os.O_RDWR | os.O_CREAT)
        try:
            _lock(path, handle)
            if os.fstat(handle).st_nlink == 1:
                return handle
            write_whole(lock, read_regular(lock))
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(path: Path, handle: int) -> None:
    """Takes the lock, or raises an error that names its owner."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, owner_of(path)) from None
    except OSError as error:  # a file system without locks
        what = f"cannot lock this file: {error.strerror}; choose --out on another disk"
        raise StorageError(f"{path / 'run.lock'}: {what}") from None
    if not _is_same(path / "run.lock", handle):  # its last owner has just removed or replaced it
        what = "was in use by a process that has just ended; run the same command again"
        raise RunInUseError(f"{path}: {what}")
    _watch(path)


def refuse_if_used(path: Path) -> None:
    """Raises RunInUseError if another process of this machine has claimed the run `path`."""
    try:
        handle = open_regular(path / "run.lock", os.O_RDONLY)
    except (OSError, StorageError):
        return  # no lock that anyone could have
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, owner_of(path)) from None
    finally:
        os.close(handle)


def _watch(path: Path) -> None:
    """Waits for a sign of life of an owner on another machine, whose lock may not reach here.

    Its heartbeat is watched, not compared with the clock: clocks differ, and a job that lost its
    machine is restarted on another one at once.
    """
    owner = owner_of(path)
    if not owner or owner.get("boot", boot_id()) == boot_id():  # then the lock itself decided
        return
    if "beat" in owner:  # an old version has none
        who = _described(owner)
        say(f"{path}: claimed by {who}; waiting {WATCH:.0f} s for a sign of life from there")
        until = time.monotonic() + WATCH
        while time.monotonic() < until:
            time.sleep(POLL)
            if not (later := owner_of(path)):
                return  # it has ended
            if later != owner:
                raise _in_use(path, later)
    warn(f"{path}: no sign of life from {_described(owner)}; this process takes over")


def owner_of(path: Path) -> dict[str, Any]:
    """The owner that run.lock names; {} if there is none."""
    try:
        text = read_regular(path / "run.lock").decode("utf-8", "replace").strip()
    except OSError:
        return {}
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict):
        return tree
    return {"text": text} if text else {}  # of an old version


def _described(owner: dict[str, Any]) -> str:
    if "pid" not in owner:
        return str(owner.get("text", "another process"))[:200]
    return f"process {owner['pid']} on {owner.get('host')} since {owner.get('since')}"


def _in_use(path: Path, owner: dict[str, Any]) -> RunInUseError:
    what = f"in use by {_described(owner)}; wait for it or choose another --out"
    return RunInUseError(f"{path}: {what}")


def _is_same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except OSError:
        return False


def _path_of(folder: int) -> Path | None:
    """The current path of an open folder; None if it is gone."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{folder}"))
    except OSError:
        return None  # not on Linux
    return path if _is_same(path, folder) else None


def boot_id() -> str:
    """Id of this boot of this machine: machines may have the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
