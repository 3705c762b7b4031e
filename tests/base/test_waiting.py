"""A call without a limit of its own gets one."""

import threading
import time

import pytest

from stopmim.base.waiting import within


def test_an_answer_or_an_error_in_time_is_passed_on() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)


def test_a_call_that_takes_longer_is_left_alone() -> None:
    go, begin = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer for 0\.1 s"):
        within(0.1, go.wait)
    assert time.monotonic() - begin < 30
    go.set()
