"""The generator of responses: a rollout engine alone, or with an agent between the turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainer.config.schema import Config
from trainer.models import LoadedModel
from trainer.rollout import Generation, Group, RolloutEngine, Sampling, eos_ids
from trainer.rollout.turns import MultiTurnGenerator


class Generator(Protocol):
    """Generates groups of responses: a ``RolloutEngine`` or a ``MultiTurnGenerator`` around one."""

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """Begin to generate ``groups``, as ``RolloutEngine.generate`` does."""


def make_generator(config: Config, rollout_engine: RolloutEngine, loaded: LoadedModel) -> Generator:
    """Wrap ``rollout_engine`` in the agent of ``actor_rollout_ref.rollout.agent``, if one is set.

    Raises UserError for an agent that can't be loaded or a chat template without tool turns.
    """
    agent = config.actor_rollout_ref.rollout.agent
    if agent.name is None:
        return rollout_engine
    return MultiTurnGenerator.from_config(
        agent,
        config.data,
        rollout_engine,
        loaded.tokenizer,
        eos_ids=eos_ids(loaded.model, loaded.tokenizer),
    )
