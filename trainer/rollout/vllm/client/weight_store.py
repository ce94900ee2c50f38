"""The weights that a node's servers are to have."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from trainer.rollout.vllm.engine.shared_weights import IncomingTensor, SharedWeights


class WeightStore:
    """One copy of the weights in shared memory, for all supervisors of a node.

    Supervisors read at the same time; a write waits until none does.
    """

    def __init__(self) -> None:
        self.shared = SharedWeights()
        self.version: int | None = None
        """None before the first weights, and while they are written."""
        self._condition = threading.Condition()
        self._readers = 0

    def write(self, weights: Iterable[IncomingTensor], version: int) -> None:
        """Replace the weights, as soon as no server is reading them."""
        with self._condition:
            self._condition.wait_for(lambda: self._readers == 0)
            self.version = None
            self.shared.write(weights)
            self.version = version

    @contextmanager
    def reading(self) -> Iterator[int | None]:
        """Context in which the weights do not change; yields their version."""
        with self._condition:
            self._readers += 1
            version = self.version
        try:
            yield version
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()
