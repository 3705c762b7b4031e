"""The command line: one file per group of commands, run.py for the way in."""

from stopmim.cli.run import main

__all__ = ["main"]
