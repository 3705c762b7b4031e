"""``python -m stopmim``, and ``stopmim``."""

import contextlib
import os
import sys

from stopmim.base import signals, streams

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def run() -> None:
    """Runs the command of this process, and exits with its exit code."""
    is_given = COMPILED in os.environ
    streams.prepare()
    try:
        signals.answer()  # before the imports, which take seconds on a cold disk
        from stopmim.cli import main

        code = main() or streams.lost_output()
    except BaseException:
        if not signals.is_interrupted():
            raise
        code = signals.stopped()
    if not is_given:
        with contextlib.suppress(KeyError, OSError):  # unless it holds something
            os.rmdir(os.environ[COMPILED])  # torch makes it in TMPDIR, whether it compiles or not
    if "RANK" in os.environ or code in signals.STOPPED_CODES:
        # As a rank: threads of torch outlive their group, and one that asks for Python's lock while
        # Python exits aborts the process, so that torchrun restarts it. After a signal: modules may
        # be half imported, and their clean-up need not be waited for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
