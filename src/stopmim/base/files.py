"""Files that survive a crash, and follow no links: JSON lines, and files replaced as a whole.

A line of JSON ends in ``"~": "NUMBER:CRC"``, its place in the file and the CRC-32 of the rest, so
that damaged and missing lines are noticed. Lines of old versions have no check: ``NUMBER/OLD:CRC``
says that the file begins with OLD of them.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from stopmim.base.causes import is_full
from stopmim.base.errors import StorageError

MOST_BYTES = 2**30  # of a file that is read whole, unless its reader allows less
# Of our own files, which may be sparse: a reader takes several times as much memory.
_OWN = {".json": 2**26, ".lock": 2**26, ".jsonl": 2**28}
MOST_LINE = 2**24  # bytes of a line of JSON
NEW = ".new-"  # temporary files begin like this
CHECK = "~"  # the key of the check of a line
_CHECKED = re.compile(rb'(, |\{)"~": "(\d{1,15})(?:/(\d{1,15}))?:([0-9a-f]{8})"\}')
_VALUE = re.compile(r"\d+(/\d+)?:[0-9a-f]{8}")

# ------------------------------------------------------------------------------ JSON lines


class Line(NamedTuple):
    """One line of a file of JSON lines."""

    text: bytes
    tree: dict[str, Any] | None  # without the check; None: damaged
    number: int | None = None  # its place in the file; None without a check
    old: int = 0  # lines without a check at the beginning of the file


def parse_jsonl(path: Path) -> list[Line]:
    """The lines of `path`, damaged ones too: a kill can leave a torn one at the end."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror}") from None
    # Converted line endings are no damage.
    found = (text.removesuffix(b"\r") for text in data.split(b"\n"))
    lines = [_parse(text) for text in found if text.strip()]
    left = max((line.old for line in lines if line.number is not None), default=len(lines))
    for i, line in enumerate(lines):
        if line.tree is not None and line.number is None:
            left -= 1
            if left < 0:  # its check was lost by damage
                lines[i] = Line(line.text, None)
    return lines


def _parse(text: bytes) -> Line:
    if len(text) > MOST_LINE:
        return Line(text, None)
    found = _CHECKED.fullmatch(text, max(0, text.rfind(b'"~"') - 2))
    if found:
        text_before = text[: found.start()] + (b"}" if found[1] == b", " else b"{}")
        if zlib.crc32(text_before) != int(found[4], 16):
            return Line(text, None)
    try:
        tree = json.loads((text_before if found else text).decode())
    except (ValueError, RecursionError):
        return Line(text, None)
    if not isinstance(tree, dict):
        return Line(text, None)
    if found:
        return Line(text, tree, int(found[2]), int(found[3] or 0))
    # Tells a check with a damaged key or value from no check.
    last = next(reversed(tree.values()), None)
    torn = CHECK in tree or (isinstance(last, str) and _VALUE.fullmatch(last))
    return Line(text, None if torn else tree)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the intact lines of `path`."""
    return (line.tree for line in parse_jsonl(path) if line.tree is not None)


class Count(NamedTuple):
    """Numbers of damaged and missing lines of a file, and the numbers for the next check."""

    damaged: int
    missing: int
    following: int  # the number of the next line
    old: int  # lines without a check


def count_lines(lines: Sequence[Line], expected: int = 0) -> Count:
    """Counts the lines of a file that had `expected` of them, or more."""
    damaged = missing = following = old = 0
    for line in lines:
        damaged += line.tree is None
        old += line.tree is not None and line.number is None
        if line.number is not None:
            missing += max(0, line.number - following)
            following = max(following, line.number)
        following += 1
    missing += max(0, expected - following)
    return Count(damaged, missing, max(following, expected), old)


def checked(tree: dict[str, Any], number: int, old: int = 0) -> str:
    """The line of JSON for `tree`, with its check."""
    text = json.dumps(tree)
    begin = text[:-1] + (", " if tree else "")
    place = f"{number}/{old}" if old else str(number)
    return f'{begin}"{CHECK}": "{place}:{zlib.crc32(text.encode()):08x}"}}\n'


def append_jsonl(path: Path, *trees: dict[str, Any], count: Count | None = None) -> None:
    """Appends lines in one write: a kill leaves either none or all of them.

    Without the `count` of the existing lines, they are counted, while other processes that do so,
    or rewrite the file, wait.
    """
    with open(open_to_append(path, lock=count is None), "ab+", buffering=0) as file:
        known = count or count_lines(parse_jsonl(path))
        lines = [checked(tree, known.following + i, known.old) for i, tree in enumerate(trees)]
        # If a full disk tore the last line, start a new one: this line must stay readable.
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        begin = "" if file.read() in (b"", b"\n") else "\n"
        data = (begin + "".join(lines)).encode()
        while data:  # a disk with room for only a part writes that part
            data = data[file.write(data) :]


def open_to_append(path: Path, *, lock: bool = True) -> int:
    """A descriptor of the file of lines at `path`, with `lock` exclusive until it is closed.

    A hard link is replaced by a copy: the other name may be anybody's file, or a backup's.
    """
    while True:
        handle = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            status = os.fstat(handle)
            if os.path.samestat(status, os.stat(path)):
                if status.st_nlink == 1:
                    return handle
                write_whole(path, read_regular(path))
        os.close(handle)  # it was replaced, here or by another process


def number(value: object) -> float | None:
    """`value` if it is a finite number: a line of JSON can hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # JSON has integers of any length
        return None


