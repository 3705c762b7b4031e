"""``python -m stopmim``, and ``stopmim``."""

import os
import sys

from stopmim.cli import main


def run() -> None:
    """The command that was typed, as a process: its exit code is that of `main`."""
    code = main()
    if "RANK" in os.environ:
        # One of several that trained together. Threads of torch outlive their group; one that asks
        # for Python's lock while Python ends aborts the process, and torchrun trains once more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
