"""The reference's log-probs of finished responses, computed while a server generates the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.config.schema import Rollout
from trainer.data import Batch
from trainer.experience.batch import to_batch
from trainer.experience.prompt_queue import PromptRequest
from trainer.experience.sampler import Rollouts
from trainer.rewards import Score
from trainer.rollout import Sample

LogProbs = Callable[[Batch], Tensor]
"""From a batch to the log-probs of its trained tokens, float32 [tokens], on this rank alone."""


def runs_early(rollout: Rollout) -> bool:
    """Whether responses are generated outside of this process during the step that trains on them.

    An engine in the trainer's own process leaves no time to compute anything else, and with
    ``one_step_off`` all responses are finished when the step begins.
    """
    return rollout.name == "vllm_server" and rollout.streaming and not rollout.one_step_off


class EarlyReference:
    """Collects finished prompts of this rank and runs the reference on them once a micro-batch is
    full. An instance serves one step; it is the ``on_finished`` of ``RolloutCollector.collect``.

    Which responses share a micro-batch follows the order of finishing. Log-probs therefore differ
    by rounding from one run to the next, as the samples of a server may anyway.
    """

    def __init__(self, log_probs: LogProbs, *, budget: int, n: int) -> None:
        """``budget``: tokens of a micro-batch of this rank; ``n``: responses per prompt."""
        self._log_probs = log_probs
        self._budget = budget
        self._n = n
        self._pending: dict[int, Sequence[Sample]] = {}
        self._pending_tokens = 0
        self._columns: dict[int, list[Tensor]] = {}

    def __call__(
        self, requests: Sequence[PromptRequest], index: int, samples: Sequence[Sample]
    ) -> None:
        """Take the finished ``samples`` of ``requests[index]``."""
        prompt_length = len(requests[index].example.prompt_ids)
        self._pending[index] = samples
        self._pending_tokens += sum(prompt_length + len(s.response_ids) for s in samples)
        if self._pending_tokens >= self._budget:
            self._run(requests)

    def attach(self, batch: Batch, rollouts: Rollouts, requests: Sequence[PromptRequest]) -> None:
        """Attach the column ``ref_log_probs`` [tokens] to this rank's ``batch`` of ``rollouts``.

        Responses that are still pending go through the reference first.
        """
        self._run(requests)
        parts = [torch.zeros(0)]
        for row, index in enumerate(rollouts.prompt_indices):
            parts.append(self._columns[index][row % self._n])
        batch.columns["ref_log_probs"] = torch.cat(parts)

    def _run(self, requests: Sequence[PromptRequest]) -> None:
        """Compute the log-probs of all pending responses."""
        if not self._pending:
            return
        rollouts = Rollouts()
        for index, samples in self._pending.items():
            rollouts.prompt_indices += [index] * self._n
            rollouts.samples += samples
            rollouts.scores += [Score(value=0.0)] * self._n
        batch = to_batch(rollouts, requests, self._n)
        parts = torch.split(self._log_probs(batch), batch.lengths.tolist())
        for k, index in enumerate(self._pending):
            self._columns[index] = list(parts[k * self._n : (k + 1) * self._n])
        self._pending = {}
        self._pending_tokens = 0
