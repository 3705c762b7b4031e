"""Turns errors of the system, which can come from anywhere, into errors that a user can fix."""

import errno
import re

from safetensors import SafetensorError

from stopmim.base.errors import ResourceError, StorageError, UserError
from stopmim.base.memory import is_out_of_memory, shortage

LESS_MEMORY = "close other programs, or use fewer images or a smaller network"
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM}

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch.save's message in place of the system's error: it wrote less than it wanted to.
_CUT = re.compile(r"inline_container.*unexpected pos|PytorchStreamWriter failed writing", re.S)


def is_full(error: BaseException) -> bool:
    """Whether `error` means that the disk is full, whichever library wrote."""
    if isinstance(error, SafetensorError):
        found = re.search(r"\(os error (\d+)\)", str(error))
        return found is not None and int(found[1]) in FULL
    if isinstance(error, OSError):
        return error.errno in FULL
    return isinstance(error, RuntimeError) and _CUT.search(str(error)) is not None


def cause(error: Exception) -> UserError | None:
    """A UserError with a message for an `error` that nobody handled; None for a bug."""
    if is_out_of_memory(error):
        return ResourceError(f"out of memory: {shortage(error)}; {LESS_MEMORY}")
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceError(f"{error.strerror}: raise the limit with ulimit -n")
    if "No usable temporary directory" in str(error):  # of Python, which torch asks for as well
        return StorageError("no folder for temporary files can be written to: set TMPDIR to one")
    if error.errno in DISK:
        return StorageError(f"{error.filename or 'disk'}: {error.strerror}")
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"{error.strerror}: {error.filename}")
    return None
