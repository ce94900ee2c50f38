"""Every component of a run, built from its frozen config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.algorithms import KlController, make_kl_controller
from trainer.base.errors import UserError
from trainer.batching import CostModel, warm_up
from trainer.config.checks.no_effect import no_effect_hints
from trainer.config.schema import Config, Data, KlCtrl, Model
from trainer.data import (
    Dataset,
    Example,
    endless,
    make_datasets,
    make_loader,
    same_data_warning,
)
from trainer.data.chat_template import ChatTemplate, read_template
from trainer.experience.collector import RolloutCollector
from trainer.experience.generators import make_generator
from trainer.experience.sampler import Sampler
from trainer.experience.weight_sync import WeightSync
from trainer.models import LoadedModel, load_policy
from trainer.parallel import selftest
from trainer.parallel.deepspeed_setup import EngineSettings
from trainer.parallel.engine import Engine
from trainer.ranks.world import World
from trainer.rewards import Scorer
from trainer.run.context import RunContext
from trainer.run.critic import critic_note, make_critic
from trainer.run.data_record import check_data_files
from trainer.run.reference import make_reference
from trainer.run.rules_check import check_rules
from trainer.tracking.perf import make_timers
from trainer.update.auto_budget import measure_budgets
from trainer.update.losses import PolicyObjective, SftObjective, make_objective
from trainer.update.micro_batches import MicroBatchConfig
from trainer.update.value_objective import ValueObjective


def build(config: Config, run_dir: Path, world: World) -> RunContext:
    """Load model and data and start the training engine. Collective.

    Raises UserError for settings, models and data that don't fit together.
    """
    roles = config.actor_rollout_ref
    rl = config.trainer.mode == "rl"
    rule_notes = check_rules(config, world)
    model = load_policy(config, world.device)
    train_data, val_data = make_datasets(
        config, model.tokenizer, vocabulary=model.shape.vocab, local_ranks=world.local_size
    )
    check_data_files(
        run_dir, world, (train_data, val_data), accept=config.trainer.accept_changed_files
    )
    val_examples = all_examples(val_data)
    require_judgeable(config, val_examples)
    reference = make_reference(config, model)
    settings = EngineSettings.of_actor(roles.actor, world.device)
    selftest.run(settings, world)
    ctx = RunContext(
        config=config,
        run_dir=run_dir,
        world=world,
        model=model,
        engine=Engine(model.model, settings, world),
        reference=reference,
        train_data=train_data,
        val_examples=val_examples,
        loader=make_loader(config.data, train_data, split="train", local_ranks=world.local_size),
        scorer=Scorer.from_config(config, local_ranks=world.local_size),
        objective=make_objective(config),
        update_pass=MicroBatchConfig.from_config(roles, "update", rl=rl),
        log_prob_pass=MicroBatchConfig.from_config(roles, "log_prob", rl=rl),
        ref_pass=MicroBatchConfig.from_config(roles, "ref", rl=rl),
        cost_model=training_cost(roles.model, model),
        kl_controller=kl_controller(config.algorithm.kl_ctrl),
        timers=make_timers(world.device),
        notes=[
            *no_effect_hints(config),
            *rule_notes,
            *overlap_warnings(train_data, val_data),
            *truncation_notes(config, val_examples),
            *template_warnings(config.data, model.tokenizer),
        ],
    )
    add_critic(ctx)
    add_rollouts(ctx, validates=val_data is not None)
    prepare_planner(ctx)
    return ctx


def add_critic(ctx: RunContext) -> None:
    """The critic, where the advantages need one. Collective."""
    ctx.critic = make_critic(ctx.config, ctx.model, ctx.world)
    if ctx.critic is not None:
        ctx.notes.append(critic_note(ctx.critic, ctx.config.critic.model.path))


def add_rollouts(ctx: RunContext, *, validates: bool) -> None:
    """The rollout engine with what draws from it: for training in RL, for validation if wanted."""
    if not (ctx.is_rl or validates):
        return
    config = ctx.config
    tokenizer = ctx.tokenizer
    weight_sync = WeightSync.from_config(
        config.actor_rollout_ref.rollout, ctx.model, ctx.engine, ctx.world, ctx.run_dir
    )
    generator = make_generator(config, weight_sync.rollout_engine, ctx.model)
    ctx.weight_sync = weight_sync
    if ctx.is_rl:
        sampler = Sampler.from_config(config, generator, ctx.scorer, tokenizer)
        batches = endless(ctx.loader)
        ctx.collector = RolloutCollector.from_config(
            config, batches, sampler, weight_sync, ctx.world
        )
    if validates:
        ctx.val_sampler = Sampler.from_config(
            config, generator, ctx.scorer, tokenizer, validation=True
        )


def prepare_planner(ctx: RunContext) -> None:
    """Load the planner's compiled loops, and measure the budgets that are ``auto``. Collective."""
    data = ctx.config.data
    passes = (ctx.update_pass, ctx.log_prob_pass, ctx.ref_pass)
    critic = ctx.critic
    critic_passes: tuple[MicroBatchConfig, ...] = ()
    if critic is not None:
        critic_passes = (critic.update_pass, critic.forward_pass)
    if any(config.dynamic for config in (*passes, *critic_passes)):
        responses = ctx.config.actor_rollout_ref.rollout.n if ctx.is_rl else 1
        warm_up(data.train_batch_size * responses)
    if any(config.unmeasured for config in passes):
        budgets = measured(ctx, ctx.engine, ctx.objective, ctx.update_pass)
        # Passes without gradients share the measured budgets.
        ctx.update_pass = ctx.update_pass.measured(budgets)
        ctx.log_prob_pass = ctx.log_prob_pass.measured(budgets)
        ctx.ref_pass = ctx.ref_pass.measured(budgets)
        listed = ", ".join(map(str, budgets))
        ctx.notes.append(f"ppo_max_token_len_per_gpu=auto: measured {listed} tokens by rank")
    if critic is not None and any(config.unmeasured for config in critic_passes):
        budgets = measured(ctx, critic.engine, critic.objective, critic.update_pass)
        critic.measured(budgets)
        listed = ", ".join(map(str, budgets))
        ctx.notes.append(f"critic.ppo_max_token_len_per_gpu=auto: measured {listed} by rank")


