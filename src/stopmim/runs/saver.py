"""Writes the checkpoints of a run while it trains: atomically, in a thread.

A checkpoint is written to a temporary folder, synced and renamed, so that a kill never leaves half
of one. If the run directory was moved or removed meanwhile, the run ends after a save to where it
is now, or to a new directory beside it.
"""

import errno
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from threading import Thread
from typing import Any
from uuid import uuid4

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stopmim._version import __version__
from stopmim.base.console import warn
from stopmim.base.errors import NonFiniteError, StorageError
from stopmim.base.faults import faultpoint
from stopmim.base.files import remove, sync, write_whole
from stopmim.config.schema import Config
from stopmim.gpu.copies import cloned, has_room, on_host
from stopmim.gpu.sharding import is_sharded
from stopmim.runs import shards
from stopmim.runs.checkpoint import (
    FORMAT,
    TEMPORARY,
    State,
    first_not_finite,
    gathered,
    live,
    prune,
    sha256,
    sweep,
)
from stopmim.runs.identity import About, about_if_any, binding
from stopmim.runs.lock import Place, place_of
from stopmim.runs.logs import Log
from stopmim.runs.shards import Staged

SECONDS = 600.0  # between two checkpoints, unless `runtime.save_every` says how many updates
SAVES_TO_FAIL = 3  # failed saves in a row, for example on a full disk, that end a run


