"""A run directory: its files, the lock on it, and how it stays readable after a crash.

run.json         config, data, versions, git state, device; written before the first update
metrics.jsonl    one line per logged step
checkpoints/     see checkpoint.py
bad_files.jsonl  images that could not be read, each once
results.jsonl    one line per evaluation
report.html      written by `stopmim report`
"""

import contextlib
import datetime
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from stopmim._version import __version__
from stopmim.base.console import warn
from stopmim.base.errors import CheckpointError, DataError, RunInUseError, StorageError, UserError
from stopmim.base.files import append_jsonl, read_jsonl, write_whole
from stopmim.base.secrets import hide
from stopmim.config.schema import Config, flatten
from stopmim.data.images import Images
from stopmim.method.encoder import ImageEncoder
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint
from stopmim.runs.verdict import in_percent


@dataclass(frozen=True, init=False)
class Run:
    """A run on disk, as `pretrain` returns it."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def about(self) -> dict[str, Any]:
        """`run.json`."""
        try:
            tree = json.loads((self.path / "run.json").read_bytes())
            if isinstance(tree, dict):
                return tree
            why = "run.json holds no object"
        except FileNotFoundError:
            why = "there is no run.json in it" if self.path.is_dir() else "no such folder"
        except (OSError, ValueError) as error:
            why = f"run.json: {error}"
        raise CheckpointError(f"{self.path}: not a run directory: {why}")

    @property
    def config(self) -> Config:
        try:
            return Config.model_validate_json(json.dumps(self.about["config"]))
        except (ValueError, KeyError, TypeError) as error:
            what = (
                f"no config that stopmim {__version__} knows: {' '.join(str(error).split())[:200]}"
            )
            raise CheckpointError(f"{self.path / 'run.json'}: {what}") from None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path / "metrics.jsonl"))

    @property
    def results(self) -> list[dict[str, Any]]:
        """The lines of results.jsonl, in percent whichever version wrote them."""
        return [in_percent(line) for line in read_jsonl(self.path / "results.jsonl")]

    @property
    def checkpoint(self) -> Path:
        """The newest intact checkpoint."""
        return checkpoint.newest_intact(self.path)

    def model(self) -> MaskedImageModel:
        return checkpoint.load_model(self.checkpoint)

    def encoder(self, branch: Literal["target", "context"] = "target") -> ImageEncoder:
        return self.model().branch(branch)

    def add_result(self, **result: Any) -> None:
        append_jsonl(self.path / "results.jsonl", result)


_locks: set[FileIO] = set()  # of the runs that this process has claimed


def _release_in_child() -> None:
    """Closes inherited locks: a worker that outlives a killed parent must not hold them."""
    for handle in _locks:
        handle.close()


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Locks the run directory `path`; raises StorageError or RunInUseError if it cannot."""
    lock = path / "run.lock"
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = lock.open("ab+", buffering=0)  # so that closing it writes nothing
    except OSError as error:
        raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().decode("utf-8", "replace").strip() or "another process"
            what = f"in use by {owner}; wait for it or choose another --out"
            raise RunInUseError(f"{path}: {what}") from None
        except OSError as error:  # a file system without locks
            what = f"cannot lock this file: {error.strerror}; choose --out on another disk"
            raise StorageError(f"{lock}: {what}") from None
        if not os.fstat(handle.fileno()).st_nlink:  # its last owner has just deleted the file
            what = "was in use by a process that has just ended; run the same command again"
            raise RunInUseError(f"{path}: {what}")
        owner = f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n"
        try:
            handle.truncate(0)
            handle.write(owner.encode())
        except OSError as error:  # a full disk
            raise StorageError(f"{path}: cannot write here: {error.strerror}") from None
        _locks.add(handle)
        try:
            yield  # the lock ends with the process, however that ends
        finally:
            _locks.remove(handle)
            if not (path / "run.json").exists():  # the run never started: leave no trace
                lock.unlink()
                with contextlib.suppress(OSError):
                    path.rmdir()


