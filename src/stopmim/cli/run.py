"""``stopmim``: parses the command line, calls the command, turns errors into exit codes.

A command parses its options, calls one library function and prints the answer. torch is imported
inside the commands that need it, so that ``--help`` and typos answer at once.
"""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from stopmim._version import __version__
from stopmim.base.console import is_first_rank
from stopmim.base.errors import InterruptedRunError, ResourceError, UserError
from stopmim.base.memory import is_out_of_memory, shortage
from stopmim.base.secrets import hide, shown
from stopmim.base.signals import is_interrupted, stopped
from stopmim.cli.benchmarks import Bench
from stopmim.cli.evaluate import Eval
from stopmim.cli.insight import Analyse, Doctor, Report
from stopmim.cli.options import split_changes
from stopmim.cli.presets import Presets
from stopmim.cli.training import Ablate, Check, Demo, Pack, Pretrain
from stopmim.cli.weights import Export, Features, Inspect
from stopmim.cli.wrong_input import one_line, printable

LESS_MEMORY = "close other programs, or use fewer images or a smaller network"
GRACE = 3.0  # seconds for the rank that failed to report why, before the others exit

# The order is that of --help; a command is called like its class, in lower case.
Experiments = Demo | Pretrain | Ablate | Check | Pack | Eval
Command = Experiments | Doctor | Analyse | Report | Features | Inspect | Export | Bench | Presets
# `eval linear --data`, not `eval protocol:linear --protocol.data`.
FLAT = (OmitArgPrefixes, OmitSubcommandPrefixes)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: see base/errors.py."""
    # Before torch is imported: a lost rank is one line of ours, without a C++ stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = [hide(word) for word in (sys.argv[1:] if argv is None else argv)]
    debug = "--debug" in words  # tracebacks instead of one line
    try:
        command = parse([word for word in words if word != "--debug"] or ["--help"])
        return (command() or 0) if command is not None else 0
    except InterruptedRunError as stop:
        return stopped(printable(str(stop)), stop.exit_code)
    except UserError as error:
        if debug:
            raise
        if is_interrupted():  # as of a process that Ctrl-C ended too
            return stopped()
        for line in str(error).splitlines():
            print(f"stopmim: error: {printable(line)}", file=sys.stderr)
        code = error.exit_code
        if not str(error):
            # Wait for the failed rank to report: launchers kill all ranks when one has exited.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
            time.sleep(GRACE)
        return code
    except KeyboardInterrupt:
        return stopped()
    except BrokenPipeError:  # `stopmim ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        if is_interrupted():
            return stopped()
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """Reports an error that no part of the package has a message for; returns the exit code."""
    if is_out_of_memory(error):
        text = printable(shortage(error))
        print(f"stopmim: error: out of memory: {text}; {LESS_MEMORY}", file=sys.stderr)
        return ResourceError.exit_code
    text = printable(shown(f"{type(error).__name__}: {error}"))
    print(f"stopmim: error: internal error: {text}; --debug shows where", file=sys.stderr)
    return 1


def parse(words: list[str]) -> Callable[[], int | None] | None:
    """The command for `words`, or None if they asked for help and got it."""
    if words == ["--version"]:
        print(f"stopmim {__version__}")
        return None
    # eval has its own --data and --seed.
    words, changes = (words, {}) if words[:1] == ["eval"] else split_changes(words)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            command: Any = tyro.cli(Command, prog="stopmim", args=words, config=FLAT)
    except SystemExit as stop:
        if not stop.code:
            return None
        raise UserError(one_line(stderr.getvalue(), words) if is_first_rank() else "") from None
    if changes and not hasattr(command, "changes"):
        raise UserError(f"{words[0]}: takes no config key, got --{next(iter(changes))}")
    if changes:
        command.changes.update(changes)
    return command
