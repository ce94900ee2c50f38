"""One response on its way: what it has drawn, and its random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trainer.rollout.hf.sampling import uniforms
from trainer.rollout.protocol import FinishReason, Sample


@dataclass(eq=False, kw_only=True)
class Row:
    """The response ``place`` of group ``group``. ``begun``: what an earlier generation drew of
    it.
    """

    group: int
    place: int
    prefix: tuple[int, ...]
    """Prompt and the tokens of ``begun``."""
    begun: Sample
    room: int
    """Most tokens that may still be drawn."""
    draws: Iterator[float]
    """Random numbers of the positions behind ``begun``."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def sample(self, reason: FinishReason) -> Sample:
        """All that was drawn, now and before."""
        ids = torch.tensor(self.ids, dtype=torch.int64)
        log_probs = torch.tensor(self.log_probs, dtype=torch.float32)
        if len(self.begun.response_ids):
            ids = torch.cat([self.begun.response_ids, ids])
            log_probs = torch.cat([self.begun.log_probs, log_probs])
        return Sample(ids, log_probs, reason, self.begun.version)


def random_numbers(
    seed: int, step: int, sample: int, start: int, block: int = 64
) -> Iterator[float]:
    """Those of the positions from ``start`` on, inside (0, 1), drawn ``block`` (a multiple of 4) at
    a time.
    """
    first = start // 4 * 4
    skip = start - first
    while True:
        yield from uniforms(seed, step, [sample], first, block)[0].tolist()[skip:]
        first, skip = first + block, 0
