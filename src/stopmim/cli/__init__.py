"""The command line: one file per group of commands; run.py is the entry point."""

from stopmim.cli.run import main

__all__ = ["main"]
