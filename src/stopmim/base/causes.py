"""Errors of the system that can come from anywhere, as those that a user can fix."""

import errno

from stopmim.base.errors import ResourceError, StorageError, UserError
from stopmim.base.memory import is_out_of_memory, shortage

LESS_MEMORY = "close other programs, or use fewer images or a smaller network"
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM}


def cause(error: Exception) -> UserError | None:
    """What no part of the package has a message for, with one; None for a bug."""
    if is_out_of_memory(error):
        return ResourceError(f"out of memory: {shortage(error)}; {LESS_MEMORY}")
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceError(f"{error.strerror}: raise the limit with ulimit -n")
    if error.errno in DISK:
        return StorageError(f"{error.filename or 'disk'}: {error.strerror}")
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"{error.strerror}: {error.filename}")
    return None
