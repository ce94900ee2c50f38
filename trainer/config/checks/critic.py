"""Checks of the settings of the critic (``critic.*``)."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.checks.batch_sizes import nearest_mini_batches
from trainer.config.schema import Config


def critic_problems(config: Config) -> Iterator[str]:
    """Contradictions between the critic's settings and others, each message with its fix."""
    critic = config.critic
    estimator = config.algorithm.adv_estimator
    if estimator == "gae" and critic.enable is False:
        yield (
            "algorithm.adv_estimator=gae needs the values of a critic, and critic.enable=false: "
            "leave critic.enable out, or set algorithm.adv_estimator=grpo"
        )
    if estimator != "gae" and critic.enable:
        yield (
            f"critic.enable=true, but algorithm.adv_estimator={estimator} reads no values: set "
            "algorithm.adv_estimator=gae, or leave critic.enable out"
        )
    if config.uses_critic:
        yield from _engine(config)
        yield from _sizes(config)


def _engine(config: Config) -> Iterator[str]:
    critic = config.critic
    if critic.param_offload and critic.zero_stage < 3:
        yield f"critic.param_offload=true needs critic.zero_stage=3 (now {critic.zero_stage})"
    if critic.optimizer_offload and critic.zero_stage < 1:
        yield "critic.optimizer_offload=true needs critic.zero_stage=1 or more (now 0)"
    precision = config.actor_rollout_ref.actor.mixed_precision
    if critic.zero_stage == 0 and precision != "fp32":
        yield (
            "critic.zero_stage=0 with actor_rollout_ref.actor.mixed_precision="
            f"{precision}: set critic.zero_stage=1 (the same result, the fp32 state sharded), or "
            "mixed_precision=fp32"
        )
    optim = critic.optim
    if optim.lr_warmup_steps is not None and optim.lr_warmup_steps_ratio > 0:
        yield (
            f"critic.optim.lr_warmup_steps={optim.lr_warmup_steps} and lr_warmup_steps_ratio="
            f"{optim.lr_warmup_steps_ratio} are both set; set lr_warmup_steps=null or "
            "lr_warmup_steps_ratio=0"
        )


def _sizes(config: Config) -> Iterator[str]:
    critic = config.critic
    train = config.data.train_batch_size
    mini = critic.ppo_mini_batch_size
    of_actor = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini != of_actor and train % mini:
        yield (
            f"data.train_batch_size={train} is not a multiple of "
            f"critic.ppo_mini_batch_size={mini}; nearest valid: "
            f"critic.ppo_mini_batch_size={nearest_mini_batches(mini, train)}"
        )
    steps = config.trainer.total_training_steps
    warmup = config.trainer.critic_warmup
    if steps is not None and warmup >= steps:
        yield (
            f"trainer.critic_warmup={warmup} leaves no step of "
            f"trainer.total_training_steps={steps} in which the policy learns: set it to "
            f"{steps - 1} or less"
        )
