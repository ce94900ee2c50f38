"""A generation of an engine in the trainer's process, stepped whenever the next group is requested.

Where several ranks share the engine (``Shards``), all of them take every step. The protocol:

1. ``generate`` is called on all of them. They exchange their requests, and each begins all of them
   in the same order.
2. A *round* is one exchange (does a rank leave? did all draw the same tokens?), the abort of the
   unfinished requests of ranks that leave, and one step of the engine if any request is unfinished.
   All ranks know which are, so they stop together.
3. A rank runs rounds while it waits for a group of its own. Before it yields its last group, or
   when it has none, it runs rounds until no request is unfinished on any rank: after that no other
   rank needs it. A rank that leaves early (``stop``) says so in the exchange and then runs rounds
   as well.

So a rank that waits in a round waits for ranks that are busy with a group they were given, which
the protocol of ``Generation`` obliges to come back; and no rank goes on to another exchange of the
trainer before all have ended. All ranks notice logits that are not finite in the same round. A rank
whose engine fails in a step closes it, which ends the others' wait within theirs (between GPUs only
the time-out does); any other error of one rank ends it with its process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from trainer.base import signals
from trainer.rollout.protocol import EngineFailed, FinishedGroup, NotFiniteError
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.core import RequestOutput
from trainer.rollout.vllm.engine.requests import Request, RequestTracker
from trainer.rollout.vllm.in_process.request_exchange import gather_requests
from trainer.rollout.vllm.in_process.shards import Shards

SEPARATOR = "/"
"""Between the shard and the request id, in the engine's id of a request."""


class SteppedEngine(Protocol):
    """The part of :class:`trainer.rollout.vllm.engine.core.Core` that a generation needs."""

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""

    def add_request(self, request: Request, sampling: Sampling, eos_ids: list[int]) -> None:
        """Begin a request."""

    def step(self) -> list[RequestOutput]:
        """Draw tokens; return the requests that ended."""

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; return the tokens of the unfinished ones."""

    def close(self) -> None:
        """Release everything."""


class InProcessGeneration:
    """A :class:`trainer.rollout.protocol.Generation` under way."""

    def __init__(
        self,
        core: SteppedEngine,
        shards: Shards,
        tracker: RequestTracker,
        sampling: Sampling,
        eos_ids: list[int],
        *,
        max_num_seqs: int,
        stats: dict[str, float],
    ) -> None:
        """``stats`` is filled when the generation ends or is stopped."""
        self._core = core
        self._shards = shards
        self._tracker = tracker
        self._max_num_seqs = max_num_seqs
        self._stats = stats
        self._steps = 0
        self._busy_rows = 0
        self._checksum = 0
        """Of all tokens that ended requests drew, to compare between shards."""
        self._shard_of: dict[str, int] = {}
        """The shard of each unfinished request, by the engine's id."""
        stats.clear()
        for shard, request in gather_requests(shards, tracker.unfinished):
            engine_id = f"{shard}{SEPARATOR}{request.request_id}"
            core.add_request(request.with_id(engine_id), sampling, eos_ids)
            self._shard_of[engine_id] = shard
        if not tracker.unfinished:  # nobody may iterate on this rank, and the others need its steps
            self._run_rounds()

    def __iter__(self) -> Iterator[FinishedGroup]:
        try:
            while self._tracker.unfinished:
                yield from self._tracker.pop_finished()
                signals.check()  # a rank that leaves says so in the next round, see ``stop``
                self._run_round()
            self._run_rounds()
            yield from self._tracker.pop_finished()
        finally:
            self._write_stats()

    def stop(self) -> list[FinishedGroup]:
        """End early; return all groups not yielded yet, unfinished samples "aborted"."""
        self._run_rounds(leaving=True)
        self._write_stats()
        return self._tracker.abort()

    def _run_rounds(self, *, leaving: bool = False) -> None:
        """Run rounds until no request is unfinished on any rank."""
        while self._shard_of:
            self._run_round(leaving=leaving)

    def _run_round(self, *, leaving: bool = False) -> None:
        """Exchange, abort the requests of leaving ranks, and step.

        Raises EngineFailed when shards drew different tokens or the engine fails, NotFiniteError
        when logits are not finite.
        """
        rows = self._shards.gather([int(leaving), self._checksum, len(self._shard_of)])
        if any(row[1:] != rows[0][1:] for row in rows):
            raise EngineFailed("the shards of the vllm engine did not draw the same tokens")
        try:
            for shard, row in enumerate(rows):
                if row[0]:
                    self._abort_shard(shard)
            if self._shard_of:
                self._step()
        except NotFiniteError:
            self._core.abort_requests(list(self._shard_of))
            self._shard_of.clear()
            raise

    def _abort_shard(self, shard: int) -> None:
        engine_ids = [key for key, owner in self._shard_of.items() if owner == shard]
        for output in self._core.abort_requests(engine_ids):
            self._record(output)
        for engine_id in engine_ids:
            self._shard_of.pop(engine_id)

    def _step(self) -> None:
        self._busy_rows += min(self._max_num_seqs, self._core.num_unfinished)
        self._steps += 1
        try:
            outputs = self._core.step()
        except Exception as error:
            if self._shards.size > 1:
                # The others are within this step, and would wait in it as long as a group exists.
                with suppress(Exception):
                    self._core.close()
            raise EngineFailed(
                f"vLLM failed while it generated: {type(error).__name__}: {error}"
            ) from error
        for output in outputs:
            self._record(output)

    def _record(self, output: RequestOutput) -> None:
        """Give this rank's output to the tracker. Raises NotFiniteError on all ranks alike."""
        if not all(map(math.isfinite, output.log_probs)):
            raise NotFiniteError
        drawn = f"{output.request_id}:{output.token_ids}"
        self._checksum = zlib.crc32(drawn.encode(), self._checksum)
        shard, request_id = output.request_id.split(SEPARATOR)
        if int(shard) == self._shards.index:
            self._tracker.add_tokens(request_id, output.token_ids, output.log_probs)
            if output.finish_reason is not None:
                self._tracker.finish(request_id, output.finish_reason)
        if output.finish_reason is not None:
            self._shard_of.pop(output.request_id)

    def _write_stats(self) -> None:
        self._stats.update(self._tracker.stats(), steps=float(self._steps), restarts=0.0)
        self._stats["busy_rows"] = self._busy_rows / max(1, self._steps * self._max_num_seqs)