def begin(
    path: Path, config: Config, source: str, images: Images, device: torch.device, ranks: int = 1
) -> None:
    """Writes run.json, or checks that the run there is this one and records the restart."""
    file = path / "run.json"
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"stopmim": __version__, "torch": torch.__version__, "numpy": np.__version__}
    start = {
        "time": _now(),
        "host": socket.gethostname(),
        "command": [hide(word) for word in sys.argv],
        "device": chip,
        "processes": ranks,
        "threads": torch.get_num_threads(),
        "runtime": config.runtime.model_dump(mode="json"),
        "versions": {**versions, "python": platform.python_version()},
        "git": git_state(),
    }
    data = {"source": source, "images": len(images), "fingerprint": images.fingerprint}
    if file.exists():
        about = begun(path)
        _same_config(path, about["config"], config)
        if (old := about["data"])["fingerprint"] != images.fingerprint:
            raise DataError(
                f"{path}: these are not the images this run began with: {old['images']} from "
                f"{old['source']} then, {len(images)} from {source} now; choose another --out"
            )
        about["starts"].append(start)
    elif any((path / "checkpoints").glob("step-*")):
        raise CheckpointError(f"{path}: has checkpoints but no run.json; choose another --out")
    else:
        about = {"config": config.model_dump(mode="json"), "data": data, "starts": [start]}
    write_whole(file, json.dumps(about, indent=1))


def begun(path: Path) -> dict[str, Any]:
    """run.json, checked to have what a resumed run needs."""
    about = Run(path).about
    match about:
        case {
            "config": {},
            "data": {"source": _, "images": int(), "fingerprint": _},
            "starts": [{"threads": int()}, *_],
        }:
            return about
    raise CheckpointError(f"{path}: not a run directory: run.json is not as stopmim writes it")


def _same_config(path: Path, old: dict[str, Any], config: Config) -> None:
    """Raises UserError for a changed key; only `runtime.*` and `data.max_bad` may change."""
    default, now = (dict(flatten(one.model_dump(mode="json"))) for one in (Config(), config))
    before = default | dict(flatten(old))  # an old run.json may lack newer keys
    for key in before.keys() | now.keys():
        free = key.startswith("runtime.") or key == "data.max_bad"
        if not free and before.get(key) != now.get(key):
            raise UserError(
                f"{path}: this run has another config: {key}: {before.get(key)!r} -> "
                f"{now.get(key)!r}; set it back to resume, or choose another --out"
            )


def set_threads(path: Path, wanted: int | None) -> None:
    """Sets torch's threads; a resumed run keeps the first number, as sums round differently."""
    if wanted is None and (path / "run.json").exists():
        wanted = begun(path)["starts"][0]["threads"]
    if wanted is not None:
        torch.set_num_threads(wanted)


class Lines:
    """A growing .jsonl file. Lines that do not fit on a full disk wait for the next call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[dict[str, Any]] = []

    def write(self, *lines: dict[str, Any]) -> None:
        is_first_failure = not self.waiting
        self.waiting += lines
        try:
            while self.waiting:
                append_jsonl(self.path, self.waiting[0])
                del self.waiting[0]
        except OSError as error:
            if is_first_failure:
                warn(f"{self.path}: cannot write: {error.strerror}; will try again")


class Metrics(Lines):
    """metrics.jsonl, truncated to the step that a run resumes at."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path / "metrics.jsonl")
        kept = [line for line in read_jsonl(self.path) if line["step"] <= step]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))


class BadFiles(Lines):
    """bad_files.jsonl: every unreadable image once; too many of them end the run."""

    def __init__(self, path: Path, total: int, share: float) -> None:
        super().__init__(path / "bad_files.jsonl")
        self.total, self.share = total, share
        self.names = {line["name"] for line in read_jsonl(self.path)}

    def add(self, bad: list[tuple[str, str]], *, usable: bool) -> None:
        """Records the bad images of a batch; not `usable`: one could not be replaced either."""
        new = {name: reason for name, reason in bad if name not in self.names}
        self.names |= new.keys()
        self.write(*({"name": name, "reason": reason} for name, reason in new.items()))
        if bad and (not usable or len(self.names) > self.share * self.total):
            name, reason = bad[-1]
            raise DataError(
                f"{len(self.names)} of {self.total} images cannot be read, such as {name}: "
                f"{reason}; raise --data.max_bad to continue, or leave them out of a new run with "
                f"--data.skip {self.path}"
            )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def git_state() -> str | None:
    """Commit of this package's source, with a + if tracked files have changed since.

    None where git does not track this file, as in a .venv inside another repository.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        # Untracked files do not count: the run itself may lie in there.
        is_changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if is_changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
