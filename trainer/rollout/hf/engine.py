"""The engine ``hf``: the trainer's own model generates, without a second copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from trainer.rollout.group_check import require_valid_groups
from trainer.rollout.hf.decoder import Decoder
from trainer.rollout.hf.generation import HfGeneration
from trainer.rollout.protocol import Group
from trainer.rollout.settings import Sampling


class HfEngine:
    """Generates with ``module`` itself: a Llama, Qwen2 or Qwen3 of transformers, in any dtype.

    Its weights must be gathered meanwhile (ZeRO-3); neither they nor the mode of the module are
    changed. Samples don't depend on ``max_num_seqs``, the order of groups or the number of ranks,
    except for rounding: a random number within about 1e-6 of the border between two tokens can
    select either.
    """

    shares_weights = True

    def __init__(self, module: nn.Module, *, eos_ids: Sequence[int], max_num_seqs: int) -> None:
        if not eos_ids:
            raise ValueError("generation needs at least one end token")
        self.module = module
        self.eos_ids = list(eos_ids)
        self.max_num_seqs = max_num_seqs
        self.version = 0
        self._last: HfGeneration | None = None

    def start(self) -> None:
        """Load nothing: the module is loaded."""

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> HfGeneration:
        """Begin to generate ``groups``.

        Raises UserError for an empty prompt and one that leaves no room for the response.
        """
        positions = getattr(self.module.config, "max_position_embeddings", None)
        require_valid_groups(groups, sampling.max_response_length, positions)
        self._last = HfGeneration(
            Decoder(self.module),
            groups,
            sampling,
            eos_ids=self.eos_ids,
            max_num_seqs=self.max_num_seqs,
            seed=seed,
            version=self.version,
        )
        return self._last

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Set the version. The weights are the trainer's, and no cache outlives a generation."""
        for name, _ in weights:
            raise ValueError(
                f"the hf engine reads the trainer's own weights, yet it was given {name}"
            )
        self.version = version

    def sleep(self) -> None:
        """Free nothing: no memory is held between generations."""

    def wake(self) -> None:
        """Allocate nothing."""

    def stats(self) -> Mapping[str, float]:
        """Counters of the last generation; empty before the first one."""
        if self._last is None:
            return {}
        counters = self._last.counters
        return {
            "tokens": counters.tokens,
            "prompt_tokens": counters.prompt_tokens,
            "steps": counters.steps,
            "busy_rows": counters.rows / (max(counters.steps, 1) * self.max_num_seqs),
            "restarts": 0,
        }

    def close(self) -> None:
        """End nothing: there are no processes."""
