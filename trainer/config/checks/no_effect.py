"""Settings that nothing reads while others are as they are, so that nobody waits for what they
would do: refused, or, where a snippet for verl or a sweep over the switch carries them along, told
at the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer.config.keys.derived import at, followers, own_values
from trainer.config.keys.tree import defaults, written
from trainer.config.schema import Config

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_KL = "algorithm.kl_ctrl"


@dataclass(frozen=True)
class Rule:
    """Keys that are read only where ``read`` holds; ``mend`` says why not, and what to set."""

    keys: tuple[str, ...]
    read: bool
    mend: str
    harmless: dict[str, Any] = field(default_factory=dict)
    """Key -> the value, beside its default, that asks for what happens anyway."""

    def broken(self, values: dict[str, Any]) -> Iterator[str]:
        """A line for each of the keys that is not at its default and does nothing."""
        standard = defaults()
        for key in () if self.read else self.keys:
            value = at(values, key)
            if value != at(standard, key) and not (
                key in self.harmless and value == self.harmless[key]
            ):
                yield f"{key}={written(value)}, but {self.mend}, or leave {key.rsplit('.', 1)[-1]} out"


def unread_problems(config: Config) -> Iterator[str]:
    """One line for each setting of the user's own that would do nothing."""
    values = config.model_dump()
    for rule in _refused(config):
        yield from rule.broken(values)
    actor = config.actor_rollout_ref.actor
    ratio, low, high = actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high
    if ratio != at(defaults(), f"{_ACTOR}.clip_ratio") and ratio not in (low, high):
        yield (
            f"{_ACTOR}.clip_ratio={ratio}, but clip_ratio_low={low} and clip_ratio_high={high} are "
            "set as well and "
            "come first: set these, or leave clip_ratio out"
        )


def unread_hints(config: Config) -> list[str]:
    """What a run says of such settings at its start."""
    values = config.model_dump()
    found = [line for rule in _told(config) for line in rule.broken(values)]
    own = own_values(values)
    for key in followers():
        if key.startswith(("critic.", "reward_model.")) and (value := at(values, key)) != own[key]:
            found.append(
                f"{key}={written(value)} does nothing: value and reward models are not built yet"
            )
    return [f"[HINT] {line}." for line in found]


def _refused(config: Config) -> Iterator[Rule]:
    actor, rollout, keep = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.trainer.checkpoint,
    )
    yield Rule(
        (f"{_ACTOR}.grad_clip_adaptive",),
        actor.grad_clip > 0,
        f"{_ACTOR}.grad_clip=0 clips nothing: set it to 1.0",
    )
    yield Rule(
        tuple(
            f"{_ROLLOUT}.agent.{name}"
            for name in ("max_turns", "turn_timeout_s", "max_observation_length")
        ),
        rollout.agent.name is not None or rollout.agent.path is not None,
        f"{_ROLLOUT}.agent.name=null is one turn without tools: set it to calculator, or to a "
        "class of yours",
    )
    yield Rule(
        ("custom_reward_function.name",),
        config.custom_reward_function.path is not None,
        "custom_reward_function.path=null takes the rule that fits the data: set it to the file "
        "that defines it",
    )
    yield Rule(
        ("trainer.checkpoint.write_share",),
        keep.async_save,
        "trainer.checkpoint.async_save=false saves while training waits, as fast as it goes: set "
        "it to true",
    )
    yield Rule(
        ("trainer.checkpoint.best_metric",),
        keep.keep_best > 0,
        "trainer.checkpoint.keep_best=0 keeps no best one: set it to 1 or more",
    )
    yield Rule(
        (
            f"{_ACTOR}.use_kl_loss",
            f"{_ACTOR}.entropy_coeff",
            "algorithm.use_kl_in_reward",
            "algorithm.max_staleness",
            f"{_ROLLOUT}.over_sampling",
            f"{_ROLLOUT}.one_step_off",
        ),
        config.trainer.mode == "rl",
        "trainer.mode=sft learns from the responses in the data: set it to rl",
    )


