"""Wall-clock timers of the phases of a step."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from trainer.base.spans import Span


class Timers:
    """``with timers("gen"):`` adds to the seconds of phase ``gen`` in this step."""

    def __init__(
        self,
        window: int = 50,
        *,
        synchronize: Callable[[], None] | None = None,
        memory: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``window``: steps over which mean and standard deviation are taken. ``synchronize``
        (``torch.cuda.synchronize`` on a GPU) runs at both ends of a phase, so that queued kernels
        count in the phase that launched them. ``memory`` returns GiB in use; it is called at the
        end of each phase.
        """
        self._synchronize = synchronize
        self._memory = memory
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._memory_gb: dict[str, float] = {}
        self._spans: list[Span] | None = None
        self._windows: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as phase ``name``; several times in a step add up, also when the body
        raises.
        """
        start = self._now()
        try:
            yield
        finally:
            end = self._now()
            self.add(name, end - start)
            if self._spans is not None:
                self._spans.append(Span(name, start, end))
            if self._memory is not None:
                self._memory_gb[name] = self._memory()

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def keep_spans(self) -> list[Span]:
        """Begin to keep each phase's span, in the list that is returned, until
        :meth:`keep_no_spans`.
        """
        self._spans = []
        return self._spans

    def keep_no_spans(self) -> None:
        """Keep no more."""
        self._spans = None

    def seconds(self, name: str) -> float:
        """Seconds of phase ``name`` in this step so far."""
        return self._seconds.get(name, 0.0)

    def end_step(self) -> dict[str, float]:
        """Return the metrics of this step and begin the next one.

        ``timing/NAME`` with ``timing/NAME/mean`` and ``/std`` over the window, in seconds; ``/std``
        is the sample standard deviation, and 0 for a single step. ``perf/memory_gb/NAME``: memory
        in use at the end of the phase.
        """
        metrics: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            window = self._windows[name]
            window.append(seconds)
            metrics[f"timing/{name}"] = seconds
            metrics[f"timing/{name}/mean"] = statistics.fmean(window)
            metrics[f"timing/{name}/std"] = statistics.stdev(window) if len(window) > 1 else 0.0
        for name, memory_gb in self._memory_gb.items():
            metrics[f"perf/memory_gb/{name}"] = memory_gb
        self._seconds = {}
        self._memory_gb = {}
        return metrics

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()
