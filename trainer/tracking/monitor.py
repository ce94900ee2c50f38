"""The log lines that show how full the micro-batches of each rank are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.base.errors import UserError


class DynamicBatchMonitor:
    """Writes the tokens per micro-batch of one rank over a window of steps to its log.

    Every ``interval`` steps it writes one line, such as ``[INFO] DynamicBatchMonitor: gpu_0 -
    avg_tokens=15822, max_tokens=16371, min_tokens=12403, batch_count=24``, and starts a new window.
    ``batch_count`` is the number of micro-batches in the window; fillers, which hold no tokens, are
    left out.
    """

    def __init__(self, rank: int, write: Callable[[str], None], interval: int = 100) -> None:
        """Raises UserError for an interval below 1."""
        if interval < 1:
            raise UserError(f"trainer.monitor_interval={interval}: write 1 or more steps")
        self._rank = rank
        self._write = write
        self._interval = interval
        self._tokens: list[int] = []
        self._steps = 0

    def update(self, tokens: Sequence[int]) -> str | None:
        """Add one step: ``tokens`` of each of this rank's micro-batches [micro-batches].

        Returns the line when one was written.
        """
        self._tokens += [int(count) for count in tokens if count > 0]
        self._steps += 1
        if self._steps < self._interval:
            return None
        line = monitor_line(self._rank, self._tokens)
        self._tokens = []
        self._steps = 0
        self._write(line)
        return line


def monitor_line(rank: int, tokens: Sequence[int]) -> str:
    """The line of one window; ``tokens`` [micro-batches]."""
    mean = round(sum(tokens) / len(tokens)) if tokens else 0
    return (
        f"[INFO] DynamicBatchMonitor: gpu_{rank} - avg_tokens={mean}, "
        f"max_tokens={max(tokens, default=0)}, min_tokens={min(tokens, default=0)}, "
        f"batch_count={len(tokens)}"
    )


def device_mesh_line(samples: Sequence[int]) -> str:
    """The line at the start: samples of each data-parallel rank [ranks]."""
    parts = ", ".join(
        f"dp_rank_{rank} assigned {count} samples" for rank, count in enumerate(samples)
    )
    return f"[INFO] DeviceMeshBalancer: {parts}"