# ------------------------------------------------------------------------------ whole files


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of the regular file `path`; StorageError for a link, a pipe or a device.

    A received run directory may hold links to files of the person who unpacks it.
    """
    try:
        # Without O_NONBLOCK, a pipe would block forever.
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return handle


def _not_regular(path: Path) -> StorageError:
    what = "a link" if path.is_symlink() else "not a regular file"
    return StorageError(f"{path}: is {what}, so nothing is written to it; remove it or move it")


def open_to_read(path: str | bytes | Path, limit: int = MOST_BYTES) -> BufferedReader:
    """Opens a regular file of at most `limit` bytes; OSError for any other.

    A pipe would block forever, a device such as /dev/zero never ends, and any name may link there.
    """
    return open(_opened(path, limit)[0], "rb")


def holes(file: BufferedReader) -> int:
    """Bytes of a sparse file that take no room on the disk, if the file system can tell."""
    size, at, found = os.fstat(file.fileno()).st_size, 0, 0
    try:
        while at < size:
            data = file.seek(at, os.SEEK_DATA)
            found += data - at
            at = file.seek(data, os.SEEK_HOLE)
    except OSError as error:
        found += size - at if error.errno == errno.ENXIO else 0  # no data after `at`
    file.seek(0)
    return found


def read_regular(path: str | bytes | Path, limit: int | None = None) -> bytes:
    """The bytes of a file that `open_to_read` opens; the default limit depends on the suffix."""
    if limit is None:
        limit = _OWN.get(os.path.splitext(os.fsdecode(path))[1], MOST_BYTES)
    handle, size = _opened(path, limit)
    try:
        data = os.read(handle, size)  # no more than that, even if the file grows meanwhile
        while len(data) < size and (more := os.read(handle, size - len(data))):
            data += more
        return data
    finally:
        os.close(handle)


def _opened(path: str | bytes | Path, limit: int) -> tuple[int, int]:
    """A descriptor of a regular file, and its size."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte
        raise OSError(errno.EINVAL, "not a file name", os.fsdecode(path)) from None
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size <= limit:
        return handle, status.st_size
    os.close(handle)
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
    raise OSError(errno.EFBIG, f"more than {limit} bytes", os.fsdecode(path))


@contextlib.contextmanager
def replaced(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yields a new file beside `path` to write to, or a new folder, which then takes its place.

    Readers see the old content or the new, also after a crash. If `path` is a link, it is replaced,
    not followed, and nobody can prepare a link with the temporary name. Leftovers of killed
    processes beside it are removed. A folder can only replace an empty folder.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # root would replace /dev/null
            raise StorageError(f"{path}: is a device or a pipe, so it is not replaced; name a file")
        if not path.name:  # "", or "/"
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        sweep(path.parent)
        handle, temporary = _beside(path, folder)
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            remove(temporary)
            raise
        finally:
            os.close(handle)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror or error}") from None
    except Exception as error:  # writers of tensors have their own errors
        if not is_full(error):
            raise
        raise StorageError(f"{path}: cannot write: no room on the disk") from None


def _beside(path: Path, folder: bool) -> tuple[int, Path]:
    """Makes a file or folder beside `path`, locked while its descriptor is open: see `sweep`."""
    suffix = path.suffix if len(path.suffix) < 16 else ""  # decides the format of some writers
    while True:
        temporary = path.with_name(f"{NEW}{secrets.token_hex(8)}{suffix}")
        if folder:
            temporary.mkdir(parents=True)
        flags = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
        handle = os.open(temporary, flags | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if temporary.exists():
            return handle, temporary
        os.close(handle)  # another process swept it before it was locked


def write_whole(path: Path, text: str | bytes) -> None:
    """Replaces the file atomically: readers see the old text or the new, also after a crash."""
    with replaced(path) as temporary:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)
        sync(temporary)


def leftovers(folder: Path) -> Iterator[Path]:
    """Yields temporary files and folders of killed processes: no other process locks them."""
    for path in folder.glob(f"{NEW}*"):
        with contextlib.suppress(OSError):  # neither waits for a pipe nor follows a link
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(path, flags)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            finally:
                os.close(handle)


def sweep(folder: Path) -> None:
    """Removes leftovers of killed processes from `folder`."""
    for path in leftovers(folder):
        remove(path)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder, as far as that is possible."""
    with contextlib.suppress(OSError, RecursionError):  # a hostile folder may be too deep
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def own_folder(path: Path) -> Path:
    """Creates the folder `path` of a run if need be; refuses a link, which may lead anywhere."""
    if path.is_symlink():
        raise StorageError(f"{path}: is a link, so nothing is written there; name the folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
    return path


def sync(path: Path) -> None:
    """Waits until the file or folder `path` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
