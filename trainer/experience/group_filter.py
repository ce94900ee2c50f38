"""DAPO's dynamic sampling: a step trains on prompts whose responses differ in what they are worth
(arXiv 2503.14476, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.base.errors import UserError
from trainer.config.schema import Config
from trainer.experience.sampler import Rollouts
from trainer.rewards import Score


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Which prompts of a round of rollouts a step can learn from."""

    metric: str
    """``acc``, ``score`` or ``seq_reward``, or a number that the reward function returns."""
    most_rounds: int
    """Rounds of rollouts of a step, at most."""
    n: int
    """Responses per prompt."""

    @classmethod
    def from_config(cls, config: Config) -> GroupFilter | None:
        """None where ``algorithm.filter_groups.enable`` is false."""
        settings = config.algorithm.filter_groups
        if not settings.enable:
            return None
        return cls(
            metric=settings.metric,
            most_rounds=settings.max_num_gen_batches,
            n=config.actor_rollout_ref.rollout.n,
        )

    def kept(self, rollouts: Rollouts) -> list[int]:
        """The prompts (indices of requests) whose responses are not all worth the same.

        Raises UserError when the reward function does not return the metric.
        """
        kept = []
        for first in range(0, len(rollouts.scores), self.n):
            values = [self._value(score) for score in rollouts.scores[first : first + self.n]]
            if min(values) != max(values):
                kept.append(rollouts.prompt_indices[first])
        return kept

    def _value(self, score: Score) -> float:
        if self.metric == "seq_reward":
            return score.value
        if self.metric in score.extra:
            return score.extra[self.metric]
        if self.metric in ("acc", "score"):
            return score.value - score.extra.get("overlong_reward", 0.0)
        if score.failed:
            return score.value
        has = ", ".join(sorted(score.extra)) or "nothing beside its score"
        raise UserError(
            f"algorithm.filter_groups.metric={self.metric}, but the reward function returned "
            f"{has}: set it to acc, score, seq_reward or a number that the function returns"
        )

    def nothing_varies(self, prompts: int, scores: Sequence[Score]) -> UserError:
        """The error after ``most_rounds`` rounds of ``prompts`` prompts in all, none of them kept;
        ``scores``: of the last round on this rank.
        """
        failed = next((f". The reward failed: {s.failed}" for s in scores if s.failed), "")
        return UserError(
            f"algorithm.filter_groups: after {self.most_rounds} rounds "
            f"(algorithm.filter_groups.max_num_gen_batches) the {self.n} responses to each of "
            f"{prompts} prompts all have the same {self.metric}, so that there is nothing to learn "
            "from: the prompts are too hard or too easy, or the reward always gives one value"
            f"{failed}. Look at the answers of a validation in generations/, or set "
            "algorithm.filter_groups.enable=false"
        )
