"""Continuous batching: sequences join when others have ended, and a group is handed out with its
last response.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.rollout.hf.cohort import Cohort
from trainer.rollout.hf.network import Network, joined
from trainer.rollout.hf.row import Row, random_numbers
from trainer.rollout.hf.sampling import choose
from trainer.rollout.protocol import Finished, FinishReason, Group, NotFiniteError, Sample
from trainer.rollout.settings import Sampling

JOIN = 0.25
"""Share of the sequences that must have ended before others join: one prefill, and one cohort more
to attend to.
"""
SIMILAR = 0.6
"""Prompts share a cohort, padded to its longest, when the shortest has at least this share of its
length.
"""
LEAST_ROWS = 16
"""Rows below which a cohort isn't split by length."""


PADS = {"cpu": 512, "cuda": 2**15}
"""Cohorts become one when that costs at most so many padded cells, by kind of device: about what
the calls of one more cohort cost.
"""


@dataclass
class Counters:
    """What :meth:`trainer.rollout.protocol.RolloutEngine.stats` tells of a generation."""

    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: int = 0


class HfGeneration:
    """See :class:`trainer.rollout.protocol.Generation`."""

    def __init__(
        self,
        network: Network,
        groups: Sequence[Group],
        sampling: Sampling,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        seed: int,
        version: int,
    ) -> None:
        self.network, self.sampling = network, sampling
        self.eos_ids, self.max_num_seqs = frozenset(eos_ids), max_num_seqs
        self.counters = Counters()
        self._cohorts: list[Cohort] = []
        self._samples: dict[int, dict[int, Sample]] = {}
        """Of each group not handed out: the responses that have ended, by place."""
        self._sizes = [len(g.sample_ids) for g in groups]
        self._ready: deque[Finished] = deque()
        self._waiting: deque[list[Row]] = deque()
        for number, group in enumerate(groups):
            rows = self._begin(number, group, seed, version)
            if rows:
                self._waiting.append(rows)
            self._hand_out(number)

    def __iter__(self) -> Iterator[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        while True:
            while self._ready:
                yield self._ready.popleft()
            if not (self._cohorts or self._waiting):
                return
            # Made here, not below: what is made in inference mode can't be trained on.
            for row, reason in self._advance():
                self._end(row, row.sample(reason))

    def stop(self) -> list[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        for row in [row for c in self._cohorts for row in c.rows] + [
            row for rows in self._waiting for row in rows
        ]:
            self._end(row, row.sample("aborted"))
        self._cohorts = []
        self._waiting.clear()
        left = sorted(self._ready, key=lambda f: f.number)
        self._ready.clear()
        return left

    def _begin(self, number: int, group: Group, seed: int, version: int) -> list[Row]:
        """The rows of a group that are still to be drawn; those that are not go to ``_samples``."""
        self._samples[number] = {}
        none = Sample(torch.zeros(0, dtype=torch.int64), torch.zeros(0), "aborted", version)
        rows = []
        for place, sample_id in enumerate(group.sample_ids):
            begun = group.begun[place] if group.begun else none
            if begun.finish_reason != "aborted":
                self._samples[number][place] = begun
                continue
            length = len(begun.response_ids)
            row = Row(
                group=number,
                place=place,
                prefix=(*group.prompt_ids, *begun.response_ids.tolist()),
                begun=begun if length else none,
                room=self.sampling.max_response_length - length,
                draws=random_numbers(seed, group.step, sample_id, length),
            )
            if row.room > 0:
                rows.append(row)
            else:
                self._samples[number][place] = row.sample("length")
        return rows

    @torch.inference_mode()
    def _advance(self) -> list[tuple[Row, FinishReason]]:
        """Newcomers, if there is room for them; else one token of every row. The rows that end with
        it.
        """
        if newcomers := self._newcomers():
            ended = []
            for rows in _alike(newcomers):
                cohort = Cohort(self.network, rows)
                self.counters.prompt_tokens += cohort.prompt_tokens
                self._cohorts.append(cohort)
                assert cohort.first_logits is not None
                ended += self._draw([cohort], cohort.first_logits)
            return ended
        self._unite()
        cohorts = self._cohorts
        token = joined([c.token for c in cohorts])
        position = joined([c.position for c in cohorts])
        sizes = [len(c.rows) for c in cohorts]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if len(cohorts) == 1:
                return cohorts[0].attend(layer, query, key, value)
            parts = zip(cohorts, *(torch.split(x, sizes) for x in (query, key, value)), strict=True)
            return torch.cat([c.attend(layer, q, k, v) for c, q, k, v in parts])

        logits = self.network(token, position, attend)
        self.counters.steps += 1
        self.counters.rows += len(token)
        return self._draw(cohorts, logits)

    def _unite(self) -> None:
        """Join neighbours, the older first, where one cohort costs less than two."""
        limit, number = PADS[self.network.device.type], 0
        while number + 1 < len(self._cohorts):
            older, younger = self._cohorts[number : number + 2]
            if older.pads(younger) <= limit:
                older.absorb(younger)
                del self._cohorts[number + 1]
            else:
                number += 1

    def _newcomers(self) -> list[Row]:
        """The next rows in order that find a place; whole groups where they can."""
        free = self.max_num_seqs - sum(len(c.rows) for c in self._cohorts)
        if not self._waiting or (self._cohorts and free < max(1.0, JOIN * self.max_num_seqs)):
            return []
        rows: list[Row] = []
        while self._waiting and len(self._waiting[0]) <= free - len(rows):
            rows += self._waiting.popleft()
        if not rows and (not self._cohorts or len(self._waiting[0]) > self.max_num_seqs):
            # A group that is larger than the engine comes in parts.
            rows, self._waiting[0] = self._waiting[0][:free], self._waiting[0][free:]
        return rows

    def _draw(self, cohorts: list[Cohort], logits: Tensor) -> list[tuple[Row, FinishReason]]:
        """The next token of each row of ``cohorts``; rows that end with it leave."""
        rows = [row for c in cohorts for row in c.rows]
        u = None
        if not self.sampling.greedy:
            u = torch.tensor([next(row.draws) for row in rows], dtype=torch.float64).to(
                logits.device
            )
        token, picked = choose(logits, u, self.sampling)
        tokens, log_probs = token.tolist(), picked.tolist()
        if not all(map(math.isfinite, log_probs)):
            raise NotFiniteError
        self.counters.tokens += len(rows)
        ended: list[tuple[Row, FinishReason]] = []
        start = 0
        for cohort in cohorts:
            end = start + len(cohort.rows)
            cohort.advance(token[start:end])
            gone = []
            for i, row in enumerate(cohort.rows):
                row.ids.append(tokens[start + i])
                row.log_probs.append(log_probs[start + i])
                stop = tokens[start + i] in self.eos_ids
                if stop or len(row.ids) == row.room:
                    gone.append(i)
                    ended.append((row, "stop" if stop else "length"))
            if gone:
                cohort.drop(gone)
            start = end
        self._cohorts = [c for c in self._cohorts if c.rows]
        return ended

    def _end(self, row: Row, sample: Sample) -> None:
        self._samples[row.group][row.place] = sample
        self._hand_out(row.group)

    def _hand_out(self, number: int) -> None:
        """Make the group ready when all of its responses have ended."""
        if len(self._samples[number]) == self._sizes[number]:
            samples = self._samples.pop(number)
            self._ready.append(
                Finished(number=number, samples=[samples[i] for i in range(len(samples))])
            )


def _alike(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows of equal prompts side by side, cut where the next prompt is much shorter if both sides
    have enough rows.
    """
    rows = sorted(rows, key=lambda row: (-len(row.prefix), row.group, row.place))
    start = 0
    for i, row in enumerate(rows):
        shorter = len(row.prefix) < SIMILAR * len(rows[start].prefix)
        if shorter and i - start >= LEAST_ROWS and len(rows) - i >= LEAST_ROWS:
            yield rows[start:i]
            start = i
    if start < len(rows):
        yield rows[start:]