@dataclass
class Saver:
    """Saves the checkpoints of a run while it trains; survives a disk that is full for a while.

    `save` copies the state on its device, which is quick. A thread brings the copy to the host and
    writes it, one at a time. Training waits for the last save of a run, and for every save if
    tensors are sharded or a copy does not fit into memory.
    """

    run: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    config: Config
    writes: bool = True  # one rank writes; the others take part in gathering sharded tensors
    guard: Tensor | None = None  # state of train.guard
    failed: int = 0  # failed saves in a row
    log: Log | None = None  # metrics.jsonl: a checkpoint records how many lines it had

    about: About = field(init=False)  # run.json, which a checkpoint is bound to
    thread: Thread | None = field(init=False, default=None)  # writes the last checkpoint
    step: int = field(init=False, default=0)  # of the last checkpoint
    error: BaseException | None = field(init=False, default=None)  # that the thread met
    began: float = field(init=False, default_factory=time.monotonic)  # the last save, or training
    roomy: bool = field(init=False, default=False)  # a copy has fitted into memory
    staged: Staged | None = field(init=False, default=None)  # pieces that other ranks have written

    def __post_init__(self) -> None:
        self.about = about_if_any(self.run) if self.writes else {}

    @property
    def is_due(self) -> bool:
        """Whether the clock asks for a save; never if `runtime.save_every` is a number."""
        by_clock = self.config.runtime.save_every is None and self.thread is None
        return by_clock and time.monotonic() - self.began >= SECONDS

    def save(self, step: int, *, final: bool) -> None:
        """Saves the state after `step`, in the background unless it is `final`.

        Raises:
            StorageError: a final save failed, or the run directory was moved or removed.
        """
        self.finish()
        self.step, self.began = step, time.monotonic()
        # Before ranks write their pieces: nothing may be written where the run no longer is.
        place = place_of(self.run)
        where = self.run if place.path == self.run else self._elsewhere(place)
        states = live(self.model, self.optimizer)
        if sharded := any(map(is_sharded, states[0].values())):
            if self.config.runtime.checkpoints == "sharded":
                states = shards.local(states)
                self.staged = shards.stage(where, states, first_not_finite(states[0]))
            else:
                states = gathered(self.model, self.optimizer, keep=self.writes)
        if not self.writes:
            return
        copy = None if final or sharded or place.problem else self._copy(states)
        faultpoint("save.copied")
        scaler = self.scaler.state_dict() if self.scaler else None
        about = {"step": step, "config": self.config.model_dump(mode="json"), "scaler": scaler}
        about |= {"run": binding(self.about)}
        about |= {"logged": self.log.logged} if self.log else {}
        about |= {} if self.guard is None else {"guard": self.guard.tolist()}
        os.umask(mask := os.umask(0))  # not in the thread: it changes for the whole process
        device = next(iter(states[0].values())).device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        what = (where, copy or states, ready, about, 0o666 & ~mask)
        self.thread = Thread(target=self._work, args=what, name="save")
        self.thread.start()
        if place.problem:
            self._leave(place, where)
        if copy is None:
            try:
                self.finish(final=final)
            except StorageError:
                if sharded or not place_of(self.run).problem:  # other ranks have continued
                    raise
                self.save(step, final=final)  # the run was moved or removed during the save

    def _elsewhere(self, place: Place) -> Path:
        """The folder to save to: where the run was moved to, or a new one beside its old path.

        If its parent is gone too, the new one is in the nearest folder above that exists.
        """
        if place.path is not None:
            return place.path
        near = next(filter(Path.is_dir, self.run.parents), self.run.parent)
        try:
            made = tempfile.mkdtemp(prefix=f"{self.run.name}.rescued-", dir=near)
            write_whole(Path(made, "run.json"), json.dumps(self.about, indent=1))
        except (OSError, StorageError) as error:
            what = f"{place.problem}, and nothing could be saved beside it: {error}"
            raise StorageError(what) from None
        return Path(made)

    def _leave(self, place: Place, where: Path) -> None:
        """Ends a run whose directory is no longer where it was, after the save to `where`."""
        try:
            self.finish(final=True)
        except StorageError as error:
            raise StorageError(f"{place.problem}; {error}") from None
        if self.log:
            self.log.move(where)
        how = (
            "the same command continues"
            if where == self.run
            else f"continue with --out {quote(str(where))}"
        )
        raise StorageError(f"{place.problem}; saved step {self.step} in {where}: {how}")

    def finish(self, *, final: bool = False, wait: bool = True) -> None:
        """Waits for the save in flight, and warns if it failed; without `wait`, only if it is over.

        Raises:
            StorageError: it failed, and is `final` or the third in a row.
        """
        if self.thread is None or (self.thread.is_alive() and not wait):
            return
        self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error is None:
            self.failed = 0
            return
        if not isinstance(error, OSError | safetensors.SafetensorError):
            raise error
        self.failed += 1
        what = f"{self.run}: the checkpoint of step {self.step} could not be written: {error}"
        if final or self.failed == SAVES_TO_FAIL:
            raise StorageError(f"{what}; make room and run the same command again") from None
        warn(f"{what}; training continues")

    def close(self) -> None:
        """Waits for the save in flight when a run fails otherwise; warns if the save fails too."""
        try:
            self.finish()
        except Exception as error:
            warn(str(error))

    def _copy(self, states: tuple[State, State]) -> tuple[State, State] | None:
        """Copies on the same device, or None if memory has no room for them."""
        tensors = [x for state in states for x in state.values()]
        device = tensors[0].device
        # torch keeps the memory of the last copy on a GPU, so less seems free than is.
        if not (self.roomy and device.type == "cuda") and not has_room(tensors, device):
            return None
        weights, slots = map(cloned, states)
        if weights is None or slots is None:
            return None
        self.roomy = True
        return weights, slots

    def _work(self, *what: Any) -> None:
        """Body of the thread; `finish` deals with its error in the thread that trains."""
        try:
            self._write(*what)
        except BaseException as error:
            self.error = error

    def _write(
        self,
        run: Path,
        states: tuple[State, State],
        ready: torch.cuda.Event | None,
        about: dict[str, Any],
        mode: int,
    ) -> None:
        """Writes a checkpoint into `run`, then removes all but the newest `runtime.keep`."""
        folder, step = run / "checkpoints", about["step"]
        temporary = folder / f"{TEMPORARY}{step:08d}-{uuid4().hex}"
        sweep(run)
        folder.mkdir(exist_ok=True)  # not `run` itself: if it is gone, somebody has removed it
        temporary.mkdir()
        try:
            faultpoint("save.begin")
            if self.staged:
                if self.staged.bad:
                    raise _not_finite(run, step, self.staged.bad)
                self.staged.move_to(temporary)
                faultpoint("save.staged")
            for name, state in zip(("model", "optimizer"), states, strict=True):
                tensors = on_host(state, ready)
                if name == "model" and (bad := first_not_finite(tensors)):
                    raise _not_finite(run, step, bad)
                faultpoint("save.host")
                save_file(tensors, temporary / f"{name}.safetensors")
                faultpoint(f"save.{name}")
            (temporary / "state.json").write_text(json.dumps(about, indent=1))
            sums = {
                path.name: {"sha256": sha256(path), "bytes": path.stat().st_size}
                for path in sorted(temporary.iterdir())
            }
            faultpoint("save.hashed")
            number = FORMAT if self.staged else 1
            manifest = {"format": number, "stopmim": __version__, "step": step, "files": sums}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in temporary.iterdir():
                path.chmod(mode)  # safetensors creates files with mode 0600
                sync(path)
            self._place(run, temporary, folder / f"step-{step:08d}")
        except BaseException:
            remove(temporary)
            raise
        faultpoint("save.renamed")
        prune(folder / f"step-{step:08d}", self.config.runtime.keep)

    def _place(self, run: Path, temporary: Path, final: Path) -> None:
        """Gives a complete checkpoint its name."""
        sync(temporary)
        faultpoint("save.synced")
        if run == self.run and place_of(run).path != run:
            raise OSError(errno.ESTALE, "the run directory is another one than before")
        if final.exists() or final.is_symlink():  # damaged, or the run would have resumed from it
            os.rename(final, aside := final.with_name(f"{TEMPORARY}{uuid4().hex}"))
            remove(aside)
        os.rename(temporary, final)
        faultpoint("save.moved")
        sync(final.parent)


def _not_finite(run: Path, step: int, name: str) -> NonFiniteError:
    return NonFiniteError(
        f"{run}: the weights are not finite at step {step}, as {name}; nothing was saved, the last "
        f"checkpoint is intact; lower --optim.lr, or set --optim.clip_grad 1, in a new run"
    )
