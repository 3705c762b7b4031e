"""A timeout for calls that have none of their own."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def within(seconds: float, function: Callable[[], T]) -> T:
    """The result of `function`; TimeoutError if it takes longer, though its thread continues.

    It must release the GIL while it waits, as network calls do.
    """
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((True, function()))
        except Exception as error:
            answers.put((False, error))

    threading.Thread(target=call, name="waiting", daemon=True).start()
    try:
        good, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer for {seconds:g} s") from None
    if not good:
        raise answer
    return answer
