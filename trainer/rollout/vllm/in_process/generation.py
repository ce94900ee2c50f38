"""A generation of an engine in the trainer's process: it takes a step when somebody asks for the
next group.

Where several ranks share the engine (``Shards``), a step is one that all of them take. The
protocol:

1. ``generate`` is called on all of them; each tells its requests, and each begins those of all in one order.
2. A *turn* is one exchange (does a rank leave? did all draw the same?), the end of what those who leave have open, and
   one step of the engine if anything is open still. What is open is known to all: they stop turning together.
3. A rank turns while it waits for a group of its own. Before it hands out its last one, and when it has none, it turns
   until nothing is open anywhere: after that nobody need come back. One that leaves early (``stop``) says so and then
   turns as well.

So whoever waits in a turn waits for ranks that are busy with a group they were handed, and are
bound by the protocol of ``Generation`` to come back; and no rank goes on to an exchange of the
trainer's before all have ended. Logits that are not finite are seen by all in the same turn. A rank
whose engine fails in a step closes it, which ends the others' wait in the middle of theirs (between
GPUs only the time-out does); any other error of one rank ends it with its process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.rollout.protocol import EngineFailed, Finished, NotFiniteError
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.core import Drawn
from trainer.rollout.vllm.engine.requests import Request, Tally
from trainer.rollout.vllm.in_process.shards import Shards

SEPARATOR = "/"
FIELDS = ("number", "place", "max_tokens", "step", "sample_id", "position")
"""Of a request, in the order in which they are shared, before the prompt's length and the
prompt.
"""


class Stepped(Protocol):
    """What of :class:`trainer.rollout.vllm.engine.core.Core` is needed here."""

    @property
    def open(self) -> int:
        """Requests under way."""

    def add(self, request: Request, sampling: Sampling, eos_ids: list[int]) -> None:
        """Begin one."""

    def step(self) -> list[Drawn]:
        """Those that ended by it."""

    def abort(self, keys: Iterable[str]) -> list[Drawn]:
        """End some."""

    def close(self) -> None:
        """Give everything back."""


class Steps:
    """A generation under way. ``rows``: requests that the engine draws at once; ``stats`` is
    filled.
    """

    def __init__(
        self,
        core: Stepped,
        shards: Shards,
        tally: Tally,
        sampling: Sampling,
        eos_ids: list[int],
        *,
        rows: int,
        stats: dict[str, float],
    ) -> None:
        self._core, self._shards, self._tally, self._rows, self._stats = (
            core,
            shards,
            tally,
            rows,
            stats,
        )
        self._steps = self._busy = self._sum = 0
        self._open: dict[str, int] = {}
        """Key of the engine's: whose it is."""
        stats.clear()
        for whose, request in _everybodys(shards, tally.open):
            key = f"{whose}{SEPARATOR}{request.key}"
            core.add(request.renamed(key), sampling, eos_ids)
            self._open[key] = whose
        if not tally.open:  # nobody may ask this rank again
            self._drive()

    def __iter__(self) -> Iterator[Finished]:
        try:
            while self._tally.open:
                yield from self._tally.take()
                self._turn()
            self._drive()
            yield from self._tally.take()
        finally:
            self._count()

    def stop(self) -> list[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        self._drive(leaving=True)
        self._count()
        return self._tally.stop()

    def _drive(self, *, leaving: bool = False) -> None:
        """Until nothing is open anywhere."""
        while self._open:
            self._turn(leaving=leaving)

    def _turn(self, *, leaving: bool = False) -> None:
        told = self._shards.tell([int(leaving), self._sum, len(self._open)])
        if any(row[1:] != told[0][1:] for row in told):
            raise EngineFailed("the shards of the vllm engine did not draw the same tokens")
        try:
            for whose, row in enumerate(told):
                if row[0]:
                    self._abort(whose)
            if self._open:
                self._step()
        except NotFiniteError:
            self._core.abort(list(self._open))
            self._open.clear()
            raise

    def _abort(self, whose: int) -> None:
        keys = [key for key, owner in self._open.items() if owner == whose]
        for drawn in self._core.abort(keys):
            self._take(drawn)
        for key in keys:
            self._open.pop(key)

    def _step(self) -> None:
        self._busy += min(self._rows, self._core.open)
        self._steps += 1
        try:
            ended = self._core.step()
        except Exception as error:
            if (
                self._shards.size > 1
            ):  # the others wait in the middle of the step, for as long as there is a group
                with suppress(Exception):
                    self._core.close()
            raise EngineFailed(
                f"vLLM failed while it generated: {type(error).__name__}: {error}"
            ) from error
        for drawn in ended:
            self._take(drawn)

    def _take(self, drawn: Drawn) -> None:
        """Into the books, if it is this rank's own. Raises NotFiniteError on all ranks alike."""
        if not all(map(math.isfinite, drawn.log_probs)):
            raise NotFiniteError
        self._sum = zlib.crc32(f"{drawn.key}:{drawn.token_ids}".encode(), self._sum)
        whose, key = drawn.key.split(SEPARATOR)
        if int(whose) == self._shards.index:
            self._tally.add(key, drawn.token_ids, drawn.log_probs)
            if drawn.reason is not None:
                self._tally.end(key, drawn.reason)
        if drawn.reason is not None:
            self._open.pop(drawn.key)

    def _count(self) -> None:
        self._stats.update(self._tally.stats(), steps=float(self._steps), restarts=0.0)
        self._stats["busy_rows"] = self._busy / max(1, self._steps * self._rows)


def _everybodys(shards: Shards, mine: list[Request]) -> list[tuple[int, Request]]:
    """Every shard's requests with its number: of each its first group, then the second ones; groups
    stay together.
    """
    if shards.size == 1:
        return [(0, request) for request in mine]
    told = [(whose, _unpacked(row)) for whose, row in enumerate(shards.share(_packed(mine)))]
    turns = [
        (turn, whose, group)
        for whose, requests in told
        for turn, group in enumerate(_groups(requests))
    ]
    return [
        (whose, request)
        for _, whose, group in sorted(turns, key=lambda t: t[:2])
        for request in group
    ]


def _groups(requests: list[Request]) -> list[list[Request]]:
    found: dict[int, list[Request]] = {}
    for request in requests:
        found.setdefault(request.number, []).append(request)
    return list(found.values())


def _packed(requests: list[Request]) -> Tensor:
    rows = [
        [*(getattr(r, name) for name in FIELDS), len(r.prompt_ids), *r.prompt_ids] for r in requests
    ]
    seeds = np.array([r.seed % 2**64 for r in requests], dtype=np.uint64).view(np.int64)
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    return torch.from_numpy(np.concatenate([[len(requests)], seeds, flat]))


def _unpacked(values: Tensor) -> list[Request]:
    numbers = values.numpy()
    count = int(numbers[0])
    seeds, flat = numbers[1 : 1 + count].view(np.uint64).tolist(), numbers[1 + count :].tolist()
    found, at = [], 0
    for seed in seeds:
        fields = dict(zip(FIELDS, flat[at : at + len(FIELDS)], strict=True))
        start = at + len(FIELDS) + 1
        at = start + flat[start - 1]
        key = f"{fields['number']}.{fields['place']}"
        found.append(Request(key=key, prompt_ids=flat[start:at], seed=seed, **fields))
    return found
