"""An end for Python code of others that may never return, such as a chat template's loops.

The thread that runs it gets an exception between two bytecodes: signals would only reach the main
thread, and a process for each call would cost more than the call. A single operation in C that
takes for ever (``10 ** 10 ** 10``) is not ended.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")
POLL_S = 0.5


class TimeLimitExceeded(Exception):
    """The code ran longer than it may."""


@dataclass
class _Call:
    thread: int
    deadline: float
    ended: bool = False


class _Watch:
    """The calls of a process that have a deadline, and the thread that looks after them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.calls: list[_Call] = []
        threading.Thread(target=self._run, name="time limits", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(POLL_S)
            now = time.monotonic()
            with self.lock:
                for call in self.calls:
                    if now > call.deadline and not call.ended:
                        call.ended = True
                        _raise_in(call.thread, TimeLimitExceeded)


_watch: _Watch | None = None


def with_time_limit(call: Callable[[], Result], seconds: float) -> Result:
    """What ``call`` returns. Raises TimeLimitExceeded when it runs longer than ``seconds``."""
    global _watch
    if _watch is None or _watch.pid != os.getpid():  # threads don't survive a fork
        _watch = _Watch()
    watch = _watch
    entry = _Call(threading.get_ident(), time.monotonic() + seconds)
    with watch.lock:
        watch.calls.append(entry)
    try:
        return call()
    finally:
        with watch.lock:
            watch.calls.remove(entry)
            if entry.ended:
                _raise_in(entry.thread, None)  # it may not have come yet


def _raise_in(thread: int, kind: type[Exception] | None) -> None:
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
