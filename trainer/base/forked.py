"""Child processes that answer requests: for loading samples and for scoring answers.

They are forked, so that data sets, tokenizers and user functions need no pickling and pages are
shared. They ignore TERM, INT, HUP and USR2, which Slurm and terminals send to a whole group: the
step in progress may still need them. They end with the process that started them, however that one
ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing

# its exit hook waits for children; imported first so that ours below runs before it
import multiprocessing.util
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer.base import signals
from trainer.base.errors import UserError

Request = TypeVar("Request")
Answer = TypeVar("Answer")

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_PARENT_CHECK_S = 1.0
_live: set[Forked[Any, Any]] = set()


class WorkerDied(RuntimeError):
    """The child ended without an answer."""


class WorkerSilent(RuntimeError):
    """The child has not answered in time."""


class WorkerFailed(RuntimeError):
    """``serve`` raised something that is not a UserError; the message is its traceback."""


class Forked(Generic[Request, Answer]):
    """A forked child that runs ``serve`` on each request, in order.

    Requests that wait must be small together (64 KiB, a pipe's buffer) unless the child is idle;
    answers may have any size. Both are pickled through a pipe that only these two processes hold.
    """

    def __init__(
        self, serve: Callable[[Request], Answer], name: str, *, memory_bytes: int | None = None
    ) -> None:
        """``memory_bytes``: what the child may take besides the memory that it shares; beyond it
        ``serve`` gets a MemoryError. None: as much as there is.
        """
        self.name = name
        ours, theirs = multiprocessing.Pipe(duplex=True)
        self._pipe = ours
        self._owner = os.getpid()
        on_main = threading.current_thread() is threading.main_thread()
        # not daemonic: a user's reward function may start processes of its own
        self._process = multiprocessing.get_context("fork").Process(
            target=_child,
            args=(serve, theirs, ours, os.getpid(), on_main, memory_bytes),
            name=name,
            daemon=False,
        )
        with signals.blocked():
            self._process.start()
        theirs.close()
        _live.add(self)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return int(self._process.pid or 0)

    @property
    def waits(self) -> list[Any]:
        """What ``multiprocessing.connection.wait`` reports ready when an answer is there or the
        child is gone.
        """
        return [self._pipe, self._process.sentinel]

    def send(self, request: Request) -> None:
        """Hand over a request. Raises WorkerDied."""
        try:
            self._pipe.send(request)
        except OSError as e:
            raise self._died() from e

    def receive(self, timeout_s: float) -> Answer:
        """The next answer. Raises what ``serve`` raised if that was a UserError, else WorkerFailed,
        WorkerDied or WorkerSilent; StopRequested instead of a wait for longer.
        """
        ready = self._wait(timeout_s)
        if not ready:
            raise WorkerSilent(
                f"{self.name} (process {self.pid}) gave no answer within {timeout_s:.3g} s"
            )
        if self._pipe not in ready and not self._pipe.poll():
            raise self._died()
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as e:
            raise self._died() from e
        if kind == "user":
            raise UserError(value)
        if kind == "error":
            raise WorkerFailed(f"{self.name} failed:\n{value}")
        answer: Answer = value
        return answer

    def close(self) -> None:
        """End the child at once; it holds nothing that needs saving."""
        _live.discard(self)
        self._pipe.close()
        if self._owner == os.getpid() and self._process.is_alive():
            self._process.kill()
        if self._owner == os.getpid():
            self._process.join(10)

    def _wait(self, timeout_s: float) -> list[Any]:
        """What is ready of ``waits`` within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            ready = wait(self.waits, max(0.0, min(remaining, signals.POLL_S)))
            if ready or remaining <= signals.POLL_S:
                return ready
            signals.check()

    def _died(self) -> WorkerDied:
        self._process.join(10)
        code = self._process.exitcode
        how = (
            "is gone"
            if code is None
            else f"was killed by {_signal_name(-code)}"
            if code < 0
            else f"exited ({code})"
        )
        hint = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return WorkerDied(f"{self.name} (process {self.pid}) {how}{hint}")


def ordered_map(
    fn: Callable[[Request], Answer],
    requests: Iterable[Request],
    *,
    num_workers: int,
    name: str,
    timeout_s: float = 600.0,
) -> Generator[Answer, None, None]:
    """``map(fn, requests)`` by ``num_workers`` forked processes (0: in this one), answers in
    order.
    """
    if num_workers <= 0:
        yield from map(fn, requests)
        return
    workers: list[Forked[Request, Answer]] = []
    pending: deque[Forked[Request, Answer]] = deque()
    try:
        for k, request in enumerate(requests):
            if k < num_workers:
                workers.append(Forked(fn, f"{name} {k}"))
            if len(pending) >= 2 * num_workers:
                yield pending.popleft().receive(timeout_s)
            worker = workers[k % num_workers]
            worker.send(request)
            pending.append(worker)
        while pending:
            yield pending.popleft().receive(timeout_s)
    finally:
        for worker in workers:
            worker.close()


def _child(
    serve: Callable[[Any], Any],
    pipe: Connection,
    parents_end: Connection,
    parent: int,
    on_main: bool,
    memory_bytes: int | None,
) -> None:
    _prepare_child(on_main)
    parents_end.close()
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    try:
        _serve(serve, pipe, parent)
    finally:
        _end_all()  # its own children, for which multiprocessing would wait


def _serve(serve: Callable[[Any], Any], pipe: Connection, parent: int) -> None:
    """Answer requests until the parent or its end of the pipe is gone."""
    while _request_comes(pipe, parent):
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            _send_reply(pipe, _reply_to(serve, request))
        except OSError:
            return


def _limit_memory(more: int) -> None:
    """Let this process map ``more`` bytes than it has mapped now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for earlier in (soft, hard):
        if earlier != resource.RLIM_INFINITY:
            most = min(most, earlier)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _prepare_child(on_main: bool) -> None:
    for number in signals.CAUGHT:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.CAUGHT)
    # the kernel means the thread that forked, not the process; another thread may end early
    if on_main:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # short of memory, the kernel takes this process and not the trainer
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    _live.clear()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "torch" in sys.modules:  # a forked OpenMP pool would hang
        sys.modules["torch"].set_num_threads(1)


def _reply_to(serve: Callable[[Any], Any], request: Any) -> tuple[str, Any]:
    try:
        return "ok", serve(request)
    except UserError as e:
        return "user", str(e)
    except Exception:
        return "error", traceback.format_exc()


def _send_reply(pipe: Connection, reply: tuple[str, Any]) -> None:
    try:
        pipe.send(reply)
    except (TypeError, AttributeError, ValueError):  # not to be pickled
        pipe.send(("error", traceback.format_exc()))


def _request_comes(pipe: Connection, parent: int) -> bool:
    """Wait for a request; False when the parent is gone."""
    while os.getppid() == parent:
        try:
            if pipe.poll(_PARENT_CHECK_S):
                return True
        except OSError:
            return False
    return False


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@atexit.register
def _end_all() -> None:
    for worker in list(_live):
        worker.close()
