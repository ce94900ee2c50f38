"""One response being generated: its tokens so far and its random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trainer.rollout.hf.sampling import uniforms
from trainer.rollout.protocol import FinishReason, Sample


@dataclass(eq=False, kw_only=True)
class Row:
    """The response ``index`` of group ``group``."""

    group: int
    index: int
    prefix: tuple[int, ...]
    """The prompt and the tokens of ``partial``."""
    partial: Sample
    """What an earlier generation sampled; its tokens may be none."""
    max_tokens: int
    """Most tokens that may still be sampled."""
    random_numbers: Iterator[float]
    """Those of the positions after ``partial``."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def sample(self, reason: FinishReason) -> Sample:
        """The whole response, ``partial`` included."""
        ids = torch.tensor(self.ids, dtype=torch.int64)
        log_probs = torch.tensor(self.log_probs, dtype=torch.float32)
        if len(self.partial.response_ids):
            ids = torch.cat([self.partial.response_ids, ids])
            log_probs = torch.cat([self.partial.log_probs, log_probs])
        return Sample(ids, log_probs, reason, self.partial.version)


def random_numbers(
    seed: int, step: int, sample: int, start: int, block: int = 64
) -> Iterator[float]:
    """The random numbers in (0, 1) of a sample's positions from ``start`` on.

    ``block``, a multiple of 4, of them are made at a time.
    """
    first = start // 4 * 4
    skip = start - first
    while True:
        yield from uniforms(seed, step, [sample], first, block)[0].tolist()[skip:]
        first += block
        skip = 0
