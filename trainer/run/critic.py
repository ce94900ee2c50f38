"""The critic of a run: a model of values with an optimizer and budgets of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from trainer.base.errors import UserError
from trainer.base.precision import resolve_precision
from trainer.batching import CostModel
from trainer.config.schema import Config
from trainer.models import LoadedModel, ValueModel, load_value_model
from trainer.parallel import selftest
from trainer.parallel.deepspeed_setup import EngineSettings
from trainer.parallel.engine import Engine
from trainer.ranks.world import World
from trainer.update.micro_batches import MicroBatchConfig
from trainer.update.value_objective import ValueObjective

FOLDER = "critic"
"""Where a checkpoint holds the critic."""


@dataclass(kw_only=True)
class Critic:
    """What trains beside the policy: the same engine, planner and optimizer step, with a head of
    values and their loss.
    """

    model: ValueModel
    engine: Engine
    objective: ValueObjective
    update_pass: MicroBatchConfig
    """Micro-batches of training."""
    forward_pass: MicroBatchConfig
    """Micro-batches of the values before it."""
    cost_model: CostModel
    lowered_budgets: list[int] | None = None
    """Budgets of all ranks, once one of them ran out of memory."""

    def lower_budgets(self, budgets: list[int]) -> None:
        """Plan training with these budgets (tokens, one per rank) from now on."""
        self.lowered_budgets = [int(budget) for budget in budgets]
        self.update_pass = self.update_pass.with_budgets(self.lowered_budgets)

    def measured(self, budgets: list[int]) -> None:
        """Use ``budgets`` (tokens, one per rank) in place of those that are ``auto``."""
        self.update_pass = self.update_pass.measured(budgets)
        self.forward_pass = self.forward_pass.measured(budgets)


def make_critic(config: Config, policy: LoadedModel, world: World) -> Critic | None:
    """The critic of ``critic.*``; None when the advantages need none. Collective.

    Raises UserError for a model that can't be loaded, is too short, or has other tokens than the
    policy.
    """
    if not config.uses_critic:
        return None
    section = config.critic
    settings = EngineSettings.of_critic(config, world.device)
    model = load_critic(config, policy, world.device)
    selftest.run(settings, world)
    # Its output projection is one row.
    shape = replace(model.shape, vocab=1)
    return Critic(
        model=model,
        engine=Engine(model.model, settings, world),
        objective=ValueObjective.from_config(config),
        update_pass=MicroBatchConfig.of_critic(config, "update"),
        forward_pass=MicroBatchConfig.of_critic(config, "forward"),
        cost_model=CostModel.from_shape(
            shape, recompute=section.model.enable_gradient_checkpointing, frozen=False
        ),
    )


def critic_engines(critic: Critic | None) -> dict[str, Engine]:
    """The engines that train beside the policy's, by their folder in a checkpoint."""
    return {} if critic is None else {FOLDER: critic.engine}


def critic_note(critic: Critic, path: str | None) -> str:
    """What the user is told of the critic at the start."""
    size = f"{critic.engine.num_trained / 1e6:.1f}M"
    head = "the value head of its weights"
    if critic.model.fresh_head:
        head = "a fresh value head"
    return (
        f"critic: {path} with {head}, {size} parameters, ZeRO {critic.engine.settings.zero_stage}"
    )


def load_critic(config: Config, policy: LoadedModel, device: torch.device) -> ValueModel:
    """The model of ``critic.model.path``. Raises UserError as ``make_critic`` does."""
    section = config.critic.model
    if section.path is None:
        raise UserError(
            "critic.model.path is not set, and neither is actor_rollout_ref.model.path, which it "
            "follows; type actor_rollout_ref.model.path=builtin:tiny to try"
        )
    precision = resolve_precision(
        config.actor_rollout_ref.actor.mixed_precision, on_gpu=device.type == "cuda"
    )
    model = load_value_model(
        section.path,
        key="critic.model.path",
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        device=device,
        seed=config.trainer.seed,
        gradient_checkpointing=section.enable_gradient_checkpointing,
    )
    model.require_positions(config.data.max_prompt_length, config.data.max_response_length)
    if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            f"critic.model.path={section.path} has another tokenizer than "
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}, and the critic "
            "reads the policy's tokens: give a model of the same tokenizer, or leave "
            "critic.model.path out"
        )
    return model
