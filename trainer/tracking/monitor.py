"""The two log lines that tell whether ranks are loaded to the line (A8, A9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.base.errors import UserError


class DynamicBatchMonitor:
    """Tokens per micro-batch of one rank over a window of steps.

    Each ``interval`` steps it writes one line, such as ``[INFO] DynamicBatchMonitor: gpu_0 -
    avg_tokens=15822, max_tokens=16371, min_tokens=12403, batch_count=24``, and starts a new window.
    ``batch_count`` is the number of micro-batches in the window; fillers, which hold no tokens, are
    left out.
    """

    def __init__(self, rank: int, write: Callable[[str], None], interval: int = 100) -> None:
        if interval < 1:
            raise UserError(f"trainer.monitor_interval={interval}: write 1 or more steps")
        self._rank, self._write, self._interval = rank, write, interval
        self._tokens: list[int] = []
        self._steps = 0

    def update(self, tokens: Sequence[int]) -> str | None:
        """One step: the tokens of each of this rank's micro-batches. Returns the line when one was
        written.
        """
        self._tokens += [int(t) for t in tokens if t > 0]
        self._steps += 1
        if self._steps < self._interval:
            return None
        line = monitor_line(self._rank, self._tokens)
        self._tokens, self._steps = [], 0
        self._write(line)
        return line


def monitor_line(rank: int, tokens: Sequence[int]) -> str:
    """The line of one window; ``tokens`` holds one number per micro-batch."""
    mean = round(sum(tokens) / len(tokens)) if tokens else 0
    return (
        f"[INFO] DynamicBatchMonitor: gpu_{rank} - avg_tokens={mean}, "
        f"max_tokens={max(tokens, default=0)}, "
        f"min_tokens={min(tokens, default=0)}, batch_count={len(tokens)}"
    )


def device_mesh_line(samples: Sequence[int]) -> str:
    """The line at start: samples of each data-parallel rank, in order of rank."""
    parts = ", ".join(
        f"dp_rank_{rank} assigned {count} samples" for rank, count in enumerate(samples)
    )
    return f"[INFO] DeviceMeshBalancer: {parts}"