def _told(config: Config) -> Iterator[Rule]:
    algorithm, data = config.algorithm, config.data
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield Rule(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        actor.use_kl_loss,
        f"{_ACTOR}.use_kl_loss=false adds no KL to the loss: set it to true",
        {f"{_ACTOR}.kl_loss_coef": 0.0},
    )
    yield Rule(
        (f"{_REF}.ema_decay",),
        config.actor_rollout_ref.ref.ema_interval is not None,
        f"{_REF}.ema_interval=null keeps the reference as it is: set it to a number of steps",
    )
    yield Rule(
        (f"{_ACTOR}.grad_clip_min_batch_size",),
        actor.grad_clip_adaptive,
        f"{_ACTOR}.grad_clip_adaptive=false clips all steps alike: set it to true",
    )
    yield Rule(
        (f"{_ACTOR}.dynamic_bsz_bucketing", f"{_ACTOR}.share_prompt"),
        actor.use_dynamic_bsz,
        f"{_ACTOR}.use_dynamic_bsz=false cuts micro-batches by count and pads them: set it to true",
        {f"{_ACTOR}.share_prompt": False},
    )
    yield Rule(
        (f"{_ACTOR}.optim.min_lr_ratio",),
        actor.optim.lr_scheduler_type != "constant",
        f"{_ACTOR}.optim.lr_scheduler_type=constant never falls: set it to linear or cosine",
    )
    yield Rule(
        tuple(f"{_ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k")),
        rollout.val_kwargs.do_sample,
        f"{_ROLLOUT}.val_kwargs.do_sample=false takes the likeliest token: set it to true",
        {f"{_ROLLOUT}.val_kwargs.temperature": 0.0},
    )
    yield Rule(
        (f"{_ROLLOUT}.server.start_timeout_s",),
        rollout.name == "vllm_server",
        f"{_ROLLOUT}.name={rollout.name} starts no server: set it to vllm_server",
    )
    yield Rule(
        ("data.prefetch_factor", "data.persistent_workers"),
        data.num_workers > 0,
        "data.num_workers=0 loads in the training process: set it to 1 or more",
    )
    yield Rule(
        ("data.truncation",),
        config.trainer.mode == "sft" or not data.filter_overlong_prompts,  # SFT cuts responses, too
        "data.filter_overlong_prompts=true leaves such prompts out: set it to false",
    )
    yield Rule(
        (f"{_ACTOR}.bucket_boundaries", f"{_ACTOR}.bucket_by"),
        actor.dynamic_bsz_bucketing,
        f"{_ACTOR}.dynamic_bsz_bucketing=false keeps no buckets apart: set it to true",
    )
    yield Rule(
        (
            "algorithm.kl_penalty",
            f"{_KL}.type",
            f"{_KL}.kl_coef",
            f"{_KL}.target_kl",
            f"{_KL}.horizon",
        ),
        algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward=false takes no KL from the reward: set it to true",
        {"algorithm.kl_penalty": "kl", f"{_KL}.kl_coef": 0.0},
    )
    yield Rule(
        (f"{_KL}.target_kl", f"{_KL}.horizon"),
        algorithm.kl_ctrl.type == "adaptive" or not algorithm.use_kl_in_reward,
        f"{_KL}.type=fixed keeps the weight where it is: set it to adaptive",
    )
    yield Rule(
        ("algorithm.gamma",),
        algorithm.adv_estimator in ("reinforce_plus_plus", "gae"),
        f"algorithm.adv_estimator={algorithm.adv_estimator} discounts nothing: set it to "
        "reinforce_plus_plus",
    )
    yield Rule(
        ("algorithm.lam",),
        algorithm.adv_estimator == "gae",
        f"algorithm.adv_estimator={algorithm.adv_estimator} has no lambda: set it to 1.0",
    )
