"""Wait for the ranks of a run, end all of them when one fails, and say which one failed first."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from trainer.base import signals
from trainer.base.errors import EXIT_OK, EXIT_REQUEUE, EXIT_USER
from trainer.base.rank_records import LOST_PEER
from trainer.launch.rank_process import RankProcess

KILL_GRACE_S = "PLIMSOLL_KILL_GRACE_S"
"""Seconds between TERM and KILL for ranks whose peer has failed (default 10)."""
FINISH_GRACE_S = "PLIMSOLL_FINISH_GRACE_S"
"""Seconds that ranks may run after the first one finished in order (default 600: a last save)."""
OUTPUT_TIMEOUT_S = 2.0
"""How long the launcher waits for the last output of a rank that has ended."""
POLL_S = 0.5
"""How often the launcher looks for errors of ranks that have not ended."""


@dataclass(frozen=True)
class RunResult:
    """The run's exit code, the rank that failed first (None when none did) and how it ended."""

    code: int
    failed_rank: int | None
    reason: str


def watch(processes: Sequence[RankProcess]) -> RunResult:
    """Wait for all ranks. After the first failure the others get TERM, then KILL; signals are
    forwarded to them.
    """
    watcher = Watcher(processes)
    try:
        with watcher.forwarding_signals():
            watcher.wait_until_all_ended()
    finally:
        for process in processes:
            # Kills what a rank left in its group, and everything on an early way out.
            process.kill()
            if process.output_thread is not None:
                process.output_thread.join(OUTPUT_TIMEOUT_S)
        if processes[0].parent_pipe is not None:
            os.close(processes[0].parent_pipe)
    return result_of(processes, watcher)


class Watcher:
    """Waits for ranks to end, and records what it did to end them."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._processes = processes
        self._events: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        """``("ended", rank, exit code)`` and ``("signal", -1, number)``."""
        self._kill_grace = float(os.environ.get(KILL_GRACE_S, "10"))
        self._finish_grace = float(os.environ.get(FINISH_GRACE_S, "600"))
        self._deadline: float | None = None
        """time.monotonic() when the ranks that still run are stopped or killed."""
        self._interrupts = 0
        self.stopped_at: float | None = None
        """time.time() when the ranks that still ran were told to stop."""
        self.lagging: tuple[int, ...] = ()
        """Ranks that still ran long after the first one had finished in order."""
        for process in processes:
            threading.Thread(target=self._wait_for, args=(process,), daemon=True).start()

    @property
    def interrupted(self) -> bool:
        """Whether a second INT came, at which everything is killed."""
        return self._interrupts > 1

    def wait_until_all_ended(self) -> None:
        """Handle events until no rank runs."""
        running = list(self._processes)
        while running:
            self._handle_event(running)
            running = [process for process in running if process.code is None]

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Turn signals to this process into events."""
        cause = signals.requested()
        if cause:  # it came while the ranks were being started
            self._events.put(("signal", -1, getattr(signal, f"SIG{cause}")))
        before = {number: signal.signal(number, self._on_signal) for number in signals.caught()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle_event(self, running: Sequence[RankProcess]) -> None:
        kind, rank, value = self._next_event()
        if kind == "ended":
            self._on_end(rank, value, running)
        elif kind == "signal":
            self._forward(value, running)
        elif self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline(running)
        # A rank that failed may hang on its way out, since its peers are in a collective: its
        # record is enough.
        if self.stopped_at is None and any(process.has_failed for process in running):
            self._stop(running)

    def _next_event(self) -> tuple[str, int, int]:
        timeout = POLL_S
        if self._deadline is not None:
            timeout = min(timeout, max(0.0, self._deadline - time.monotonic()))
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return "none", -1, 0

    def _on_end(self, rank: int, code: int, running: Sequence[RankProcess]) -> None:
        process = self._processes[rank]
        process.code = code
        process.ended_at = time.time()
        if self.stopped_at is None and not process.ended_in_order:
            self._stop(running)
            return
        if self._deadline is None:
            self._deadline = time.monotonic() + self._finish_grace
        if code == EXIT_REQUEUE and self.stopped_at is None:
            # It alone may have been asked to stop, before it could tell the others.
            for process in running:
                process.send(signal.SIGTERM)

    def _forward(self, number: int, running: Sequence[RankProcess]) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        for process in running:
            if self.interrupted:
                process.kill()
            else:
                process.send(number)

    def _on_deadline(self, running: Sequence[RankProcess]) -> None:
        if self.stopped_at is None:
            self.lagging = tuple(process.rank for process in running)
            self._stop(running)
            return
        for process in running:
            process.kill()
        self._deadline = time.monotonic() + self._kill_grace

    def _stop(self, running: Sequence[RankProcess]) -> None:
        self.stopped_at = time.time()
        self._deadline = time.monotonic() + self._kill_grace
        for process in running:
            process.send(signal.SIGTERM)

    def _wait_for(self, process: RankProcess) -> None:
        self._events.put(("ended", process.rank, process.process.wait()))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(("signal", -1, number))


def result_of(processes: Sequence[RankProcess], watcher: Watcher) -> RunResult:
    """The result of a run whose ranks have ended.

    Wrong input (exit code 2) is the cause of whatever else happened, also where a slower rank saw
    it after another had crashed of it. Otherwise ranks that failed only because they were told to
    stop, or because a peer had gone, are not the cause, and the earliest error is; that of a lost
    peer only where there is no other.
    """
    if watcher.interrupted:
        return RunResult(128 + signal.SIGINT, None, "interrupted twice")
    failed = [p for p in processes if p.final_code() not in (EXIT_OK, EXIT_REQUEUE)]
    if not failed:
        requeue = any(process.code == EXIT_REQUEUE for process in processes)
        return RunResult(EXIT_REQUEUE if requeue else EXIT_OK, None, "finished")
    stopped_at = watcher.stopped_at
    wrong_input = [p for p in failed if p.final_code() == EXIT_USER]
    unprompted = [p for p in failed if stopped_at is None or p.error_time() <= stopped_at]
    first = min(
        wrong_input or unprompted or failed,
        key=lambda process: (
            process.end is not None and process.end.kind == LOST_PEER,
            process.error_time(),
        ),
    )
    code = first.final_code()
    reason = f"exit code {code}"
    if code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
        code = 128 - code
    if first.left_early:
        reason = "its process exited with 0 before the run had finished"
    if first.rank in watcher.lagging:
        reason = "it went on long after another rank had finished"
    return RunResult(code, first.rank, reason)
