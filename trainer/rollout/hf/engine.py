"""The engine ``hf``: the trainer's own model generates, no second copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from trainer.base.errors import UserError
from trainer.rollout.hf.generation import HfGeneration
from trainer.rollout.hf.network import Network
from trainer.rollout.protocol import Group
from trainer.rollout.settings import KEY, Sampling


class HfEngine:
    """Generates with ``module`` itself, a Llama, Qwen2 or Qwen3 of transformers in whatever numeric
    type it has.

    Its weights must be whole meanwhile (ZeRO 3: gathered around the generation); neither they nor
    the mode of the module are changed. Samples don't depend on ``max_num_seqs``, the order of
    groups or the number of ranks, but for rounding: a random number within about 1e-6 of the border
    between two tokens can go either way.
    """

    shares_weights = True

    def __init__(self, module: nn.Module, *, eos_ids: Sequence[int], max_num_seqs: int) -> None:
        if not eos_ids:
            raise ValueError("generation needs at least one end token")
        self.module, self.eos_ids, self.max_num_seqs = module, list(eos_ids), max_num_seqs
        self.version = 0
        self._last: HfGeneration | None = None

    def start(self) -> None:
        """Nothing to load."""

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> HfGeneration:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        self._check(groups, sampling)
        self._last = HfGeneration(
            Network(self.module),
            groups,
            sampling,
            eos_ids=self.eos_ids,
            max_num_seqs=self.max_num_seqs,
            seed=seed,
            version=self.version,
        )
        return self._last

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The weights are the trainer's already; no cache outlives a generation."""
        for name, _ in weights:
            raise ValueError(
                f"the hf engine reads the trainer's own weights, yet it was given {name}"
            )
        self.version = version

    def sleep(self) -> None:
        """Nothing is held between generations."""

    def wake(self) -> None:
        """Nothing to take."""

    def stats(self) -> Mapping[str, float]:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        if self._last is None:
            return {}
        c = self._last.counters
        busy = c.rows / (max(c.steps, 1) * self.max_num_seqs)
        return {
            "tokens": c.tokens,
            "prompt_tokens": c.prompt_tokens,
            "steps": c.steps,
            "busy_rows": busy,
            "restarts": 0,
        }

    def close(self) -> None:
        """Nothing to end."""

    def _check(self, groups: Sequence[Group], sampling: Sampling) -> None:
        limit = getattr(self.module.config, "max_position_embeddings", None)
        for number, group in enumerate(groups):
            length = len(group.prompt_ids)
            if length == 0:
                raise UserError(f"prompt {number} of the batch is empty: it has no tokens")
            if limit is not None and length + sampling.max_response_length > limit:
                raise UserError(
                    f"{KEY}: a prompt of {length} tokens and a response of "
                    f"{sampling.max_response_length} exceed "
                    f"the model's {limit} positions; lower data.max_prompt_length or "
                    "data.max_response_length"
                )
            if group.begun and len(group.begun) != len(group.sample_ids):
                raise ValueError(
                    f"group {number} has {len(group.sample_ids)} sample ids but {len(group.begun)} "
                    "samples"
                )
