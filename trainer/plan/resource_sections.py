"""Sections of a plan about what a run takes: memory, checkpoints, time.

A section is rows of (name, value).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from trainer.base.model_shape import ModelShape
from trainer.base.precision import planned_precision
from trainer.batching.budget import MEMORY_ADVICE
from trainer.config.checks.batch_sizes import DerivedSizes, Sizes
from trainer.config.schema import Config
from trainer.plan import memory
from trainer.plan.batch_sections import Rows, longest_sequence, smallest_budget, smallest_of
from trainer.plan.lengths import DataLengths
from trainer.plan.options import PlanOptions


def memory_rows(
    config: Config,
    options: PlanOptions,
    derived: DerivedSizes,
    shape: ModelShape,
    critic: ModelShape | None = None,
) -> Rows:
    """Memory of a rank by part; ``critic``: the shape of the critic, where one is trained."""
    adapters = _adapters(config, shape)
    sequences = _sequences_at_once(config, derived)
    estimate = _estimate(config, derived, shape, sequences)
    trained = f" and {adapters / 1e6:,.1f} M of adapters, which are trained" if adapters else ""
    yield "parameters", f"{shape.params / 1e6:,.1f} M{trained}"
    for name in ("weights", "gradients", "optimizer", "reference", "activations", "logits"):
        yield name, _gib(getattr(estimate, name))
    update, generation, host = estimate.training, estimate.generation, estimate.host
    if config.uses_critic and critic is None:
        yield "critic", f"unknown: critic.model.path ({config.critic.model.path} is not here)"
    if critic is not None:
        values = _critic_estimate(config, derived, critic)
        yield "critic", f"{_gib(values.held)} of {critic.params / 1e6:,.1f} M parameters"
        yield "critic's activations", _gib(values.activations)
        # One of the two updates at a time.
        update = max(update + values.held, values.training + estimate.held)
        generation += values.weights + values.optimizer
        host += values.host
    yield "peak of an update", _gib(update)
    if sequences:
        engine = config.actor_rollout_ref.rollout.name
        cache = f"{_gib(estimate.kv_cache)} for {sequences} sequences at once ({engine})"
        yield "key/value cache", cache
        yield "peak of generation", _gib(generation)
    if options.gpu_gb is not None:
        peak = max(update, generation)
        fits = peak <= options.gpu_gb * 1e9
        verdict = "fits" if fits else f"DOES NOT FIT: {MEMORY_ADVICE}"
        yield "GPU", f"{peak / 1e9:,.1f} of {options.gpu_gb:g} GB: {verdict}"
    if host:
        yield "in host memory", _gib(host)


def _critic_estimate(
    config: Config, derived: DerivedSizes, shape: ModelShape
) -> memory.MemoryEstimate:
    """Memory that the critic takes of a rank."""
    critic = config.critic
    longest = longest_sequence(config)
    micro_batch_tokens = (critic.ppo_micro_batch_size_per_gpu or 1) * longest
    if critic.use_dynamic_bsz:
        micro_batch_tokens = smallest_of(critic.ppo_max_token_len_per_gpu) or longest
    estimate = memory.predict(
        shape,
        dp=derived.dp,
        zero_stage=critic.zero_stage,
        precision=planned_precision(config.actor_rollout_ref.actor.mixed_precision),
        micro_batch_tokens=micro_batch_tokens,
        recompute=critic.model.enable_gradient_checkpointing,
        reference=False,
        kv_tokens=0,
        param_offload=critic.param_offload,
        optimizer_offload=critic.optimizer_offload,
    )
    return replace(estimate, logits=0)


def _estimate(
    config: Config, derived: DerivedSizes, shape: ModelShape, sequences: int
) -> memory.MemoryEstimate:
    """Memory of a rank that generates ``sequences`` sequences at once."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    longest = longest_sequence(config)
    if actor.use_dynamic_bsz:
        micro_batch_tokens = smallest_budget(config) or longest
    else:
        micro_batch_tokens = (actor.ppo_micro_batch_size_per_gpu or 1) * longest
    uses_kl = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return memory.predict(
        shape,
        dp=derived.dp,
        zero_stage=actor.zero_stage,
        precision=planned_precision(actor.mixed_precision),
        micro_batch_tokens=micro_batch_tokens,
        recompute=model.enable_gradient_checkpointing,
        reference=config.trainer.mode == "rl" and uses_kl,
        kv_tokens=sequences * longest,
        param_offload=actor.param_offload,
        optimizer_offload=actor.optimizer_offload,
        adapters=_adapters(config, shape),
    )


def _sequences_at_once(config: Config, derived: DerivedSizes) -> int:
    """Sequences that a rank generates at once; 0 for SFT."""
    if config.trainer.mode != "rl":
        return 0
    return min(ceil(derived.samples / derived.dp), config.actor_rollout_ref.rollout.max_num_seqs)


def _adapters(config: Config, shape: ModelShape) -> int:
    """Parameters of LoRA adapters; 0 without."""
    model = config.actor_rollout_ref.model
    return memory.adapter_params(shape, model.lora_rank, model.target_modules)


def checkpoint_rows(
    config: Config, options: PlanOptions, shape: ModelShape, critic: ModelShape | None = None
) -> Rows:
    """Size of a checkpoint, and its time against the grace period."""
    trainer = config.trainer
    size = run_checkpoint_bytes(config, shape, critic, adapters=_adapters(config, shape))
    seconds = size / (options.write_gb_s * 1e9)
    need = seconds * trainer.checkpoint.save_margin
    verdict = "fits"
    if need > trainer.grace_period_s:
        verdict = "DOES NOT FIT: raise the grace period or write faster"
    yield "size", _gib(size)
    yield "time to save", f"{seconds:.1f} s at {options.write_gb_s:g} GB/s (plan.write_gb_s)"
    yield (
        "grace period",
        f"{trainer.grace_period_s:g} s against {need:.1f} s with margin "
        f"{trainer.checkpoint.save_margin:g}: {verdict}",
    )


def run_checkpoint_bytes(
    config: Config, shape: ModelShape, critic: ModelShape | None, *, adapters: int = 0
) -> int:
    """Bytes of a checkpoint of a run over all ranks: of the policy, and of the ``critic`` where one
    is trained.
    """
    actor = config.actor_rollout_ref.actor
    precision = planned_precision(actor.mixed_precision)
    size = memory.checkpoint_bytes(
        shape,
        precision=precision,
        zero_stage=actor.zero_stage,
        reference=config.actor_rollout_ref.ref.ema_interval is not None,
        adapters=adapters,
    )
    if critic is not None:
        size += memory.checkpoint_bytes(
            critic, precision=precision, zero_stage=config.critic.zero_stage
        )
    return size


def time_rows(
    config: Config, options: PlanOptions, sizes: Sizes, lengths: DataLengths | None
) -> Rows:
    """Steps and GPU-hours of the run."""
    steps = options.steps or config.trainer.total_training_steps
    if steps is None and lengths is not None and lengths.rows:
        rows = min(lengths.rows, config.data.train_max_samples or lengths.rows)
        steps = config.trainer.total_epochs * (rows // sizes.train_batch_size)
    unknown = "unknown: set trainer.total_training_steps or plan.steps"
    yield "steps", unknown if steps is None else str(steps)
    if options.step_time_s is None:
        yield "GPU-hours", "give plan.step_time_s=SECONDS"
    elif steps is not None:
        hours = steps * options.step_time_s / 3600
        yield (
            "GPU-hours",
            f"{hours * sizes.world:,.2f} = {steps} * {options.step_time_s:g} s * {sizes.world} "
            f"({hours:,.2f} h)",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
