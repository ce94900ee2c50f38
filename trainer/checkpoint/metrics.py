"""The metrics ``ckpt/*``, recorded by the training, copying and committing threads."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger(__name__)


class CheckpointMetrics:
    """Values of ``ckpt/*``. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {
            "failures": 0.0,
            "failed_in_a_row": 0.0,
            "stall_s": 0.0,
            "last_committed_step": -1.0,
        }
        self._last_commit = time.time()
        self.last_failure = ""
        """Message of the last failed save."""

    def set(self, name: str, value: float) -> None:
        """Set a value."""
        with self._lock:
            self._values[name] = value

    def add(self, name: str, value: float = 1.0) -> None:
        """Add to a value that begins at 0."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + value

    def get(self, name: str) -> float | None:
        """A value, or None before it was set."""
        with self._lock:
            return self._values.get(name)

    def record_failure(self, message: str, *, committed: bool = False) -> None:
        """Log that a save failed, at once, and count it.

        ``committed``: only what follows the commit failed (``latest``, retention, the mirror).
        """
        log.error("%s", message)
        self.last_failure = message
        self.add("failures")
        if not committed:
            self.add("failed_in_a_row")

    def record_commit(self, step: int, *, nbytes: int, seconds: float) -> None:
        """The checkpoint of ``step`` is committed.

        ``nbytes``: size of this rank's files; ``seconds``: since the beginning of its copy.
        """
        with self._lock:
            self._last_commit = time.time()
            self._values["write_s"] = seconds
            self._values["bytes"] = float(nbytes)
            self._values["last_committed_step"] = float(step)
            self._values["failed_in_a_row"] = 0.0
            self._values["write_gbps"] = nbytes / seconds / 1e9

    def collect(self, in_flight: int) -> dict[str, float]:
        """All values as metrics; resets ``stall_s``. ``in_flight``: saves not yet ended."""
        with self._lock:
            values = dict(self._values)
            values["in_flight"] = float(in_flight)
            values["age_s"] = time.time() - self._last_commit
            self._values["stall_s"] = 0.0
        return {f"ckpt/{name}": value for name, value in values.items()}