def measured(
    ctx: RunContext,
    engine: Engine,
    objective: PolicyObjective | SftObjective | ValueObjective,
    config: MicroBatchConfig,
) -> list[int]:
    """Token budgets of a pass in training, one per rank. Collective."""
    data = ctx.config.data
    engines = [ctx.engine]
    if ctx.critic is not None:
        engines.append(ctx.critic.engine)
    return measure_budgets(
        engine,
        objective,
        config,
        engines=engines,
        longest=data.max_prompt_length + data.max_response_length,
        vocabulary=ctx.model.shape.vocab,
        local_ranks=ctx.world.local_size,
    )


def kl_controller(section: KlCtrl) -> KlController:
    """The controller of ``algorithm.kl_ctrl``."""
    return make_kl_controller(
        section.type,
        kl_coef=section.kl_coef,
        target_kl=section.target_kl,
        horizon=section.horizon,
    )


def training_cost(section: Model, model: LoadedModel) -> CostModel:
    """Floating-point operations of a training step's sequences, for the planner."""
    return CostModel.from_shape(
        model.shape,
        recompute=section.enable_gradient_checkpointing,
        frozen=model.has_adapters,
    )


def all_examples(dataset: Dataset | None) -> list[Example]:
    """All examples of a dataset, in order."""
    return [] if dataset is None else [dataset[i] for i in range(len(dataset))]


def require_judgeable(config: Config, val_examples: Sequence[Example]) -> None:
    """Raise UserError for validation samples whose answers the built-in rule can't judge."""
    if config.custom_reward_function.path is not None or config.trainer.mode == "rl":
        return
    for example in val_examples:
        if example.ground_truth is not None:
            continue
        raise UserError(
            f"data.val_files: {example.location} has no field '{config.data.answer_key}' "
            "(data.answer_key), or an empty one, so nobody can judge what the model answers. Set "
            "data.answer_key to the field that holds the right answer, "
            "custom_reward_function.path to a function that does without, or data.val_files=null"
        )


def overlap_warnings(train_data: Dataset, val_data: Dataset | None) -> list[str]:
    """A warning when training and validation data share prompts."""
    if val_data is None:
        return []
    warning = same_data_warning(train_data, val_data)
    return [f"[WARNING] {warning}"] if warning else []


def truncation_notes(config: Config, val_examples: Sequence[Example]) -> list[str]:
    """How many validation prompts are cut, if any."""
    cut = sum(example.cut_prompt for example in val_examples)
    if not cut:
        return []
    return [
        f"data.truncation={config.data.truncation} cuts {cut:,} of {len(val_examples):,} "
        "validation prompts"
    ]


def template_warnings(data: Data, tokenizer: Any) -> list[str]:
    """A warning when ``data.chat_template`` leaves out the token that begins every text."""
    if data.chat_template is None:
        return []
    template = ChatTemplate(
        tokenizer, read_template(data.chat_template), data.apply_chat_template_kwargs
    )
    bos = template.missing_bos()
    if bos is None:
        return []
    return [
        f"[WARNING] data.chat_template doesn't write {bos}, with which the model's tokenizer "
        "begins every text: put {{ bos_token }} first"
    ]
