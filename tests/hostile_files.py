"""Hostile files of every kind that a command reads, and a process that shows them to commands.

`every()` lists `Hostile`: a name, a function that writes the file or folder, what it pretends
to be, and the exit codes that are right for it. `Hostile.commands` are the command lines that read
it. A use of it looks like this:

    prepare(root)                        # once: a good encoder, a preset, a run, images
    with Commands(root) as commands:     # a process that forks one more for each command line
        for one in every():
            path = one.at(root)          # writes it
            for name, words in one.commands(path).items():
                answer = commands.run(words)
                assert not problems(one, answer)
    assert not (root / CANARY).exists()  # nothing was executed

The bars are `SECONDS` and `MEMORY` beyond an idle process; `problems` checks them, and that there
is one short line, the right code, and no process left. All paths are relative to `root`.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import hostile_data
import hostile_runs
import hostile_texts
import hostile_weights
from limits import limit_memory
from stopmim.base.console import MISTAKES

Write = Callable[[Path], object]

CANARY = hostile_weights.CANARY
SECONDS = 20.0  # for a command, of processor time
BUSY = 12  # times as long by the clock, since others may use the machine as well
MEMORY = 10**9  # bytes beyond an idle process, at the peak of the largest process of a command
LONGEST, LINES = 700, 40  # characters of a line, and lines: progress and warnings are some
SCENES = "scenes:40:24"  # what the good run is trained on
DATA, FINE, PRESET, RUN = "images", "fine.safetensors", "tiny.yaml", "run"  # see `prepare`

# Command lines by the kind of file that they read; FILE is the file, OUT a new name.
_EVAL = ["--device", "cpu", "--random-inits", "1"]
_TRAIN = ["--preset", PRESET]
_READS_WEIGHTS = {
    "inspect": ["inspect", "FILE"],
    "export": ["export", "FILE", "--to", "safetensors", "--out", "OUT"],
    "features": ["features", "scenes:4:16", "--encoder", "FILE", "--out", "OUT.npz"],
    "knn": ["eval", "knn", "FILE", "--data", "scenes:40:16", *_EVAL],
    "finetune": ["eval", "finetune", "FILE", "--data", "scenes:40:16", *_EVAL],
    "compare": ["eval", "compare", "random:vit_micro8@16", "FILE", "--data", "scenes:40:16"],
    "suite": ["eval", "suite", "FILE", "--data", "scenes:40:16", *_EVAL],
    "tracking": ["eval", "tracking", "FILE", "--videos", "scenes:1:16", "--device", "cpu"],
    "doctor": ["doctor", "FILE", "--data", "scenes:40:16"],
    "init": ["pretrain", "scenes:16:24", *_TRAIN, "--init", "FILE", "--out", "OUT"],
}
_READS_RUNS = {
    **{name: _READS_WEIGHTS[name] for name in ("inspect", "export", "features", "knn", "init")},
    "report": ["report", "FILE", "--out", "OUT.html"],
    "doctor": ["doctor", "FILE"],
    "analyse": ["analyse", "noise", "FILE", "--out", "OUT"],
    "resume": ["pretrain", SCENES, *_TRAIN, "--out", "FILE"],  # last: it may write there
}
_READS_DATA = {
    "check": ["check", "FILE", "--preset", PRESET],
    "pretrain": ["pretrain", "FILE", *_TRAIN, "--optim.epochs", "1", "--out", "OUT"],
    "features": ["features", "FILE", "--encoder", FINE, "--out", "OUT.npz"],
    "knn": ["eval", "knn", FINE, "--data", "FILE", "--hold-out", "0.2", *_EVAL],
}
COMMANDS: dict[str, dict[str, list[str]]] = {
    "weights": _READS_WEIGHTS,
    "run": _READS_RUNS,
    "data": _READS_DATA,
    "videos": {
        "tracking": ["eval", "tracking", FINE, "--videos", "FILE", "--device", "cpu"],
        "suite": ["eval", "suite", FINE, "--data", "scenes:40:16", "--videos", "FILE", *_EVAL],
    },
    "skip list": {
        "features": ["features", DATA, *_READS_DATA["features"][2:], "--skip", "FILE"],
        "pretrain": ["pretrain", DATA, *_TRAIN, "--data.skip", "FILE", "--out", "OUT"],
    },
    "name list": {
        "lowshot": ["eval", "lowshot", FINE, "--data", "scenes:40:16", "--list", "FILE", *_EVAL],
    },
    "preset": {
        "dry run": ["pretrain", SCENES, "--preset", "FILE", "--dry-run"],
        "check": ["check", DATA, "--preset", "FILE"],
    },
    "table": {"ablate": ["ablate", "FILE", "--preset", PRESET, "--dry-run", "--out", "OUT"]},
    "records": {"page": ["ablate", "--page", "FILE"]},
}

# Right answers by kind. 0 and the codes of `doctor`: what is damaged may not matter to a command.
_DOCTOR = {0, 10, 11, 12, 13}
CODES = {
    "weights": {4},
    "run": {3, 4, 5} | _DOCTOR,
    "data": {0, 3},
    "videos": {0, 2, 3},
    "skip list": {3},
    "name list": {3},
    "preset": {0, 2},
    "table": {0, 2},
    "records": {0, 2},
}


# Files that some commands can use in part, or refuse by their name alone.
ALSO: dict[str, set[int]] = {
    "float8 in a decoder.safetensors": {0},
    "n" * 300 + ".pth": {2},
    "é" * 200 + ".safetensors": {2},
    "run with a million scenes": {7},
}


@dataclass(frozen=True)
class Hostile:
    """A file or folder that pretends to be of a `kind`."""

    name: str  # of the file, and unlike all others
    write: Write  # at a path that does not exist
    kind: str  # a key of COMMANDS
    codes: frozenset[int]  # right answers of any command that reads it

    def at(self, root: Path) -> str:
        """Writes it below `root` and returns its name there."""
        self.write(root / self.name)
        return self.name

    def commands(self, path: str) -> dict[str, list[str]]:
        """Command lines that read `path`, by name."""
        return {
            name: [word.replace("FILE", path) if word == "FILE" else _out(word, path, name)
                   for word in words]
            for name, words in COMMANDS[self.kind].items()
        }  # fmt: skip


def _out(word: str, path: str, command: str) -> str:
    """OUT as a name of its own for every file and command."""
    own = "".join(c for c in path[:60] if c.isalnum())
    return word.replace("OUT", f"out-{own}-{command}") if word.startswith("OUT") else word


@cache
def every() -> tuple[Hostile, ...]:
    """All of them."""
    found: dict[str, dict[str, Write]] = {
        "weights": hostile_weights.weights(),
        "run": hostile_runs.runs(),
        **hostile_data.data(),
        **hostile_texts.texts(),
    }
    return tuple(
        Hostile(name, write, kind, frozenset(CODES[kind] | ALSO.get(name, set())))
        for kind, writers in found.items()
        for name, write in writers.items()
    )


def prepare(root: Path) -> None:
    """Writes what the commands need besides: an encoder, a preset, a run and images."""
    from tiny import write_folder

    root.mkdir(parents=True, exist_ok=True)
    hostile_weights.write_fine(root / FINE)
    write_folder(root / DATA)
    shutil.copyfile(hostile_runs.preset(), root / PRESET)
    shutil.copytree(hostile_runs.finished(), root / RUN)


# ------------------------------------------------------------------------------ the commands


@dataclass(frozen=True)
class Answer:
    """What became of a command."""

    words: list[str]
    code: int  # negative: ended by this signal
    out: str
    err: str
    seconds: float  # as a clock has it
    memory: int  # bytes at the peak of its largest process, beyond those of an idle one
    left: bool  # it left a process behind
    cpu: float | None = None  # seconds of its processes, if known: the same on a busy machine


def problems(one: Hostile, answer: Answer) -> list[str]:
    """What is wrong with an answer to a hostile file; empty if nothing is."""
    lines = answer.err.splitlines()
    said = [line for line in lines if line.startswith("stopmim: error: ")]
    failed = answer.code not in _DOCTOR
    seconds = answer.seconds if answer.cpu is None else answer.cpu
    # A config may have several mistakes, with a line for each of the first.
    mistakes = MISTAKES + 1 if one.kind in ("preset", "table") else 1
    found = {
        f"exit code {answer.code}": answer.code not in one.codes,
        f"{answer.seconds:.1f} s": seconds > SECONDS or answer.seconds > BUSY * SECONDS,
        f"{answer.memory / 1e6:.0f} MB": answer.memory > MEMORY,
        f"{len(said)} lines of errors": not failed <= len(said) <= failed * mistakes,
        f"a line of {max(map(len, lines), default=0)}": any(len(x) > LONGEST for x in lines),
        f"{len(lines)} lines": len(lines) > LINES,
        "a traceback": "Traceback" in answer.err,
        "an internal error": "internal error" in answer.err,
        "a process is left": answer.left,
    }
    return [what for what, is_so in found.items() if is_so]


class Commands(contextlib.AbstractContextManager["Commands"]):
    """A process in the folder `root` that has imported everything and forks for each command."""

    def __init__(
        self, root: Path, seconds: float = BUSY * SECONDS + 5, memory: int = 3 * MEMORY
    ) -> None:
        """A command is killed after `seconds`; none gets more than `memory` more address space."""
        tests = Path(__file__).parent
        path = os.pathsep.join([str(tests), str(tests.parent / "src"), *sys.path])
        words = [sys.executable, __file__, str(seconds), str(memory)]
        self.process = subprocess.Popen(
            words, cwd=root, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, words: list[str]) -> Answer:
        pipe_in, pipe_out = self.process.stdin, self.process.stdout
        assert pipe_in
        assert pipe_out
        print(json.dumps(words), file=pipe_in, flush=True)
        return Answer(**json.loads(pipe_out.readline()))

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def __enter__(self) -> Self:
        return self


IMPORTED = (
    *("ablations.run", "evals.compare", "evals.feature_files", "evals.suite", "evals.table"),
    *("health.doctor", "insight.analyse", "insight.report.page", "train.advice", "train.loop"),
    "weights.export",
)


def serve(seconds: float, memory: int) -> None:
    """Main loop of that process: words in, answers out."""
    from stopmim.cli import main

    for name in IMPORTED:  # once, rather than by every command
        importlib.import_module(f"stopmim.{name}")
    with contextlib.redirect_stderr(io.StringIO()):
        main(["eval", "nothing"])  # the parser of the command line is slow at first
    gc.freeze()  # to collect garbage would copy all memory to every process

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a command leaves comes here
    base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def child(words: list[str]) -> None:
        os.setsid()  # its processes are a group of their own
        for number, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        limit_memory(memory)
        code = 1
        try:
            code = main(words)
        except BaseException as error:  # as the interpreter would
            print(f"Traceback: {error!r}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    for line in sys.stdin:
        words, begin = json.loads(line), time.monotonic()
        pid = os.fork()
        if not pid:
            child(words)
        while not (done := os.wait4(pid, os.WNOHANG))[0]:
            if time.monotonic() - begin > seconds:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.005)
        answer: dict[str, Any] = {"words": words, "code": os.waitstatus_to_exitcode(done[1])}
        answer["seconds"] = time.monotonic() - begin
        answer["cpu"] = done[2].ru_utime + done[2].ru_stime
        answer["memory"] = max(0, done[2].ru_maxrss * 1024 - base)
        answer["left"] = _left(pid)
        for name in ("out", "err"):
            answer[name] = Path(f".{name}").read_text("utf-8", "backslashreplace")[:2_000_000]
        print(json.dumps(answer), flush=True)


def _left(group: int) -> bool:
    """Whether a process of `group` goes on; it is ended. One that is just ending gets a moment.

    On a busy machine, to give back gigabytes takes seconds.
    """
    for _ in range(250):
        try:
            if not os.waitpid(-group, os.WNOHANG)[0]:
                time.sleep(0.02)
        except ChildProcessError:
            return False
    os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)
    return True


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
