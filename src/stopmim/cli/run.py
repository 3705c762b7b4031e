"""``stopmim``: parses the command line, calls the command, turns errors into exit codes.

A command parses its options, calls one library function and prints the answer. torch is imported
inside the commands that need it, so that ``--help`` and typos answer at once.
"""

import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from stopmim._version import __version__
from stopmim.base.causes import cause
from stopmim.base.console import as_line, complain, is_first_rank
from stopmim.base.errors import InterruptedRunError, UserError
from stopmim.base.secrets import hide
from stopmim.base.signals import is_interrupted, stopped
from stopmim.cli.benchmarks import Bench
from stopmim.cli.evaluate import Eval
from stopmim.cli.help import Captured, wrapped_help
from stopmim.cli.insight import Analyse, Doctor, Report
from stopmim.cli.options import split_changes
from stopmim.cli.presets import Presets
from stopmim.cli.training import Ablate, Check, Demo, Pack, Pretrain, Repair
from stopmim.cli.weights import Export, Features, Inspect
from stopmim.cli.wrong_input import command_of, one_line

GRACE = 3.0  # seconds for the rank that failed to report why, before the others exit

# In the order of --help; a command has the name of its class, in lower case.
Experiments = Demo | Pretrain | Repair | Ablate | Check | Pack | Eval
Command = Experiments | Doctor | Analyse | Report | Features | Inspect | Export | Bench | Presets
ABOUT = "--version shows the version; --debug, with any command, where an error comes from."
# `eval linear --data`, not `eval protocol:linear --protocol.data`.
FLAT = (OmitArgPrefixes, OmitSubcommandPrefixes)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: see base/errors.py."""
    # Before torch is imported: a lost rank is one line of ours, without a C++ stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("COLUMNS", "LINES"):  # superscripts count as numbers for rich, which then fails
        if not re.fullmatch("[0-9]{,4}", os.environ.get(name, "")):
            del os.environ[name]
    words = [hide(word) for word in (sys.argv[1:] if argv is None else argv)]
    debug = "--debug" in words  # tracebacks instead of one line
    try:
        _need_a_place()
        command = parse([word for word in words if word != "--debug"] or ["--help"])
        return (command() or 0) if command is not None else 0
    except InterruptedRunError as stop:
        return stopped(as_line(str(stop)), stop.exit_code)
    except UserError as error:
        if debug:
            raise
        if is_interrupted():  # the error of a child process, say, that Ctrl-C ended too
            return stopped()
        if str(error):
            complain(error)
        code = error.exit_code
        if not str(error):
            # Wait for the failed rank to report: launchers kill all ranks when one has exited.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
            time.sleep(GRACE)
        return code
    except KeyboardInterrupt:
        return stopped()
    except Exception as error:
        if debug:
            raise
        if is_interrupted():
            return stopped()
        return _unexpected(error)


def _need_a_place() -> None:
    """Refuses a current folder that was deleted: a library of torch would end the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"current folder: {error.strerror}; change to another one") from None


def _unexpected(error: Exception) -> int:
    """Reports an error that no part of the package has a message for; returns the exit code."""
    if known := cause(error):
        complain(known)
        return known.exit_code
    complain(Exception(f"internal error: {type(error).__name__}: {error}; --debug shows where"))
    return 1


def parse(words: list[str]) -> Callable[[], int | None] | None:
    """The command for `words`, or None if they asked for help and got it."""
    if words == ["--version"]:
        print(f"stopmim {__version__}")
        return None
    # eval has its own --data and --seed.
    words, changes = (words, {}) if words[:1] == ["eval"] else split_changes(words)
    stdout, stderr = Captured(sys.stdout), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            command: Any = tyro.cli(
                Command, prog="stopmim", description=ABOUT, args=words, config=FLAT
            )
    except SystemExit as stop:
        if not stop.code:
            print(wrapped_help(stdout.getvalue()), end="")
            return None
        raise UserError(one_line(stderr.getvalue(), words) if is_first_rank() else "") from None
    if changes and not hasattr(command, "changes"):
        raise UserError(f"{command_of(words)}: takes no config key, got --{next(iter(changes))}")
    if changes:
        command.changes.update(changes)
    return command
