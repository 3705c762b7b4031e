"""The command line: one file per group of commands."""

from stopmim.cli.commands import main

__all__ = ["main"]
