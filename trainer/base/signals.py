"""Signals as requests: a run that is asked to stop finishes its step, saves and exits.

USR2 (Slurm's warning before the time limit or a preemption), TERM and the first INT set a flag that
the training loop reads at its step boundary. A second INT ends the process at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

CAUGHT = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Signals that become a request."""

_cause: str | None = None
_interrupts = 0


def install() -> None:
    """Turn the signals into requests; call it on the first lines of a process, in its main thread.

    The launcher starts its children with these signals blocked, so that one that arrives while
    Python is still starting waits for this call instead of killing the process.
    """
    for number in CAUGHT:
        signal.signal(number, _handle)
    atexit.register(_ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


def requested() -> str | None:
    """The first signal that asked this process to save and stop: ``USR2``, ``TERM`` or ``INT``.

    None when none has come.
    """
    return _cause


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block the signals for this thread; children started inside inherit that until they call
    :func:`install`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handle(number: int, frame: FrameType | None) -> None:
    global _cause, _interrupts
    if number == signal.SIGINT:
        _interrupts += 1
        if _interrupts > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if _cause is None:  # inside a container USR2 comes twice; the first one counts
        _cause = signal.Signals(number).name.removeprefix("SIG")


def _ignore() -> None:
    """Ignore the signals while the process exits.

    Python restores the default actions on the way out, and a second signal would then kill a
    process that has saved.
    """
    for number in CAUGHT:
        signal.signal(number, signal.SIG_IGN)
