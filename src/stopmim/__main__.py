"""``python -m stopmim``, and ``stopmim``."""

import os
import sys

from stopmim.base import signals, streams


def run() -> None:
    """The command that was typed, as a process: its exit code is that of `main`."""
    streams.prepare()
    try:
        signals.answer()  # before the imports, which take seconds on a cold disk
        from stopmim.cli import main

        code = main() or streams.lost_output()
    except BaseException:
        if not signals.is_interrupted():
            raise
        code = signals.stopped()
    if "RANK" in os.environ or code in signals.STOPPED_CODES:
        # A rank: threads of torch outlive their group; one that asks for Python's lock while Python
        # ends aborts the process, and torchrun trains once more. After a signal: modules may be
        # half imported, and nobody wants to wait for their end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
