"""Fetches files at URLs to local files, through fsspec, and copes with bad networks.

A broken transfer resumes where it ended, after a pause that the server asks for, or else one that
doubles each time and is partly random. A request is repeated if nothing arrives for `stall()`
seconds. The file is given up after `patience()` seconds without a single new byte. Whatever a
server sends, no more than the stated size of the file is written.
"""

import io
import os
import random
import time
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from stopmim.base.console import warn
from stopmim.base.errors import setting
from stopmim.base.secrets import shown
from stopmim.data.remote.attempt import About, AgainError, RemoteError, find, opened

FIRST_WAIT, LONGEST_WAIT = 0.2, 60.0  # seconds between attempts
START_PATIENCE = 60.0  # seconds for the first answer: a wrong name should not take minutes
QUIET = 5.0  # seconds of trouble before it is mentioned

T = TypeVar("T")


def patience() -> float:
    """Seconds without a byte, over all attempts, after which a file is given up."""
    return setting("STOPMIM_REMOTE_PATIENCE", 600.0)


def look(url: str) -> About:
    """Asks for the size and the version of a file; a DataError names it if there is none."""

    def ask() -> About:
        with opened(url, 0, 1) as answer:
            return answer.about

    return _first_answer(url, ask)


def _first_answer(url: str, ask: Callable[[], T]) -> T:
    trouble = Trouble(url, min(START_PATIENCE, patience()))
    while True:
        try:
            return ask()
        except AgainError as error:
            trouble.wait(error)


def fetch(url: str, about: About, file: BinaryIO) -> None:
    """Completes `file`, which may hold the beginning already."""
    trouble = Trouble(url, patience())
    while (at := file.seek(0, os.SEEK_END)) < about.size:
        try:
            with opened(url, at, None) as answer:
                _same(url, about, answer.about)
                if answer.start != at:  # a server that knows no ranges begins again
                    at = 0
                    file.truncate(0)
                while at < about.size and (block := answer.read()):
                    block = block[: about.size - at]
                    file.write(block)
                    at += len(block)
                    trouble.over()
            if at < about.size:
                raise AgainError(f"ended after {at} of {about.size} bytes")
        except AgainError as error:
            file.flush()
            trouble.wait(error)
    file.flush()


def fetch_small(url: str, most: int) -> bytes:
    """The bytes of a small file; a DataError if there are more than `most`."""
    about = look(url)
    if about.size > most:
        raise RemoteError(f"{url}: {about.size} bytes; expected at most {most}")
    file = io.BytesIO()
    fetch(url, about, file)
    return file.getvalue()


def list_files(pattern: str) -> list[str]:
    """Sorted URLs that a glob, or a folder that ends in ``/*``, stands for."""
    scheme = pattern.partition("://")[0]
    if scheme in ("http", "https"):
        raise RemoteError(
            f"{pattern}: http cannot list files; name them with braces, as "
            f"train-{{000..146}}.tar, or put the index.json of `stopmim pack` beside them"
        )
    return _first_answer(pattern, lambda: find(pattern))


class Trouble:
    """A series of failed attempts: how long to wait, and when to give up."""

    def __init__(self, url: str, limit: float) -> None:
        self.url, self.limit = shown(url), limit
        self.over()

    def over(self) -> None:
        self.tries, self.since, self.warned = 0, time.monotonic(), False

    def wait(self, error: AgainError) -> None:
        gone = time.monotonic() - self.since
        if gone > self.limit:
            raise RemoteError(
                f"{self.url}: unavailable for {gone:.0f} s, last error: {error}; the same command "
                f"continues when it is back"
            ) from None
        pause = min(LONGEST_WAIT, FIRST_WAIT * 2**self.tries) * random.uniform(0.5, 1.5)
        pause = min(max(pause, error.after), max(0.1, self.limit - gone))
        if gone + pause > QUIET and not self.warned:
            self.warned = True
            warn(f"{self.url}: {error}; retrying for up to {self.limit:.0f} s")
        self.tries += 1
        time.sleep(pause)


def _same(url: str, expected: About, got: About) -> None:
    """Raises RemoteError if the file has changed since `look`."""
    for what, before, now in zip(("bytes", "version"), expected, got, strict=True):
        if before and now and before != now:
            raise RemoteError(f"{url}: changed while it was read: {what} {before} -> {now}")
