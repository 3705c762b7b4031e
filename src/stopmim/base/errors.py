"""Errors that a user can fix, each with its exit code on the command line.

A message is one line: what is wrong, where, what was got, what to do. Misuse of the library by its
caller is a ValueError; anything else that escapes is a bug (exit code 1).
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


def check_least(options: object, **least: float) -> None:
    """Raises a UserError if a field of `options` is below its least value."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and not value >= low:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {low} or more")


class DataError(UserError):
    """No images, too many broken images, or not the images that the run started with."""

    exit_code = 3


class NoPartError(DataError):
    """A data source without the requested training or test split."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, hostile, or of another model."""

    exit_code = 4


class StorageError(UserError):
    """The disk is full, read-only, or missing."""

    exit_code = 5


class NonFiniteError(UserError):
    """The loss or a gradient is not finite."""

    exit_code = 6


class ResourceError(UserError):
    """Out of memory, or a worker or another rank is lost."""

    exit_code = 7


class RunInUseError(UserError):
    """Another process is writing to this run directory."""

    exit_code = 8


class RowsFailedError(UserError):
    """Some runs of an ablation failed; its table has the others."""

    exit_code = 9


class InterruptedRunError(UserError):
    """A signal ended the run after a clean save; the same command resumes it."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(f"{message}; run the same command to resume")
        self.exit_code = 128 + signal_number
