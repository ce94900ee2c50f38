"""Watch the ranks of a run until all have ended, within bounds."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainer.base import signals
from trainer.base.errors import EXIT_OK, EXIT_REQUEUE, EXIT_USER
from trainer.launch.report import read_error

KILL_GRACE_S = "PLIMSOLL_KILL_GRACE_S"
"""Seconds between TERM and KILL for ranks whose peer has failed (default 10)."""
FINISH_GRACE_S = "PLIMSOLL_FINISH_GRACE_S"
"""Seconds that ranks may go on after the first one finished in order (default 600: a last save)."""
PUMP_S = 2.0
LOOK_S = 0.5
"""How often the launcher looks for errors that ranks left before they ended."""


@dataclass
class Child:
    """One rank's process."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    error_file: Path
    pump: threading.Thread | None = None
    keep_open: int | None = None
    code: int | None = None
    ended_at: float = field(default=0.0)
    """time.time() when it ended."""

    def send(self, number: int) -> None:
        """Signal the rank itself."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """KILL the rank and everything in its process group (its data-loader workers)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def verdict(self) -> int:
        """Its exit code, or what it left in its error file when it was killed on its way out."""
        code = self.code if self.code is not None else 1
        left = read_error(self.error_file) if code < 0 else None
        return code if left is None else left.code

    def error_time(self) -> float:
        """When it failed: as it says itself, else its end."""
        left = read_error(self.error_file)
        return self.ended_at if left is None else left.time


@dataclass
class Ending:
    """What the launcher itself did to bring the ranks to an end."""

    stopped_at: float | None = None
    """time.time() when the ranks that still ran were told to stop."""
    lagging: tuple[int, ...] = ()
    """Ranks that went on too long after the first one had finished in order."""
    interrupted: bool = False
    """A second INT: everything was killed at once."""


@dataclass(frozen=True)
class Verdict:
    """The run's exit code, the rank to blame (None when nobody failed) and how that one ended."""

    code: int
    failed: int | None
    reason: str


def watch(children: Sequence[Child]) -> Verdict:
    """Wait for all ``children``. After the first failure the others get TERM, then KILL; signals
    are forwarded.
    """
    events: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    for child in children:
        threading.Thread(target=_await, args=(child, events), daemon=True).start()
    try:
        with _forwarding(events):
            ending = _until_all_ended(children, events)
    finally:
        for child in children:
            # what a rank left behind in its group; and everything, if we are leaving early
            child.kill()
            if child.pump is not None:
                child.pump.join(PUMP_S)
        if children[0].keep_open is not None:
            os.close(children[0].keep_open)
    return judge(children, ending)


def _await(child: Child, events: queue.SimpleQueue[tuple[str, int, int]]) -> None:
    events.put(("ended", child.rank, child.process.wait()))


def _until_all_ended(
    children: Sequence[Child], events: queue.SimpleQueue[tuple[str, int, int]]
) -> Ending:
    kill_grace = float(os.environ.get(KILL_GRACE_S, "10"))
    finish_grace = float(os.environ.get(FINISH_GRACE_S, "600"))
    ending = Ending()
    deadline: float | None = None
    interrupts = 0
    while running := [c for c in children if c.code is None]:
        try:
            wait = (
                LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            )
            kind, rank, value = events.get(timeout=wait)
        except queue.Empty:
            kind, rank, value = "look", -1, 0
        # A rank that failed may hang on its way out (its peers are in a collective): what it left
        # is enough.
        stop = ending.stopped_at is None and any(c.error_file.exists() for c in running)
        if kind == "ended":
            children[rank].code, children[rank].ended_at = value, time.time()
            stop = stop or (value not in (EXIT_OK, EXIT_REQUEUE) and ending.stopped_at is None)
            if deadline is None:
                deadline = time.monotonic() + finish_grace
        elif kind == "signal":
            interrupts += value == signal.SIGINT
            ending.interrupted = interrupts > 1
            for child in running:
                child.kill() if ending.interrupted else child.send(value)
        elif deadline is None or time.monotonic() < deadline:
            pass
        elif ending.stopped_at is None:
            stop, ending.lagging = True, tuple(c.rank for c in running)
        else:
            for child in running:
                child.kill()
            deadline = time.monotonic() + kill_grace
        if stop:
            ending.stopped_at, deadline = time.time(), time.monotonic() + kill_grace
            for child in running:
                child.send(signal.SIGTERM)
    return ending


@contextlib.contextmanager
def _forwarding(events: queue.SimpleQueue[tuple[str, int, int]]) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        events.put(("signal", -1, number))

    if cause := signals.requested():  # it came while the ranks were being started
        events.put(("signal", -1, getattr(signal, f"SIG{cause}")))
    before = {number: signal.signal(number, note) for number in signals.CAUGHT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def judge(children: Sequence[Child], ending: Ending) -> Verdict:
    """Who is to blame. Ranks that only ended because they were told to, or because a peer had gone,
    are not.

    Wrong input (exit code 2) is the cause of whatever else happened; otherwise the earliest error
    is.
    """
    if ending.interrupted:
        return Verdict(128 + signal.SIGINT, None, "interrupted twice")
    bad = [c for c in children if c.verdict() not in (EXIT_OK, EXIT_REQUEUE)]
    if not bad:
        requeue = any(c.code == EXIT_REQUEUE for c in children)
        return Verdict(EXIT_REQUEUE if requeue else EXIT_OK, None, "finished")
    own = [
        c for c in bad if ending.stopped_at is None or c.error_time() <= ending.stopped_at
    ] or bad
    first = min(own, key=lambda c: (c.verdict() != EXIT_USER, c.error_time()))
    code = first.verdict()
    if first.rank in ending.lagging:
        return Verdict(
            128 - code if code < 0 else code,
            first.rank,
            "it went on long after another rank had finished",
        )
    if code < 0:
        return Verdict(128 - code, first.rank, f"killed by {signal.Signals(-code).name}")
    return Verdict(code, first.rank, f"exit code {code}")
