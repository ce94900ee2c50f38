"""Code that never returns is ended, in any thread, and nothing comes later."""

from __future__ import annotations

import os
import threading
import time

import pytest

from trainer.base.time_limit import TimeLimitExceeded, with_time_limit


def _forever() -> None:
    n = 0
    while True:
        n += 1


def test_an_endless_loop_ends() -> None:
    start = time.monotonic()
    with pytest.raises(TimeLimitExceeded):
        with_time_limit(_forever, 0.1)
    assert time.monotonic() - start < 30


def test_in_another_thread_and_in_a_forked_child() -> None:
    ended: list[str] = []

    def run() -> None:
        try:
            with_time_limit(_forever, 0.1)
        except TimeLimitExceeded:
            ended.append("ended")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert ended == ["ended"]
    child = os.fork()
    if child == 0:
        run()
        os._exit(len(ended))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_what_ends_in_time_is_returned_and_nothing_comes_later() -> None:
    assert with_time_limit(lambda: 7, 0.01) == 7
    with pytest.raises(ZeroDivisionError):
        with_time_limit(lambda: 1 / 0, 0.01)
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        pass
