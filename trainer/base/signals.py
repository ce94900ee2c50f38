"""Signals as requests: a run that is asked to stop leaves what it can take up again, saves, exits.

USR2 (Slurm's warning before the time limit or a preemption), TERM, HUP (the terminal or the ssh
connection is gone) and the first INT are requests. A thread learns of them at once, even while the
main thread waits in a collective. What follows depends on what would be lost:

- Nothing (:func:`leave_at_once`, until the first update of an attempt): StopRequested is raised in
  the main thread wherever it is, and a thread that doesn't come back is ended a little later.
- Something: loops that can be left call :func:`check`; the others go on.

A second INT ends the process at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

CAUSES = ("HUP", "INT", "TERM", "USR2")
"""Names of the signals that become a request. Of two on different ranks the later one counts."""
CAUGHT = tuple(signal.Signals[f"SIG{name}"] for name in CAUSES)
"""Signals that become a request."""
POLL_S = 0.2
"""Longest time between two calls of :func:`check` in a loop that waits."""
LEAVE_S = 3.0
"""How long the main thread may take to leave at once."""
KILL_S = 0.5
"""How long the main thread may take to act on a second INT."""


_exit_now = os._exit
"""That of the system: a rank reports calls of ``os._exit`` as an error of a library."""


class StopRequested(BaseException):
    """This process was asked to save and stop, for ``cause``.

    Not an Exception, as KeyboardInterrupt is none: code that handles errors lets it pass.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(f"asked to stop ({cause})")
        self.cause = cause


class _Request:
    """The request that has come, if any, and how to act on it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Reentrant, since a handler may interrupt its own thread."""
        self.cause: str | None = None
        self.announced = False
        self.raised = False
        self.interrupts = 0
        self.end: Callable[[str], int] | None = None
        """Set while the process may be left at once: writes the last record, gives the code."""
        self.joining = False
        self.on_request: Callable[[str], object] | None = None
        self.terminals: list[int] = []

    def begin(self, cause: str) -> None:
        """Keep the first cause: inside a container USR2 comes twice."""
        with self.lock:
            if self.cause is None:
                self.cause = cause


_request = _Request()
_installed = False


def install() -> None:
    """Turn the signals into requests; call it on the first lines of a process, in its main thread.

    The launcher starts its children with these signals blocked, so that one that arrives while
    Python is still starting waits for this call instead of killing the process. HUP stays ignored
    where it is (nohup).
    """
    global _installed
    if not _installed:
        _installed = True
        _request.terminals = [fd for fd in (0, 1, 2) if _is_terminal(fd)]
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_listen, args=(reader,), name="signals", daemon=True).start()
        atexit.register(_ignore)
    for number in caught():
        signal.signal(number, _handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


def caught() -> tuple[signal.Signals, ...]:
    """``CAUGHT`` without HUP where whoever started this process had it ignored (nohup)."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(n for n in CAUGHT if n != signal.SIGHUP or not ignores_hangup)


def requested() -> str | None:
    """The first signal that asked this process, or another rank of its run, to save and stop: a
    name of ``CAUSES``. None when none has come.
    """
    return _request.cause


def check() -> None:
    """Raise StopRequested when a stop was requested: for loops whose work can be left."""
    if _request.cause is not None:
        raise StopRequested(_request.cause)


def request(cause: str) -> None:
    """Ask this process to stop, as another rank was asked. Called in a thread of its own."""
    if cause == "HUP":
        _let_go_of_terminal()
    _request.begin(cause)
    with _request.lock:
        if _request.announced:
            return
        _request.announced = True
        at_once = _request.end is not None
    if _request.on_request is not None:
        _request.on_request(cause)
    if at_once:
        if not _request.raised:  # the request came from another rank
            signal.pthread_kill(_main_thread_id(), signal.SIGUSR2)
        threading.Thread(target=_end_later, name="leaving", daemon=True).start()


def on_request(callback: Callable[[str], object] | None) -> None:
    """Call ``callback`` with the cause once a stop is requested, in another thread."""
    _request.on_request = callback


def leave_at_once(end: Callable[[str], int]) -> None:
    """From now on a request raises StopRequested in the main thread, wherever it is.

    ``end`` (from the cause to the exit code) is called in another thread, and the process ended,
    when the main thread is still there ``LEAVE_S`` later: a call of a library may last for minutes.
    """
    with _request.lock:
        _request.end = end
    check()


def leaves_at_once() -> bool:
    """Whether a request ends this process wherever it is, without other ranks."""
    return _request.end is not None


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Requests wait for :func:`check` from now on. The body agrees with all ranks on going on.

    A rank that has left before ends the others' wait within the body. Raises StopRequested when the
    process is to leave at once and a request has come.
    """
    if _request.end is None:
        yield
        return
    with _request.lock:
        check()
        _request.joining = True
    yield
    with _request.lock:
        _request.end = None


def exit_within(seconds: float, code: int) -> None:
    """End this process with ``code`` if it is still there in ``seconds``.

    For an exit after everything is saved: threads of user code may last for minutes.
    """
    timer = threading.Timer(seconds, _exit, (code,))
    timer.daemon = True
    timer.start()


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
    if number == signal.SIGINT:
        _request.interrupts += 1
        if _request.interrupts > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if number == signal.SIGHUP:
        _let_go_of_terminal()  # before anyone who sees the request prints
    _request.begin(_name(number))
    with _request.lock:
        leaves = _request.end is not None and not (_request.joining or _request.raised)
        _request.raised = _request.raised or leaves
    if leaves:
        check()


def _listen(reader: int) -> None:
    """The thread that learns of signals while the main thread is busy."""
    interrupts = 0
    while True:
        for number in os.read(reader, 64):
            interrupts += int(number == signal.SIGINT)
            if interrupts > 1:
                time.sleep(KILL_S)
                _exit_now(128 + signal.SIGINT)
            if number in CAUGHT:
                # A thread: what the request calls may last, and a second INT has to be heard.
                threading.Thread(target=request, args=(_name(number),), daemon=True).start()


def _end_later() -> None:
    time.sleep(LEAVE_S)
    with _request.lock:
        end = _request.end
    if end is not None:
        _exit(end(_request.cause or ""))


def _exit(code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    _exit_now(code)


def _name(number: int) -> str:
    return signal.Signals(number).name.removeprefix("SIG")


def _main_thread_id() -> int:
    identity = threading.main_thread().ident
    assert identity is not None
    return identity


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _let_go_of_terminal() -> None:
    """Point the standard streams that were a terminal elsewhere: writing to it is an error now."""
    sink = os.open(os.devnull, os.O_RDWR)
    for fd in _request.terminals:
        os.dup2(sink, fd)
    os.close(sink)


def _ignore() -> None:
    """Ignore the signals while the process exits.

    Python restores the default actions on the way out, and a second signal would then kill a
    process that has saved.
    """
    for number in CAUGHT:
        signal.signal(number, signal.SIG_IGN)
