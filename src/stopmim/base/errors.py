"""Errors that a user can fix, each with its exit code on the command line.

A message is one line: what is wrong, where, what was got, what to do. Misuse of the library by its
caller is a ValueError; anything else that escapes is a bug (exit code 1).
"""

import difflib
import os
from collections.abc import Iterable

LARGEST = 2**53  # number that is asked for; no system waits longer or holds more


def did_you_mean(word: str, names: Iterable[str], prefix: str = "") -> str:
    """Did-you-mean hint for the closest of `names`, to put before the rest of a message, or ""."""
    near = difflib.get_close_matches(word, list(names), 1)
    return f'did you mean "{prefix}{near[0]}"? ' if near else ""


class UserError(Exception):
    """A configuration or usage that cannot work; several messages are several mistakes."""

    exit_code = 2

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))

    def __init_subclass__(cls, code: int | None = None) -> None:
        cls.exit_code = code or cls.exit_code


def check_least(options: object, **least: float) -> None:
    """Raises a UserError if a field of `options` is below its least value, or above LARGEST."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= LARGEST:
            expected = f"at most {LARGEST}" if value > LARGEST else f"{low} or more"
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {expected}")


def setting(variable: str, default: float, unit: str = "seconds") -> float:
    """A number above 0 from an environment variable."""
    text = os.environ.get(variable) or str(default)
    try:
        if 0 < (value := float(text)) <= LARGEST:
            return value
    except ValueError:
        pass
    raise UserError(f"{variable}: expected {unit} above 0, got {text!r}")


class DataError(UserError, code=3):
    """No images, too many broken images, or other images than the run started with."""


class NoPartError(DataError):
    """A data source without the requested training or test split."""


class CheckpointError(UserError, code=4):
    """A checkpoint that is missing, damaged, hostile, or of another model or run."""


class StorageError(UserError, code=5):
    """The disk is full, read-only, or missing, or a run directory is not where it was."""


class NonFiniteError(UserError, code=6):
    """The loss, a gradient or a weight is not finite."""


class ResourceError(UserError, code=7):
    """Out of memory, or a worker or another rank is lost."""


class RunInUseError(UserError, code=8):
    """Another process is writing to this run directory."""


class RowsFailedError(UserError, code=9):
    """Some runs of an ablation failed; its table has the others."""


class InterruptedRunError(UserError):
    """A signal ended the run after a clean save; the same command resumes it."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(f"{message}; the same command continues")
        self.exit_code = 128 + signal_number
