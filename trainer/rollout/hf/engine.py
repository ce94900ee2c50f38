"""The engine ``hf``: the trainer's own model generates, no second copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.rollout.hf.generator import Generator
from trainer.rollout.protocol import Finished, Generation, Group, Sample
from trainer.rollout.settings import Sampling


class HfEngine:
    """Generates with ``module`` itself, whose weights must be whole meanwhile (ZeRO 3: gathered around it).

    At most ``max_num_seqs`` sequences at once. The module is called in eval mode and given back in the mode it was in.
    """

    shares_weights = True

    def __init__(self, module: nn.Module, *, eos_ids: Sequence[int], max_num_seqs: int) -> None:
        self.module, self.eos_ids, self.max_num_seqs = module, list(eos_ids), max_num_seqs
        self.version = 0
        self._stats: dict[str, float] = {}

    def start(self) -> None:
        """Nothing to load."""

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        generator = Generator(
            self.module, eos_ids=self.eos_ids, pad_id=0, sampling=sampling, batch_size=self.max_num_seqs
        )
        generator._check([g.prompt_ids for g in groups])
        return _Static(generator, groups, seed, self.version, self._stats)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The weights are the trainer's already; no cache outlives a generation."""
        for name, _ in weights:
            raise ValueError(f"the hf engine reads the trainer's own weights, yet it was given {name}")
        self.version = version

    def sleep(self) -> None:
        """Nothing is held between generations."""

    def wake(self) -> None:
        """Nothing to take."""

    def stats(self) -> Mapping[str, float]:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        return dict(self._stats)

    def close(self) -> None:
        """Nothing to end."""


class _Static:
    def __init__(
        self, generator: Generator, groups: Sequence[Group], seed: int, version: int, stats: dict[str, float]
    ) -> None:
        self._generator, self._groups, self._seed, self._version, self._stats = generator, groups, seed, version, stats
        self._next = 0

    def __iter__(self) -> Iterator[Finished]:
        size = self._generator.batch_size or len(self._groups)
        while self._next < len(self._groups):
            first, rows = self._next, 0
            while self._next < len(self._groups) and (rows == 0 or rows + self._wanted(self._next) <= size):
                rows += self._wanted(self._next)
                self._next += 1
            yield from self._batch(range(first, self._next))

    def _wanted(self, number: int) -> int:
        return len(self._groups[number].sample_ids)

    def _batch(self, numbers: range) -> list[Finished]:
        results: list[Finished] = []
        for step in sorted({self._groups[i].step for i in numbers}):
            mine = [i for i in numbers if self._groups[i].step == step]
            prompts = [self._groups[i].prompt_ids for i in mine for _ in self._groups[i].sample_ids]
            ids = [k for i in mine for k in self._groups[i].sample_ids]
            drawn = iter(self._generator.generate(prompts, ids, self._seed, step))
            for i in mine:
                group: Any = self._groups[i]
                fresh = [
                    Sample(s.response_ids, s.log_probs, s.finish_reason, self._version)
                    for s in (next(drawn) for _ in group.sample_ids)
                ]
                kept = group.begun or fresh
                results.append(
                    Finished(
                        number=i,
                        samples=[
                            f if b.finish_reason == "aborted" or not group.begun else b
                            for f, b in zip(fresh, kept, strict=True)
                        ],
                    )
                )
        self._stats["tokens"] = float(sum(len(s.response_ids) for r in results for s in r.samples))
        return results

    def stop(self) -> list[Finished]:
        import torch

        none = Sample(torch.zeros(0, dtype=torch.int64), torch.zeros(0), "aborted", self._version)
        left = range(self._next, len(self._groups))
        self._next = len(self._groups)
        return [Finished(number=i, samples=list(self._groups[i].begun) or [none] * self._wanted(i)) for i in left]
