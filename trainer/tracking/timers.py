"""Wall-clock timers of the phases of a step."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator


class Timers:
    """``with timers("gen"):`` adds to the seconds of phase ``gen`` in this step.

    ``window``: steps over which mean and standard deviation are taken. ``synchronize``
    (``torch.cuda.synchronize`` on a GPU) runs at both ends of a phase, so that queued kernels count
    where they were launched. ``memory``: GiB in use, asked at the end of each phase.
    """

    def __init__(
        self,
        window: int = 50,
        *,
        synchronize: Callable[[], None] | None = None,
        memory: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._synchronize = synchronize
        self._memory = memory
        self._clock = clock
        self._used: dict[str, float] = {}
        self._step: dict[str, float] = {}
        self._window: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as phase ``name``; several times in a step add up, also when the body
        raises.
        """
        start = self._now()
        try:
            yield
        finally:
            self.add(name, self._now() - start)
            if self._memory is not None:
                self._used[name] = self._memory()

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self._step[name] = self._step.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Seconds of phase ``name`` in this step so far."""
        return self._step.get(name, 0.0)

    def end_step(self) -> dict[str, float]:
        """``timing/NAME`` of this step with ``timing/NAME/mean`` and ``/std`` over the window,
        ``perf/memory_gb/NAME`` at its end; then start the next.

        ``/std`` is the sample standard deviation and 0 for a single step. All values are seconds.
        """
        metrics: dict[str, float] = {}
        for name, seconds in self._step.items():
            window = self._window[name]
            window.append(seconds)
            metrics[f"timing/{name}"] = seconds
            metrics[f"timing/{name}/mean"] = statistics.fmean(window)
            metrics[f"timing/{name}/std"] = statistics.stdev(window) if len(window) > 1 else 0.0
        metrics |= {f"perf/memory_gb/{name}": used for name, used in self._used.items()}
        self._step, self._used = {}, {}
        return metrics

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()
