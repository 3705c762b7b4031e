"""Copies metrics.jsonl to TensorBoard or W&B; metrics.jsonl stays the record.

A mirror is a convenience: an error in its library becomes one warning, and the run continues
without it. A thread of its own calls the library, which may block: W&B talks to a process.
"""

import contextlib
import hashlib
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from stopmim.base.console import warn
from stopmim.base.errors import UserError
from stopmim.base.files import number, own_folder, remove
from stopmim.base.waiting import within
from stopmim.runs.run import Run

Kind = Literal["none", "tensorboard", "wandb"]
Line = Mapping[str, Any]
Opened = AbstractContextManager[Callable[[Line], None]]

OPENING = 60.0  # seconds that a run waits for the library before its first update
CLOSING = 5.0  # and after its last
MOST_LINES = 1_000  # that may wait for the library


@contextlib.contextmanager
def mirror(kind: Kind, path: Path, step: int) -> Iterator[Callable[[Line], None]]:
    """Yields the function to call with every new line; `step` is where the run resumes.

    Writes to RUN/tensorboard, RUN/wandb or nowhere, and is closed however the run ends.
    """
    if kind == "none":
        yield lambda line: None
        return
    # The old lines are read here: the thread might find new ones among them.
    opened = _wandb(path, Run(path).metrics) if kind == "wandb" else _tensorboard(path, step)
    copy = _Copy(kind)
    failed = True
    try:
        copy.open(opened)
        yield copy.show
        failed = False
    finally:
        copy.close(failed)


class _RunFailedError(Exception):
    """Tells a library that the run failed."""


class _Copy:
    """A thread that hands lines to a library, and its state as the training thread sees it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.lines: queue.Queue[Line | None] = queue.Queue(MOST_LINES)  # None: the end
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.failed = self.dropped = False

    def open(self, opened: Opened) -> None:
        """Waits a while for the library; raises UserError if the user has to do something."""
        self.thread = threading.Thread(target=self._run, args=[opened], name="mirror", daemon=True)
        self.thread.start()
        self.ready.wait(OPENING)
        if isinstance(self.error, ImportError):
            what = f'{self.kind} is not installed; pip install "stopmim[{self.kind}]"'
            self.dropped = True
            raise UserError(f"runtime.mirror: {what}")
        if isinstance(self.error, UserError):
            self.dropped = True
            raise self.error

    def _run(self, opened: Opened) -> None:
        try:
            with contextlib.suppress(_RunFailedError), opened as write:
                self.ready.set()
                while (line := self.lines.get()) is not None:
                    write(line)
                if self.failed:
                    raise _RunFailedError
        except BaseException as error:  # a library that calls exit would end the thread silently
            self.error = error
        finally:
            self.ready.set()

    def show(self, line: Line) -> None:
        """Hands over a line, or warns once that the library takes no more."""
        if self.dropped:
            return
        try:
            self.lines.put_nowait(line)
        except queue.Full:
            self._drop(f"{MOST_LINES:,} lines wait for it")
        if self.error:
            self._drop(f"{type(self.error).__name__}: {self.error}")

    def close(self, failed: bool) -> None:
        """Waits a while for the remaining lines to be written."""
        if not self.dropped:
            self.failed = failed
            with contextlib.suppress(queue.Full):  # then the thread does not end either
                self.lines.put_nowait(None)
            self.thread.join(CLOSING)
            if self.error:
                self._drop(f"{type(self.error).__name__}: {self.error}")
            elif self.thread.is_alive():
                self._drop(f"does not end within {CLOSING:g} s")
        if self.dropped and self.kind == "wandb":
            with contextlib.suppress(TimeoutError):
                within(1, _leave_wandb)
            _end_stopped()

    def _drop(self, why: str) -> None:
        if not self.dropped:
            warn(f"runtime.mirror: {self.kind}: {why}; the run continues without it")
        self.dropped = True


def _scalars(line: Line) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the step and the numbers of a line; the untrained network has step 0.

    A line of a received metrics.jsonl can hold anything.
    """
    for step, values in ((0, line.get("random_init")), (line.get("step"), line)):
        if type(step) is int and 0 <= step < 2**63 and isinstance(values, Mapping):
            found = {name: number(value) for name, value in values.items() if name != "step"}
            yield step, {name: value for name, value in found.items() if value is not None}


@contextlib.contextmanager
def _tensorboard(path: Path, step: int) -> Iterator[Callable[[Line], None]]:
    """Writes the file itself: a SummaryWriter that fails prints the traceback of its thread."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
    place = own_folder(path / "tensorboard") / name
    with open(place, "xb") as file:
        writer = RecordWriter(file)

        def add(**facts: Any) -> None:
            writer.write(Event(wall_time=time.time(), **facts).SerializeToString())

        def write(line: Line) -> None:
            for at, values in _scalars(line):
                shown = [Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
                add(step=at, summary=Summary(value=shown))
            file.flush()
            if not place.exists():
                raise FileNotFoundError(f"{place} is gone")

        add(file_version="brain.Event:2")
        # Purges what an earlier start wrote after `step`.
        add(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        file.flush()
        yield write


@contextlib.contextmanager
def _wandb(path: Path, lines: list[dict[str, Any]]) -> Iterator[Callable[[Line], None]]:
    """Always offline: the user may call `wandb sync RUN/wandb/offline-run-*`."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # read at import: no telemetry
    import wandb

    run = Run(path)
    # The first start is recorded before the first update, so a run keeps its id for life.
    first = json.dumps(run.about["starts"][0], sort_keys=True)
    name = hashlib.sha256(first.encode()).hexdigest()[:8]
    # A .wandb file cannot be truncated to where the run resumes, so it is written again.
    for old in own_folder(path / "wandb").glob(f"offline-run-*-{name}"):
        remove(old)
    settings = wandb.Settings(
        mode="offline",
        silent=True,
        show_errors=False,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    about = {"id": name, "name": path.resolve().name, "config": run.about["config"]}
    shown = wandb.init(project="stopmim", dir=str(path), settings=settings, **about)
    wandb.termsetup(settings, None)  # `init` keeps the environment's; errors are raised anyway

    def write(line: Line) -> None:
        for at, values in _scalars(line):
            shown.log(values, step=at)

    for line in lines:
        write(line)
    try:
        yield write
    except _RunFailedError:
        shown.finish(exit_code=1)
    else:
        shown.finish(exit_code=0)


def _leave_wandb() -> None:
    """Detaches a W&B process that may never answer: W&B would wait for it when Python exits."""
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.termsetup(wandb.Settings(show_errors=False), None)  # our warning said it already
        wandb.teardown()


def _end_stopped() -> None:
    """Kills stopped W&B processes that this process has started: nothing else would end them."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # the process has just ended
            name, _, rest = file.read_text().rpartition(")")
            state, parent, *_ = rest.split()
            if "(wandb" in name and state == "T" and int(parent) == os.getpid():
                os.kill(int(file.parent.name), signal.SIGKILL)
