"""The engine ``vllm_server``: vLLM in processes of its own, asked over HTTP."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from trainer.base.errors import UserError
from trainer.rollout.protocol import EngineFailed, Finished, Generation, Group
from trainer.rollout.settings import KEY, Sampling
from trainer.rollout.vllm.client.pool import Fleet
from trainer.rollout.vllm.client.status_file import State
from trainer.rollout.vllm.client.stream import Event, Stream
from trainer.rollout.vllm.client.supervisor import Limits
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.requests import Request, Tally

POLL_S = 0.001
"""Seconds between two looks at the servers' state, at first."""


class VllmServerEngine:
    """This rank's view of the servers of ``fleet``. All ranks call ``start``, ``update_weights``
    and ``close``.
    """

    shares_weights = False

    def __init__(
        self, fleet: Fleet, options: Options, *, eos_ids: Sequence[int], limits: Limits
    ) -> None:
        self.fleet, self.options, self.eos_ids, self.limits = fleet, options, eos_ids, limits
        self.version = 0
        self._open: _Streams | None = None
        self._stats: dict[str, float] = {}

    def start(self) -> None:
        """Start the servers and wait until all are up.

        Raises :class:`UserError` for a model or a setting that vLLM refuses, EngineFailed when they
        don't come up.
        """
        self.fleet.start(self.options)
        self._wait(lambda state: all(s.address is not None for s in state.seats))

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        tally = Tally(
            groups,
            sampling,
            seed=seed,
            version=self.version,
            max_model_len=self.options.max_model_len,
        )
        parts: list[list[Request]] = [[] for _ in range(self.fleet.seats)]
        for request in tally.open:  # a group stays together: its prompt is computed once
            parts[(request.number + self.fleet.first) % self.fleet.seats].append(request)
        self._open = _Streams(self, tally, parts, sampling, self._stats)
        return self._open

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`trainer.rollout.protocol.RolloutEngine`. Returns when every server has
        them.
        """
        self.fleet.take(weights, version)
        self.version = version
        self._wait(lambda state: all(s.version == version for s in state.seats))

    def sleep(self) -> None:
        """Servers have devices of their own: they give nothing back."""

    def wake(self) -> None:
        """Nothing to take."""

    def stats(self) -> Mapping[str, float]:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        return dict(self._stats)

    def close(self) -> None:
        """End the servers, and a generation that is still under way."""
        if self._open is not None:
            self._open.cancel()
        self.fleet.close()

    def _wait(self, ready: Callable[[State], bool]) -> None:
        """Until the servers are ``ready``; each start of one, and each restart, has the whole
        time.
        """
        patience = self.limits.start_timeout_s + self.limits.timeout_s
        deadline, seen = time.monotonic() + patience, ""
        pause = POLL_S
        while True:
            state = self.fleet.read()
            if state is not None and state.refused:
                raise UserError(state.refused)
            if state is not None and state.failed:
                raise EngineFailed(state.failed)
            if state is not None and ready(state):
                return
            now = "" if state is None else str(state.seats)
            if now != seen:
                deadline, seen = time.monotonic() + patience, now
            elif time.monotonic() > deadline:
                raise EngineFailed(
                    f"vLLM servers are not ready after {patience:g} s "
                    f"({KEY}.server.start_timeout_s + timeout_s), "
                    f"on {self.fleet.place}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, self.fleet.poll_s)


class _Streams:
    """A generation under way: servers draw whether or not anybody is asking."""

    def __init__(
        self,
        engine: VllmServerEngine,
        tally: Tally,
        parts: Sequence[Sequence[Request]],
        sampling: Sampling,
        stats: dict[str, float],
    ) -> None:
        self._tally, self._stats, self._fleet = tally, stats, engine.fleet
        self._rows, self._patience = engine.options.max_num_seqs, engine.limits.timeout_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        state = self._fleet.read()
        self._restarts = 0 if state is None else state.restarts
        self._steps = self._busy = 0
        stats.clear()
        self._streams = [
            Stream(
                self._fleet.read,
                number,
                part,
                sampling,
                engine.eos_ids,
                version=engine.version,
                limits=engine.limits,
                events=self._events,
            )
            for number, part in enumerate(parts)
            if part
        ]
        self._running = len(self._streams)
        for stream in self._streams:
            stream.start()

    def __iter__(self) -> Iterator[Finished]:
        try:
            yield from self._tally.take()
            while self._tally.open:
                self._hear(self._events.get())
                yield from self._tally.take()
            self._last_words()
        except BaseException:
            self.cancel()
            raise
        finally:
            self._count()

    def stop(self) -> list[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        self.cancel()
        self._last_words()
        self._count()
        return self._tally.stop()

    def _last_words(self) -> None:
        deadline = time.monotonic() + self._patience
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                self._hear(self._events.get(timeout=left), stopping=True)
            except queue.Empty:
                break

    def cancel(self) -> None:
        """End the streams, without waiting for what they have."""
        for stream in self._streams:
            stream.stop()

    def _hear(self, event: Event, *, stopping: bool = False) -> None:
        for drawn in event.drawn:
            self._tally.add(drawn.key, drawn.token_ids, drawn.log_probs)
            if drawn.reason is not None:
                self._tally.end(drawn.key, drawn.reason)
        self._steps += event.steps
        self._busy += event.busy
        self._running -= event.ended
        if event.failed and not stopping:
            raise EngineFailed(event.failed)
        if self._running == 0 and self._tally.open and not stopping:
            raise EngineFailed("the vLLM servers ended a generation before it was whole")

    def _count(self) -> None:
        state = self._fleet.read()
        self._stats.update(self._tally.stats(), steps=float(self._steps))
        self._stats["busy_rows"] = self._busy / max(1, self._steps * self._rows)
        self._stats["restarts"] = float(0 if state is None else state.restarts - self._restarts)
