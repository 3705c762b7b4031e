"""Little memory, for real: allocations of this process fail."""

import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """Leaves this process `more` bytes of address space beyond those that it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
