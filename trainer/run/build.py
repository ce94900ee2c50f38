"""Everything a run holds on this rank, built from its frozen config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from trainer.algorithms import KlController, make_kl_controller
from trainer.base.environment import RankInfo
from trainer.base.errors import UserError
from trainer.base.precision import resolve
from trainer.batching import Calibrator, CostModel, warm_up
from trainer.config.checks.no_effect import unread_hints
from trainer.config.schema import Config
from trainer.data import (
    Dataset,
    Example,
    Loader,
    make_dataset,
    make_loader,
    require_distinct,
    worker_count,
)
from trainer.experience.collector import Rolling
from trainer.experience.generators import Generation
from trainer.experience.prompts import Prompts
from trainer.experience.sampler import Sampler
from trainer.experience.weight_sync import Synced
from trainer.models import LoadedModel, load_model
from trainer.models.adapters import adapters_of
from trainer.parallel import selftest
from trainer.parallel.engine import Engine, EngineSettings
from trainer.ranks.world import World
from trainer.rewards import Scorer, load_reward
from trainer.tracking import Timers
from trainer.tracking.perf import memory_in_use
from trainer.update.auto_budget import measure_budgets
from trainer.update.losses import Policy, Sft, Weighing
from trainer.update.micro_batches import Stowage

AUTO = "auto"
MEASURE_LATER = 0
"""Stands for a budget until it has been measured; the planner refuses it."""


@dataclass(kw_only=True)
class Context:
    """One rank's parts. Built once; only counters, budgets and what the parts hold inside change.
    What of that a resumed run needs is registered in ``trainer.run.state``.
    """

    config: Config
    run_dir: Path
    info: RankInfo
    world: World
    loaded: LoadedModel
    engine: Engine
    reference: nn.Module | None
    """What the KL is measured against: a copy of the first policy; of LoRA the policy itself, its
    adapters off.
    """
    train_data: Dataset
    val_examples: list[Example]
    loader: Loader
    synced: Synced | None
    """The generation engine; None when nothing is generated."""
    rolling: Rolling | None
    """Where training's rollouts come from; None in SFT."""
    val_sampler: Sampler | None
    """How validation draws; None when nobody can judge the answers."""
    objective: Policy | Sft
    stowage: Stowage
    forward_stowage: Stowage
    ref_stowage: Stowage
    cost: CostModel
    kl: KlController
    timers: Timers
    scorer: Scorer
    notes: list[str] = field(default_factory=list)
    """What the user should hear at start."""
    calibrator: Calibrator = field(default_factory=Calibrator)
    """What this rank's micro-batches took."""
    samples_seen: int = 0
    productive_s: float = 0.0
    """Seconds of the steps taken so far, those of earlier attempts included as far as they were
    kept.
    """
    budgets: list[int] | None = None
    """Budgets of all ranks, once running out of memory lowered one of them."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    def lower_budgets(self, budgets: list[int]) -> None:
        """Plan with these budgets from now on."""
        self.budgets = [int(b) for b in budgets]
        self.stowage = replace(self.stowage, budget=self.budgets)

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End all processes and threads. The engine first: whoever waits for it ends too."""
        with ExitStack() as parts:
            parts.callback(self.loader.close)
            parts.callback(self.scorer.close)
            if self.rolling is not None:
                parts.callback(self.rolling.close)
            if self.synced is not None:
                parts.callback(self.synced.close)

    @property
    def is_rl(self) -> bool:
        """RL rather than SFT."""
        return self.config.trainer.mode == "rl"

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on, and somebody to judge the answers."""
        return self.val_sampler is not None and bool(self.val_examples)

    @property
    def total_steps(self) -> int:
        """Iterations (RL) or batches (SFT) of the run."""
        trainer = self.config.trainer
        return trainer.total_training_steps or len(self.loader) * trainer.total_epochs


def build(config: Config, run_dir: Path, info: RankInfo, world: World) -> Context:
    """Load model and data, start the engine. Raises UserError for what the user can mend."""
    actor, rl = config.actor_rollout_ref.actor, config.trainer.mode == "rl"
    path = config.actor_rollout_ref.model.path
    if path is None:
        raise UserError(
            "actor_rollout_ref.model.path is not set; type "
            "actor_rollout_ref.model.path=builtin:tiny to try"
        )
    precision = resolve(actor.mixed_precision, on_gpu=world.device.type == "cuda")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    loaded = load_model(
        path,
        dtype=dtype,
        device=world.device,
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        adapters=adapters_of(config),
    )
    loaded.require_positions(config.data.max_prompt_length + config.data.max_response_length)
    train_data, val_data = (
        _dataset(config, loaded, info, "train"),
        _dataset(config, loaded, info, "val"),
    )
    if train_data is None:
        raise AssertionError("make_dataset refuses a run without training data")
    loader = make_loader(config.data, train_data, split="train", local_ranks=info.local_world_size)
    has_truth = can_judge(config, val_data)
    reference: nn.Module | None = None
    if rl and (actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        adapted = loaded.frozen is not None
        reference = (
            loaded.model if adapted else copy.deepcopy(loaded.model).eval().requires_grad_(False)
        )
    settings = EngineSettings(
        zero_stage=actor.zero_stage,
        bf16=precision == "bf16",
        betas=(actor.optim.betas[0], actor.optim.betas[1]),
        eps=actor.optim.eps,
        weight_decay=actor.optim.weight_decay,
        offload_optimizer=actor.optimizer_offload,
        offload_param=actor.param_offload,
    )
    selftest.run(settings, world)
    engine = Engine(loaded.model, settings, world)
    weighing = Weighing(
        mode=actor.loss_agg_mode, max_response_length=config.data.max_response_length
    )
    rollout, custom = config.actor_rollout_ref.rollout, config.custom_reward_function
    scorer = Scorer(
        None if custom.path is None else load_reward(custom.path, custom.name),
        name=f"{custom.name} in {custom.path}",
        workers=worker_count(config.data.num_workers or 1, info.local_world_size),
    )
    synced, rolling, val_sampler = None, None, None
    if rl or has_truth:
        parts = Generation(config, loaded, engine, scorer, world, run_dir)
        synced = parts.synced
        if rl:
            prompts = Prompts(
                endless(loader),
                over_sampling=rollout.over_sampling,
                max_staleness=config.algorithm.max_staleness,
            )
            rolling = Rolling(
                prompts,
                parts.sampler(),
                synced,
                world,
                want=config.data.train_batch_size,
                one_step_off=rollout.one_step_off,
            )
        if has_truth:
            val_sampler = parts.sampler(validation=True)
    ctrl = config.algorithm.kl_ctrl
    context = Context(
        config=config,
        run_dir=run_dir,
        info=info,
        world=world,
        loaded=loaded,
        engine=engine,
        reference=reference,
        train_data=train_data,
        val_examples=[] if val_data is None else [val_data[i] for i in range(len(val_data))],
        loader=loader,
        synced=synced,
        rolling=rolling,
        val_sampler=val_sampler,
        objective=Policy(
            actor,
            weighing,
            temperature=rollout.temperature,
            rollout_log_probs=rollout.calculate_log_probs,
        )
        if rl
        else Sft(weighing),
        stowage=_stowage(config, engine, training=True),
        forward_stowage=_stowage(config, engine, training=False),
        ref_stowage=_ref_stowage(config, engine),
        cost=CostModel.from_shape(
            loaded.shape,
            recompute=config.actor_rollout_ref.model.enable_gradient_checkpointing,
            frozen=loaded.frozen is not None,
        ),
        kl=make_kl_controller(
            ctrl.type, kl_coef=ctrl.kl_coef, target_kl=ctrl.target_kl, horizon=ctrl.horizon
        ),
        scorer=scorer,
        notes=unread_hints(config),
        timers=Timers(
            synchronize=_synchronizer(world.device), memory=lambda: memory_in_use(world.device)
        ),
    )
    if context.stowage.dynamic or context.forward_stowage.dynamic:
        warm_up(config.data.train_batch_size * (rollout.n if rl else 1))
    if AUTO in (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu):
        _measure(context, longest=config.data.max_prompt_length + config.data.max_response_length)
    if val_data is not None and (warning := require_distinct(train_data, val_data)):
        context.notes.append(f"[WARNING] {warning}")
    return context


def can_judge(config: Config, val_data: Dataset | None) -> bool:
    """Whether there is something to validate on. Raises UserError when there is, but nobody could
    judge the answers.
    """
    if val_data is None:
        return False
    known = config.trainer.mode == "rl" or val_data[0].ground_truth is not None
    if not known and config.custom_reward_function.path is None:
        raise UserError(
            f"data.val_files: {val_data[0].place} has no field '{config.data.answer_key}' "
            "(data.answer_key), so nobody "
            "can judge what the model answers. Set data.answer_key to the field that holds the "
            "right answer, "
            "custom_reward_function.path to a function that does without, or data.val_files=null"
        )
    return True


def _dataset(
    config: Config, loaded: LoadedModel, info: RankInfo, split: Literal["train", "val"]
) -> Dataset | None:
    return make_dataset(
        config.data,
        loaded.tokenizer,
        split=split,
        mode=config.trainer.mode,
        vocabulary=loaded.shape.vocab,
        # A user's own reward may do without right answers.
        answer_required=None if config.custom_reward_function.path is None else False,
        local_ranks=info.local_world_size,
    )


def _stowage(config: Config, engine: Engine, *, training: bool) -> Stowage:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    rl = config.trainer.mode == "rl"
    share = rl and rollout.n > 1 if actor.share_prompt == "auto" else bool(actor.share_prompt)
    dynamic = actor.use_dynamic_bsz if training else rollout.log_prob_use_dynamic_bsz
    micro = (
        actor.ppo_micro_batch_size_per_gpu
        if training
        else rollout.log_prob_micro_batch_size_per_gpu
    )
    budget = actor.ppo_max_token_len_per_gpu if training else rollout.log_prob_max_token_len_per_gpu
    # A forward pass without gradients synchronises per micro-batch only where weights are sharded.
    wait = engine.needs_equal_counts if training else engine.settings.zero_stage == 3
    return Stowage(
        dynamic=dynamic,
        budget=_budget(budget),
        micro_size=micro,
        buckets=tuple(actor.bucket_boundaries) if actor.dynamic_bsz_bucketing else None,
        bucket_by=actor.bucket_by,
        share_prompts=share and dynamic,
        sync="micro" if wait else "step",
    )


def _ref_stowage(config: Config, engine: Engine) -> Stowage:
    ref, own = config.actor_rollout_ref.ref, _stowage(config, engine, training=False)
    return Stowage(
        dynamic=ref.log_prob_use_dynamic_bsz,
        budget=_budget(ref.log_prob_max_token_len_per_gpu),
        micro_size=ref.log_prob_micro_batch_size_per_gpu,
        buckets=own.buckets,
        bucket_by=own.bucket_by,
        share_prompts=own.share_prompts and ref.log_prob_use_dynamic_bsz,
        # A copy is whole on every rank; the policy without its adapters is sharded as the policy
        # is.
        sync=own.sync if config.actor_rollout_ref.model.lora_rank else "step",
    )


def _measure(ctx: Context, *, longest: int) -> None:
    """Replace ``auto`` by measured budgets, which the passes without gradients share."""
    budgets = measure_budgets(
        ctx.engine,
        ctx.stowage,
        longest=longest,
        vocabulary=ctx.loaded.shape.vocab,
        local_ranks=ctx.info.local_world_size,
    )
    for name in ("stowage", "forward_stowage", "ref_stowage"):
        stowage: Stowage = getattr(ctx, name)
        if stowage.budget == MEASURE_LATER:
            setattr(ctx, name, replace(stowage, budget=budgets))
    ctx.notes.append(
        f"ppo_max_token_len_per_gpu=auto: measured {', '.join(map(str, budgets))} tokens by rank"
    )


def _budget(value: Any) -> int | list[int]:
    if value == AUTO:
        return MEASURE_LATER
    return list(value) if isinstance(value, list | tuple) else int(value)


def _synchronizer(device: torch.device) -> Callable[[], None] | None:
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.synchronize(device)


def endless(loader: Loader) -> Iterator[list[Example]]:
    """Epoch after epoch; the number of steps ends the run, not the data."""
    while True:
        yield from loader
