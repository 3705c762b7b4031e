"""A run directory: its files, and how a run begins or resumes there.

run.json         id, config, data, versions, git state, device: see identity.py
run.lock         who writes to it now: see lock.py
metrics.jsonl    one line per logged step
checkpoints/     see checkpoint.py
bad_files.jsonl  images that could not be read, each once
results.jsonl    one line per evaluation
hashes.jsonl     content of every image, written by `stopmim check --against`
damaged/         what `stopmim repair` has moved away
report.html      written by `stopmim report`
"""

import functools
import json
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import numpy as np
import torch

from stopmim._version import __version__
from stopmim.base.console import say, warn
from stopmim.base.errors import CheckpointError, DataError, StorageError, UserError
from stopmim.base.files import append_jsonl, read_jsonl, remove, sweep, write_whole
from stopmim.base.secrets import hide
from stopmim.config.schema import Config
from stopmim.data.checks.hashes import digests
from stopmim.data.loading import Reader
from stopmim.data.order import evenly_spaced
from stopmim.method.encoder import ImageEncoder
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint
from stopmim.runs.identity import begun, changed_key, read_about, sealed
from stopmim.runs.lock import now
from stopmim.runs.logs import lost_lines
from stopmim.runs.verdict import in_percent

SAMPLE = 64  # images whose content is compared on every resume


@dataclass(frozen=True, init=False)
class Run:
    """A run on disk, as `pretrain` returns it."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def about(self) -> dict[str, Any]:
        """`run.json`."""
        return read_about(self.path)

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

    @property
    def lost_lines(self) -> list[str]:
        """Damaged and missing lines of the logs, a description per log."""
        logged = [checkpoint.lines_logged(path) for path in checkpoint.steps(self.path)[-1:]]
        lost = [lost_lines(self.path / "metrics.jsonl", *logged)]
        lost += [lost_lines(self.path / name) for name in ("results.jsonl", "bad_files.jsonl")]
        return [line for line in lost if line]

    def model(self) -> MaskedImageModel:
        return checkpoint.load_model(self.path)

    def encoder(self, branch: Literal["target", "context"] = "target") -> ImageEncoder:
        return self.model().branch(branch)

    def add_result(self, **result: Any) -> None:
        append_jsonl(self.path / "results.jsonl", result)


def begin(
    path: Path, config: Config, source: str, reader: Reader, device: torch.device, ranks: int = 1
) -> None:
    """Writes run.json; for an existing run, checks that it is the same and records the restart."""
    images, start = reader.images, _start(config, device, ranks)
    sweep(path)  # under the lock
    file, saved = path / "run.json", any(_folder_to_save_to(path).glob("step-*"))
    about = begun(path) if file.exists() else None
    new = config.model_dump(mode="json")
    changed = changed_key(about["config"], new) if about else None
    is_other = about is not None and about["data"]["fingerprint"] != images.fingerprint
    if about and not saved and (changed or is_other):
        bad = path / "bad_files.jsonl"  # of the other images
        if config.data.skip and Path(config.data.skip).resolve() == bad.resolve():
            raise UserError(
                f"{bad}: data.skip is the list of this run itself; choose another --out"
            )
        say(f"{path}: starts over with another config or other images; nothing had been saved")
        file.unlink()
        remove(bad)
        about = None
    if about:
        if changed:
            key, old, value = changed
            raise UserError(
                f"{path}: this run has another config: {key}: {old!r} -> {value!r}; "
                f"set it back to resume, or choose another --out"
            )
        data = about["data"]
        if is_other:
            raise DataError(
                f"{path}: these are not the images this run began with: {data['images']} from "
                f"{data['source']} then, {len(images)} from {source} now; choose another --out"
            )
        _same_content(path, data.get("sample"), reader)
        about["starts"].append(start)
    elif saved:
        what = f"restore it with stopmim repair {quote(str(path))}, or choose another --out"
        raise CheckpointError(f"{path}: has checkpoints but no run.json; {what}")
    else:
        data = {"source": source, "images": len(images), "fingerprint": images.fingerprint}
        data["sample"] = digests(reader, evenly_spaced(len(images), SAMPLE))
        about = {"id": secrets.token_hex(8), "config": new, "data": data}
        about = sealed(json.loads(json.dumps(about | {"starts": [start]})))
    write_whole(file, json.dumps(about, indent=1))


def _start(config: Config, device: torch.device, ranks: int) -> dict[str, Any]:
    """Facts about this start of the run, for run.json."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"stopmim": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {
        "time": now(),
        "host": socket.gethostname(),
        "command": [hide(word) for word in sys.argv],
        "device": chip,
        "processes": ranks,
        "threads": torch.get_num_threads(),
        "runtime": config.runtime.model_dump(mode="json"),
        "versions": {**versions, "python": platform.python_version()},
        "git": git_state(),
    }


def _folder_to_save_to(path: Path) -> Path:
    """The folder of checkpoints; raises an early error if nothing could be saved or loaded."""
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:  # safetensors writes such a file, and cannot read it
        raise UserError(f"{path}: the name is not UTF-8; choose another --out") from None
    folder = path / "checkpoints"
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        what = f"is no folder to save to; remove it, or see stopmim repair {quote(str(path))}"
        raise StorageError(f"{folder}: {what}")
    return folder


def _same_content(path: Path, sample: object, reader: Reader) -> None:
    """Raises DataError if images of the `sample` that was read at the first start have changed."""
    if not isinstance(sample, dict):  # of an old version
        return
    digits = {i: x for i, x in sample.items() if re.fullmatch("[0-9]{1,15}", i)}
    known = {int(i): x for i, x in digits.items() if int(i) < len(reader.images)}
    found = digests(reader, list(known))
    if found and (gone := sorted(known.keys() - found.keys())):
        name = reader.images.name(gone[0])
        warn(
            f"{path}: {len(gone)} of {len(known)} sampled images could be read at the first start "
            f"and no longer can, such as {name}; training replaces them"
        )
    changed = [i for i, digest in found.items() if known[i] != digest]
    if changed:
        compare = f"stopmim check DATA --against {quote(str(path))}"
        raise DataError(
            f"{path}: {len(changed)} of {len(found)} sampled images have changed since the first "
            f"start, such as {reader.images.name(changed[0])}; put them back, or choose another "
            f"--out; {compare} compares all"
        )


def set_threads(path: Path, wanted: int | None) -> None:
    """Sets torch's threads; a resumed run keeps the first number, as sums round differently."""
    if wanted is None and (path / "run.json").exists():
        wanted = begun(path)["starts"][0]["threads"]
    if wanted is not None:
        torch.set_num_threads(wanted)


@functools.cache  # a process runs the code that it has imported
def git_state() -> str | None:
    """Commit of this package's source, with a + if tracked files have changed since.

    None if git does not track this file, as in a .venv inside another repository.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        # Untracked files do not count: the run itself may be one of them.
        is_changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if is_changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
