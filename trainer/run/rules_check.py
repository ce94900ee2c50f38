"""The rules that judge the data, tried on the data's own answers before a model is loaded."""

from __future__ import annotations

from trainer.config.schema import Config
from trainer.data import first_truths
from trainer.ranks.agreement import agreed
from trainer.ranks.world import World
from trainer.rewards.self_check import check_truths


def check_rules(config: Config, world: World) -> list[str]:
    """Rank 0 judges the answers of each data source's first rows against themselves; returns notes
    for the start of the run. Collective.

    Nothing is checked where a user's function scores. Raises UserError, on all ranks, that names
    row and rule for an answer that its rule refuses.
    """
    notes: list[str] = []
    with agreed(world):
        if world.is_main and config.custom_reward_function.path is None:
            notes = check_truths(first_truths(config), config.reward.rules)
    return notes
