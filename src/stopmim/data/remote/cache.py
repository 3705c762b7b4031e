"""Copies of remote files on the local disk, shared by all processes, within a budget.

They are in ``remote/`` of the cache directory (see index_cache.py), or ``$STOPMIM_REMOTE_CACHE``,
and take ``$STOPMIM_REMOTE_GB`` gigabytes. A file is fetched under another name and then renamed, so
a copy is whole or absent; a kill leaves the beginning of it, which the next process completes. A
copy in use is locked (flock); the least recently used ones make room for others. Names are hashes:
nothing that a server says becomes a path.

The checksum of a file is recorded when it is first fetched. Other bytes at the same URL later are
an error that names it, because a run could not be resumed with them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import IO, Any, NamedTuple

from stopmim.base.console import warn
from stopmim.base.errors import StorageError, UserError, setting
from stopmim.base.files import read_regular, write_whole
from stopmim.data import index_cache
from stopmim.data.decode import MAX_BYTES
from stopmim.data.remote.attempt import About, MissingError, RemoteError
from stopmim.data.remote.fetch import fetch, look, patience

DEFAULT_GB = 50.0
WRONG = 3  # wrong checksums in a row before it fails: one transfer may be damaged, but not all
MOST_RECORD = 1_000_000  # bytes of a file that records a fetched one
POLL = 0.05  # seconds between looks at a file that another process fetches


UNKNOWN = About(-1, "")


class Remote(NamedTuple):
    """A remote file, with the facts known before it is fetched."""

    url: str  # as shown
    about: About = UNKNOWN
    sha256: str = ""  # if it is known from an index

    @property
    def is_single(self) -> bool:
        """Whether it is a single image, whose size is asked for late and not recorded."""
        return self.about == UNKNOWN

    @property
    def key(self) -> str:
        return hashlib.sha256(self.url.encode()).hexdigest()[:40]

    @property
    def state(self) -> tuple[int, int]:
        """Size and version as numbers, like `images.file_state` of a local file."""
        version = hashlib.sha256((self.sha256 or self.about.version).encode()).digest()
        return self.about.size, int.from_bytes(version[:7], "big")


class Held:
    """A copy that cannot be evicted until it is closed, or this process ends."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        _held.add(self)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    __del__ = close


_held: weakref.WeakSet[Held] = weakref.WeakSet()


def _release_in_child() -> None:
    """Closes inherited locks: a worker must not keep what its parent has released."""
    for held in list(_held):
        held.close()


os.register_at_fork(after_in_child=_release_in_child)


def folder() -> Path:
    if own := os.environ.get("STOPMIM_REMOTE_CACHE"):
        return Path(own)
    if (base := index_cache.folder()) is None:
        raise UserError("images at URLs need room for copies: set STOPMIM_REMOTE_CACHE to a folder")
    return base / "remote"


def budget() -> int:
    """Bytes that all copies together may take."""
    return int(setting("STOPMIM_REMOTE_GB", DEFAULT_GB, "gigabytes") * 1e9)


def hold(remote: Remote) -> Held:
    """A local copy of the file, fetched if there is none."""
    place, keep = folder(), True
    path = place / remote.key[:2] / f"{remote.key}-{remote.state[1]:014x}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            if held := _open(path, remote.about.size):
                return held
            if remote.is_single:
                remote, keep = remote._replace(about=look_at_image(remote.url)), False
            if remote.about.size > budget():
                what = f"{remote.about.size} bytes, more than the budget of {budget()} bytes"
                raise RemoteError(f"{remote.url}: {what}; raise STOPMIM_REMOTE_GB")
            with _part(path, remote) as part:
                if part and not path.exists():
                    _make_room(place, remote.about.size)
                    _complete(remote, part, keep)
                    os.replace(part.name, path)
    except OSError as error:
        raise StorageError(
            f"{place}: cannot keep copies of remote files here: {error.strerror}; set "
            f"STOPMIM_REMOTE_CACHE to another folder"
        ) from None


def _open(path: Path, size: int) -> Held | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    held = Held(str(path), descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    status = os.fstat(descriptor)
    # Evicted just now, or cut by a crash of the machine.
    if not status.st_nlink or size not in (status.st_size, UNKNOWN.size):
        held.close()
        if status.st_nlink:
            path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):  # of another user
        os.utime(descriptor)  # the time of its last use
    return held


