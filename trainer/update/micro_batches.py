"""How one pass over a batch is cut into micro-batches: its settings and the plan they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.batching import CostModel, Plan, plan
from trainer.batching.static import static_plan
from trainer.config.schema import ActorRolloutRef, Config
from trainer.data.batch import Batch

AUTO = "auto"
UNMEASURED = 0
"""Budget of a pass with ``auto`` until it has been measured; the planner refuses it."""

Pass = Literal["update", "log_prob", "ref"]
"""Training, the policy's log-probs before it, and the reference's log-probs."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """How the micro-batches of one kind of pass are cut."""

    dynamic: bool
    """True: cut by tokens. False: ``micro_size`` sequences each, padded to the longest."""
    budget: int | Sequence[int]
    """Most tokens of a micro-batch, one number or one per rank. Not read when not ``dynamic``."""
    micro_size: int | None = None
    """Sequences of a micro-batch when not ``dynamic``."""
    buckets: Sequence[int] | None = None
    """Rising boundaries of length buckets that never mix, or None."""
    bucket_by: Literal["prompt", "total"] = "prompt"
    """Which length the bucket boundaries refer to."""
    share_prompts: bool = False
    """Compute the prompt of a group once per micro-batch."""
    sync: Literal["micro", "step"] = "step"
    """Whether ranks wait for each other after every micro-batch or once per step."""

    @classmethod
    def from_config(cls, config: ActorRolloutRef, kind: Pass, *, rl: bool) -> MicroBatchConfig:
        """The settings of one kind of pass, from its section of ``actor_rollout_ref``."""
        actor = config.actor
        if kind == "update":
            dynamic = actor.use_dynamic_bsz
            budget = actor.ppo_max_token_len_per_gpu
            micro_size = actor.ppo_micro_batch_size_per_gpu
            # ZeRO-2 and 3 communicate in every backward pass.
            waits = actor.zero_stage >= 2
        else:
            section = config.rollout if kind == "log_prob" else config.ref
            dynamic = section.log_prob_use_dynamic_bsz
            budget = section.log_prob_max_token_len_per_gpu
            micro_size = section.log_prob_micro_batch_size_per_gpu
            # ZeRO-3 communicates in every forward pass. The reference is a copy that every rank
            # holds whole, except with LoRA, where it is the policy with its adapters off.
            whole = kind == "ref" and config.model.lora_rank == 0
            waits = actor.zero_stage == 3 and not whole
        return cls(
            dynamic=dynamic,
            budget=_budget(budget),
            micro_size=micro_size,
            buckets=_buckets(config),
            bucket_by=actor.bucket_by,
            share_prompts=dynamic and _shares_prompts(config, kind, rl=rl),
            sync="micro" if waits else "step",
        )

    @classmethod
    def of_critic(cls, config: Config, kind: Literal["update", "forward"]) -> MicroBatchConfig:
        """The settings of the critic's training, or of its values before it.

        Buckets and shared prompts are the actor's.
        """
        section = config.critic
        roles = config.actor_rollout_ref
        if kind == "update":
            budget = section.ppo_max_token_len_per_gpu
            micro_size = section.ppo_micro_batch_size_per_gpu
            waits = section.zero_stage >= 2
        else:
            budget = section.forward_max_token_len_per_gpu
            micro_size = section.forward_micro_batch_size_per_gpu
            waits = section.zero_stage == 3
        dynamic = section.use_dynamic_bsz
        return cls(
            dynamic=dynamic,
            budget=_budget(budget),
            micro_size=micro_size,
            buckets=_buckets(roles),
            bucket_by=roles.actor.bucket_by,
            share_prompts=dynamic and _shares_prompts(roles, "update", rl=True),
            sync="micro" if waits else "step",
        )

    @property
    def unmeasured(self) -> bool:
        """Whether the budget is ``auto`` and not measured yet."""
        return self.budget == UNMEASURED

    def measured(self, budgets: Sequence[int]) -> MicroBatchConfig:
        """The same with ``budgets`` (tokens, one per rank) in place of an ``auto`` budget."""
        return self.with_budgets(budgets) if self.unmeasured else self

    def with_budgets(self, budgets: Sequence[int]) -> MicroBatchConfig:
        """The same with these budgets, one per rank."""
        return replace(self, budget=[int(budget) for budget in budgets])


def plan_micro_batches(
    batch: Batch, config: MicroBatchConfig, ranks: int, cost: CostModel | None = None
) -> Plan:
    """The plan of one pass over ``batch``.

    Every rank holds the same batch and so computes the same plan.
    """
    lengths = batch.lengths.numpy()
    if not config.dynamic:
        if config.micro_size is None:
            raise AssertionError("config validation requires micro_size when not dynamic")
        return static_plan(lengths, config.micro_size, ranks, cost=cost)
    return plan(
        lengths,
        config.budget,
        ranks,
        config.sync,
        cost=cost,
        groups=batch.rows["groups"].numpy() if config.share_prompts else None,
        prompt_lengths=batch.rows["prompt_lengths"].numpy(),
        buckets=config.buckets,
        bucket_by=config.bucket_by,
        share_prompts=config.share_prompts,
    )


def _buckets(config: ActorRolloutRef) -> tuple[int, ...] | None:
    actor = config.actor
    return tuple(actor.bucket_boundaries) if actor.dynamic_bsz_bucketing else None


def _shares_prompts(config: ActorRolloutRef, kind: Pass, *, rl: bool) -> bool:
    if kind == "ref" and not config.rollout.log_prob_use_dynamic_bsz:
        return False
    if config.actor.share_prompt == "auto":
        return rl and config.rollout.n > 1
    return bool(config.actor.share_prompt)


def _budget(value: Any) -> int | list[int]:
    if value == AUTO:
        return UNMEASURED
    return list(value) if isinstance(value, list | tuple) else int(value)
