"""Signals as requests: a run asked to stop finishes its step, saves and exits; nothing is lost
half-way.

USR2 (Slurm's warning before the time limit or a preemption), TERM and the first INT set a flag that
the training loop reads at its step boundary. A second INT ends the process at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
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
        signal.signal(number, _note)
    atexit.register(_ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


def _ignore() -> None:
    """On the way out Python puts the default actions back: a second signal then would kill a
    process that has saved.
    """
    for number in CAUGHT:
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, frame: FrameType | None) -> None:
    global _cause, _interrupts
    if number == signal.SIGINT:
        _interrupts += 1
        if _interrupts > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if _cause is None:  # inside a container USR2 comes twice; the first one counts
        _cause = signal.Signals(number).name.removeprefix("SIG")


def requested() -> str | None:
    """``USR2``, ``TERM`` or ``INT``: what asked this process first to save and stop; None if nobody
    did.
    """
    return _cause


def clear() -> None:
    """Forget what was requested (for a process that runs several jobs one after another, and for
    tests).
    """
    global _cause, _interrupts
    _cause, _interrupts = None, 0


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Block the signals for this thread; children started inside inherit that until they call
    :func:`install`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shield_worker(worker_id: int = 0) -> None:
    """``worker_init_fn`` of a data loader: outlive signals sent to the whole process group.

    The step in progress still needs its workers. Only a TERM that comes from the worker's own
    parent (the loader closing down) ends it; Slurm's, the launcher's and the terminal's signals are
    ignored. Start the workers inside :func:`held`: then threads that libraries start in a forked
    worker block TERM too. One that doesn't may take it, which hides the sender; the worker then
    ends, since a loader that waits for it in vain would hang the run.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    parent = os.getppid()

    def wait_for_parent() -> None:
        while True:
            if signal.sigwaitinfo((signal.SIGTERM,)).si_pid == parent:
                os._exit(0)

    threading.Thread(target=wait_for_parent, name="term-from-parent", daemon=True).start()