@contextlib.contextmanager
def _unlocked_after(file: IO[bytes]) -> Iterator[None]:
    """Releases the lock explicitly: a worker forked meanwhile keeps the file open."""
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def _part(path: Path, remote: Remote) -> Iterator[BufferedRandom | None]:
    """The unfinished copy, locked; None if another process has just finished it."""
    name = path.with_name(f"{path.name}-{remote.about.size}.part")
    with open(name, "ab+") as part, _unlocked_after(part):
        seen, since = -1, time.monotonic()
        while True:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another process fetches it, and gives up by itself
                if not _has_name(part, name):
                    break  # it is complete, and held: as long as that lasts
                if seen != (seen := os.fstat(part.fileno()).st_size):
                    since = time.monotonic()
                if time.monotonic() - since > 2 * patience():
                    what = f"another process has been fetching it for {2 * patience():.0f} s"
                    raise RemoteError(f"{remote.url}: {what} without a byte") from None
                time.sleep(POLL)
        yield part if _has_name(part, name) else None


def _has_name(file: IO[bytes], name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except FileNotFoundError:
        return False


def _complete(remote: Remote, part: BufferedRandom, keep: bool) -> None:
    """Fetches the rest of a file and compares its checksum; `keep`: records it, if it is new."""
    if not keep:
        fetch(remote.url, remote.about, part)
        return
    known = remote.sha256 or (recorded(remote.url) or {}).get("sha256", "")
    for _ in range(WRONG):
        fetch(remote.url, remote.about, part)
        part.seek(0)
        found = hashlib.file_digest(part, "sha256").hexdigest()
        if not known:
            record = _record(remote.url)
            record.parent.mkdir(parents=True, exist_ok=True)
            about = {"url": remote.url, "bytes": remote.about.size, "sha256": found}
            write_whole(record, json.dumps(about))
        if found == (known or found):
            return
        part.truncate(0)
    if remote.sha256:
        what = f"its bytes have another checksum than index.json states, {WRONG} times over"
        raise RemoteError(f"{remote.url}: {what}; changed or damaged where it is")
    raise changed(remote.url, "other bytes")


def look_at_image(url: str) -> About:
    about = look(url)
    if about.size > MAX_BYTES:
        raise MissingError(f"{url}: more than {MAX_BYTES} bytes")
    return about


def recorded(url: str) -> dict[str, Any] | None:
    """URL, bytes and sha256 of a file when it was first fetched here; None if it never was."""
    try:
        about = json.loads(read_regular(_record(url), MOST_RECORD))
    except (OSError, ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) else None


def changed(url: str, how: str) -> RemoteError:
    what = f"changed since it was first fetched here: {how}"
    return RemoteError(f"{url}: {what}; if that is intended, delete {_record(url)}")


def _record(url: str) -> Path:
    return folder() / "sums" / f"{Remote(url).key}.json"


# ------------------------------------------------------------------------------ the budget


_slack = 0  # bytes that this process may add before it counts again
_full = False  # whether the budget was exceeded, with a warning


def _make_room(place: Path, size: int) -> None:
    """Evicts the least recently used copies, unfinished ones too, until the rest fit the budget."""
    global _slack, _full
    _slack -= size
    if _slack >= 0:
        return
    limit = budget()
    with open(place / "lock", "ab") as lock, _unlocked_after(lock):  # one at a time counts
        fcntl.flock(lock, fcntl.LOCK_EX)
        copies = sorted(_copies(place))
        over = sum(taken for _, taken, _ in copies) - limit
        for _, taken, path in copies:
            if over <= 0:
                break
            over -= taken if _evict(path) else 0
    _slack = min(-over, limit // 50)  # others do not see what this process adds
    if over > 0 and not _full:
        _full = True
        what = f"the copies in use take {(limit + over) / 1e9:.1f} GB, more than the budget"
        warn(f"{place}: {what} of {limit / 1e9:g} GB; raise STOPMIM_REMOTE_GB")


def _copies(place: Path) -> Iterator[tuple[float, int, Path]]:
    """Last use, bytes, and path of every copy; an unfinished one counts in full."""
    for path in place.glob("??/*"):
        with contextlib.suppress(OSError, ValueError):
            status, unfinished = path.stat(), path.name.endswith(".part")
            size = int(path.stem.rpartition("-")[2]) if unfinished else status.st_size
            yield status.st_mtime, size, path


def _evict(path: Path) -> bool:
    """Removes a copy, unless it is in use."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


# ------------------------------------------------------------------------------ many files


class RemoteFiles(Sequence[str]):
    """Paths of local copies of remote files. Indexing fetches the file if there is no copy.

    Each thread holds the copy that it used last; `hold` holds others.
    """

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self.remotes = list(remotes)

    def __len__(self) -> int:
        return len(self.remotes)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]  # never sliced
        held: Held | None = getattr(_last, "held", None)
        if held is None or not held.is_open or _last.remote != self.remotes[i]:
            held = _last.held = hold(self.remotes[i])
            _last.remote = self.remotes[i]
        return held.path


_last = threading.local()  # held: the copy; remote: its file
