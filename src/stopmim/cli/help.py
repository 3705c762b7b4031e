"""Help texts at the width of the terminal: tyro wraps its boxes, but not what is above them."""

import io
import shutil
import textwrap
from itertools import takewhile
from typing import TextIO

CORNERS = ("\u256d", "+--")  # of tyro's boxes, in Unicode and in ASCII


class Captured(io.StringIO):
    """Text for `stream`, on which tyro's choice of colours and box characters depends."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def isatty(self) -> bool:
        return self.stream.isatty()


def wrapped_help(text: str) -> str:
    """`text` with its usage and description wrapped, which come before the first box."""
    usage, *lines = text.splitlines()
    about = list(takewhile(lambda line: not any(corner in line for corner in CORNERS), lines))
    if len(usage) > shutil.get_terminal_size().columns:
        usage = usage.replace(",", ", ")  # it may break between commands
    return "\n".join([_wrap(usage, " " * 7), *map(_wrap, about), *lines[len(about) :], ""])


def _wrap(line: str, indent: str = "") -> str:
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
