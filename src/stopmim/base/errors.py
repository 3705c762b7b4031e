"""Mistakes a user can mend, each with the exit code the command line ends with.

A message is one line that says what is wrong, where, what was got, and what to do. A caller's
mistake inside the library is a ValueError; anything else that escapes is a bug (exit code 1).
"""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, names: Iterable[str], prefix: str = "") -> str:
    """Did-you-mean hint for the closest of `names`, to go before the rest of a message, or ""."""
    near = difflib.get_close_matches(word, list(names), 1)
    return f'did you mean "{prefix}{near[0]}"?; ' if near else ""


class UserError(Exception):
    """A configuration or usage that cannot work."""

    exit_code = 2


class DataError(UserError):
    """No images, too many broken images, or other images than the run began with."""

    exit_code = 3


class NoPartError(DataError):
    """A source without the part to train on, or to test on, that was asked for."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, hostile, or made for another model."""

    exit_code = 4


class StorageError(UserError):
    """The disk is full, read-only, or not there."""

    exit_code = 5


class NonFiniteError(UserError):
    """The loss or a gradient is no longer a number."""

    exit_code = 6


class ResourceError(UserError):
    """Out of memory, a worker process was killed, or another rank is gone."""

    exit_code = 7


class RunInUseError(UserError):
    """Another process is writing to this run directory."""

    exit_code = 8


class InterruptedRunError(UserError):
    """A signal ended the run after a clean save; the same command goes on with it."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(f"{message}; run the same command to go on")
        self.exit_code = 128 + signal_number


class RowsFailedError(UserError):
    """Runs of an ablation failed; its table has the others."""

    exit_code = 9
