"""Continuous batching: new rows join when others have ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.base import signals
from trainer.rollout.hf.cohort import Cohort
from trainer.rollout.hf.decoder import Decoder, concatenate
from trainer.rollout.hf.row import Row, random_numbers
from trainer.rollout.hf.sampling import sample_tokens
from trainer.rollout.protocol import FinishedGroup, FinishReason, Group, NotFiniteError, Sample
from trainer.rollout.settings import Sampling

JOIN_SHARE = 0.25
"""Share of ``max_num_seqs`` that must be free before new rows join. Joining costs a prefill and one
more cohort per step.
"""
SIMILAR_LENGTH = 0.6
"""Prompts share a cohort, padded to its longest, when the shortest has at least this share of its
length.
"""
MIN_COHORT_ROWS = 16
"""Cohorts with fewer rows are not split by length."""
MERGE_CELLS = {"cpu": 512, "cuda": 2**15}
"""Two cohorts are merged when that adds at most this many padded cells, by kind of device: about
the cost of one more cohort's kernel calls.
"""


@dataclass
class Counters:
    """Counters behind ``RolloutEngine.stats``."""

    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: int = 0
    """Sum over the steps of the rows computed."""


class HfGeneration:
    """A ``Generation`` with the trainer's own model."""

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[Group],
        sampling: Sampling,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        seed: int,
        version: int,
    ) -> None:
        self.decoder = decoder
        self.sampling = sampling
        self.eos_ids = frozenset(eos_ids)
        self.max_num_seqs = max_num_seqs
        self.counters = Counters()
        self._cohorts: list[Cohort] = []
        self._samples: dict[int, dict[int, Sample]] = {}
        """By group that is not finished: the responses that have ended, by index."""
        self._sizes = [len(g.sample_ids) for g in groups]
        self._finished: deque[FinishedGroup] = deque()
        self._waiting: deque[list[Row]] = deque()
        """Rows that have not begun, by group."""
        for number, group in enumerate(groups):
            rows = self._make_rows(number, group, seed, version)
            if rows:
                self._waiting.append(rows)
            self._finish_if_complete(number)

    def __iter__(self) -> Iterator[FinishedGroup]:
        """Each group as soon as its last response ends."""
        while True:
            while self._finished:
                yield self._finished.popleft()
            if not (self._cohorts or self._waiting):
                return
            signals.check()
            # Samples are made here, since tensors made in inference mode can't be trained on.
            for row, reason in self._step():
                self._end(row, row.sample(reason))

    def stop(self) -> list[FinishedGroup]:
        """End early; every unfinished response is "aborted"."""
        active = [row for cohort in self._cohorts for row in cohort.rows]
        waiting = [row for rows in self._waiting for row in rows]
        for row in [*active, *waiting]:
            self._end(row, row.sample("aborted"))
        self._cohorts = []
        self._waiting.clear()
        rest = sorted(self._finished, key=lambda group: group.number)
        self._finished.clear()
        return rest

    def _make_rows(self, number: int, group: Group, seed: int, version: int) -> list[Row]:
        """The rows of a group that have tokens left to sample; other samples go to ``_samples``."""
        self._samples[number] = {}
        empty = Sample(torch.zeros(0, dtype=torch.int64), torch.zeros(0), "aborted", version)
        rows = []
        for index, sample_id in enumerate(group.sample_ids):
            partial = group.partial_samples[index] if group.partial_samples else empty
            if partial.finish_reason != "aborted":
                self._samples[number][index] = partial
                continue
            length = len(partial.response_ids)
            row = Row(
                group=number,
                index=index,
                prefix=(*group.prompt_ids, *partial.response_ids.tolist()),
                partial=partial if length else empty,
                max_tokens=self.sampling.max_response_length - length,
                random_numbers=random_numbers(seed, group.step, sample_id, length),
            )
            if row.max_tokens > 0:
                rows.append(row)
            else:
                self._samples[number][index] = row.sample("length")
        return rows

    @torch.inference_mode()
    def _step(self) -> list[tuple[Row, FinishReason]]:
        """Prefill waiting rows if there is room, otherwise sample one token for every active row.
        Returns the rows that end.
        """
        rows = self._next_rows()
        if rows:
            return self._prefill(rows)
        self._merge_cohorts()
        return self._decode()

    def _prefill(self, rows: list[Row]) -> list[tuple[Row, FinishReason]]:
        """Begin ``rows`` and sample their first tokens."""
        ended = []
        for similar in _split_by_length(rows):
            cohort = Cohort(self.decoder, similar)
            self.counters.prompt_tokens += cohort.prompt_tokens
            self._cohorts.append(cohort)
            assert cohort.first_logits is not None
            ended += self._sample([cohort], cohort.first_logits)
        return ended

    def _decode(self) -> list[tuple[Row, FinishReason]]:
        """Sample the next token of every active row in one forward pass."""
        cohorts = self._cohorts
        token = concatenate([c.token for c in cohorts])
        position = concatenate([c.position for c in cohorts])
        sizes = [len(c.rows) for c in cohorts]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if len(cohorts) == 1:
                return cohorts[0].attend(layer, query, key, value)
            parts = zip(cohorts, *(torch.split(x, sizes) for x in (query, key, value)), strict=True)
            return torch.cat([c.attend(layer, q, k, v) for c, q, k, v in parts])

        logits = self.decoder(token, position, attend)
        self.counters.steps += 1
        self.counters.rows += len(token)
        return self._sample(cohorts, logits)

    def _merge_cohorts(self) -> None:
        """Merge neighbours, the younger into the older, when one cohort costs less than two."""
        limit = MERGE_CELLS[self.decoder.device.type]
        number = 0
        while number + 1 < len(self._cohorts):
            older, younger = self._cohorts[number : number + 2]
            if older.padding_if_merged(younger) <= limit:
                older.merge(younger)
                del self._cohorts[number + 1]
            else:
                number += 1

    def _next_rows(self) -> list[Row]:
        """The waiting rows that fit now, in order; whole groups if possible."""
        free = self.max_num_seqs - sum(len(c.rows) for c in self._cohorts)
        if not self._waiting or (self._cohorts and free < max(1.0, JOIN_SHARE * self.max_num_seqs)):
            return []
        rows: list[Row] = []
        while self._waiting and len(self._waiting[0]) <= free - len(rows):
            rows += self._waiting.popleft()
        if not rows and (not self._cohorts or len(self._waiting[0]) > self.max_num_seqs):
            # A group that is larger than ``max_num_seqs`` joins in parts.
            rows = self._waiting[0][:free]
            self._waiting[0] = self._waiting[0][free:]
        return rows

    def _sample(self, cohorts: list[Cohort], logits: Tensor) -> list[tuple[Row, FinishReason]]:
        """Sample the next token of each row of ``cohorts`` from ``logits`` [rows, vocabulary] and
        drop the rows that end.
        """
        rows = [row for c in cohorts for row in c.rows]
        u: Tensor | None = None
        if not self.sampling.greedy:
            numbers = [next(row.random_numbers) for row in rows]
            u = torch.tensor(numbers, dtype=torch.float64).to(logits.device)
        token, token_log_probs = sample_tokens(logits, u, self.sampling)
        tokens = token.tolist()
        log_probs = token_log_probs.tolist()
        if not all(map(math.isfinite, log_probs)):
            raise NotFiniteError
        self.counters.tokens += len(rows)
        ended: list[tuple[Row, FinishReason]] = []
        start = 0
        for cohort in cohorts:
            end = start + len(cohort.rows)
            cohort.advance(token[start:end])
            dropped = []
            for i, row in enumerate(cohort.rows):
                row.ids.append(tokens[start + i])
                row.log_probs.append(log_probs[start + i])
                stopped = tokens[start + i] in self.eos_ids
                if stopped or len(row.ids) == row.max_tokens:
                    dropped.append(i)
                    ended.append((row, "stop" if stopped else "length"))
            if dropped:
                cohort.drop(dropped)
            start = end
        self._cohorts = [c for c in self._cohorts if c.rows]
        return ended

    def _end(self, row: Row, sample: Sample) -> None:
        self._samples[row.group][row.index] = sample
        self._finish_if_complete(row.group)

    def _finish_if_complete(self, number: int) -> None:
        """Hand out the group when all of its responses have ended."""
        if len(self._samples[number]) == self._sizes[number]:
            by_index = self._samples.pop(number)
            samples = [by_index[i] for i in range(len(by_index))]
            self._finished.append(FinishedGroup(number=number, samples=samples))


def _split_by_length(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows sorted by prompt, split where the next prompt is much shorter and both parts have enough
    rows.
    """
    rows = sorted(rows, key=lambda row: (-len(row.prefix), row.group, row.index))
    start = 0
    for i, row in enumerate(rows):
        shorter = len(row.prefix) < SIMILAR_LENGTH * len(rows[start].prefix)
        enough = i - start >= MIN_COHORT_ROWS and len(rows) - i >= MIN_COHORT_ROWS
        if shorter and enough:
            yield rows[start:i]
            start = i
    if start < len(rows):
        yield rows[start:]
