"""A generation on servers: one stream for each server, and the tracker of their responses."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from trainer.base import signals
from trainer.rollout.protocol import EngineFailed, FinishedGroup
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.client.pool import ServerPool
from trainer.rollout.vllm.client.spec import ServerLimits
from trainer.rollout.vllm.client.stream import Stream, StreamEvent
from trainer.rollout.vllm.engine.requests import Request, RequestTracker

STOP_DRAIN_S = 2.0
"""How long the last tokens of streams are waited for when the run was asked to stop."""


class ServerGeneration:
    """A :class:`trainer.rollout.protocol.Generation` under way on servers.

    Servers go on drawing whether or not it is iterated.
    """

    def __init__(
        self,
        pool: ServerPool,
        tracker: RequestTracker,
        sampling: Sampling,
        eos_ids: Sequence[int],
        *,
        max_num_seqs: int,
        limits: ServerLimits,
        stats: dict[str, float],
    ) -> None:
        """``stats`` is filled when the generation ends or is stopped."""
        self._tracker = tracker
        self._stats = stats
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._timeout_s = limits.timeout_s
        self._events: queue.SimpleQueue[StreamEvent] = queue.SimpleQueue()
        self._restarts_before = self._restarts()
        self._steps = 0
        self._busy_rows = 0
        stats.clear()
        self._streams = [
            Stream(
                pool.status,
                slot,
                requests,
                sampling,
                eos_ids,
                version=tracker.version,
                limits=limits,
                events=self._events,
            )
            for slot, requests in self._by_slot().items()
        ]
        self._running = len(self._streams)
        for stream in self._streams:
            stream.start()

    def __iter__(self) -> Iterator[FinishedGroup]:
        try:
            yield from self._tracker.pop_finished()
            while self._tracker.unfinished:
                self._process(self._next_event())
                yield from self._tracker.pop_finished()
            self._drain()
        except BaseException:
            self.cancel()
            raise
        finally:
            self._write_stats()

    def stop(self) -> list[FinishedGroup]:
        """End early; return all groups not yielded yet, unfinished samples "aborted"."""
        self.cancel()
        self._drain()
        self._write_stats()
        return self._tracker.abort()

    def cancel(self) -> None:
        """End the streams, without waiting for the tokens that they have."""
        for stream in self._streams:
            stream.stop()

    def _by_slot(self) -> dict[int, list[Request]]:
        """Return the requests of each server; a group stays together to share its prefill."""
        by_slot: dict[int, list[Request]] = {}
        for request in self._tracker.unfinished:
            slot = (request.group_number + self._pool.first_slot) % self._pool.num_slots
            by_slot.setdefault(slot, []).append(request)
        return by_slot

    def _drain(self) -> None:
        """Process events until all streams have ended, for at most ``timeout_s``."""
        timeout_s = self._timeout_s
        if signals.requested() is not None:
            timeout_s = min(timeout_s, STOP_DRAIN_S)
        deadline = time.monotonic() + timeout_s
        while self._running:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            try:
                event = self._events.get(timeout=remaining)
            except queue.Empty:
                break
            self._process(event, stopping=True)

    def _next_event(self) -> StreamEvent:
        while True:
            signals.check()
            with suppress(queue.Empty):
                return self._events.get(timeout=signals.POLL_S)

    def _process(self, event: StreamEvent, *, stopping: bool = False) -> None:
        """Record an event. Raises EngineFailed when a stream failed, unless ``stopping``."""
        for output in event.outputs:
            self._tracker.add_tokens(output.request_id, output.token_ids, output.log_probs)
            if output.finish_reason is not None:
                self._tracker.finish(output.request_id, output.finish_reason)
        self._steps += event.steps
        self._busy_rows += event.busy_rows
        self._running -= int(event.ended)
        if stopping:
            return
        if event.failed:
            raise EngineFailed(event.failed)
        if self._running == 0 and self._tracker.unfinished:
            raise EngineFailed("the vLLM servers ended a generation before it was whole")

    def _restarts(self) -> int:
        status = self._pool.status()
        return 0 if status is None else status.restarts

    def _write_stats(self) -> None:
        status = self._pool.status()
        restarts = 0 if status is None else status.restarts - self._restarts_before
        self._stats.update(self._tracker.stats(), steps=float(self._steps))
        self._stats["busy_rows"] = self._busy_rows / max(1, self._steps * self._max_num_seqs)
        self._stats["restarts"] = float(restarts)
