"""Token budgets and micro-batch sizes of every role: one of the two, and large enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.schema import Config
from trainer.config.schema.base import Budget

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Role:
    """The keys and values by which a role's micro-batches are cut."""

    dynamic_key: str
    dynamic: bool
    """Whether they are cut by tokens."""
    budget_key: str
    budget: Budget
    """Most tokens of a micro-batch of a rank."""
    micro_key: str
    micro: int | None
    """Sequences of a micro-batch, when they are cut by count."""


def roles_of(config: Config) -> list[Role]:
    """The roles that run, the actor first."""
    actor = config.actor_rollout_ref.actor
    roles = [
        Role(
            dynamic_key=f"{_ACTOR}.use_dynamic_bsz",
            dynamic=actor.use_dynamic_bsz,
            budget_key=f"{_ACTOR}.ppo_max_token_len_per_gpu",
            budget=actor.ppo_max_token_len_per_gpu,
            micro_key=f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
            micro=actor.ppo_micro_batch_size_per_gpu,
        )
    ]
    for name, section in (
        ("ref", config.actor_rollout_ref.ref),
        ("rollout", config.actor_rollout_ref.rollout),
    ):
        prefix = f"actor_rollout_ref.{name}.log_prob"
        roles.append(
            Role(
                dynamic_key=f"{prefix}_use_dynamic_bsz",
                dynamic=section.log_prob_use_dynamic_bsz,
                budget_key=f"{prefix}_max_token_len_per_gpu",
                budget=section.log_prob_max_token_len_per_gpu,
                micro_key=f"{prefix}_micro_batch_size_per_gpu",
                micro=section.log_prob_micro_batch_size_per_gpu,
            )
        )
    if config.uses_critic:
        roles += _critic_roles(config)
    return roles


def _critic_roles(config: Config) -> Iterator[Role]:
    critic = config.critic
    for budget_key, budget, micro_key, micro in (
        (
            "ppo_max_token_len_per_gpu",
            critic.ppo_max_token_len_per_gpu,
            "ppo_micro_batch_size_per_gpu",
            critic.ppo_micro_batch_size_per_gpu,
        ),
        (
            "forward_max_token_len_per_gpu",
            critic.forward_max_token_len_per_gpu,
            "forward_micro_batch_size_per_gpu",
            critic.forward_micro_batch_size_per_gpu,
        ),
    ):
        yield Role(
            dynamic_key="critic.use_dynamic_bsz",
            dynamic=critic.use_dynamic_bsz,
            budget_key=f"critic.{budget_key}",
            budget=budget,
            micro_key=f"critic.{micro_key}",
            micro=micro,
        )


def budget_checks(config: Config) -> list[str]:
    """Contradictions of the roles that run. A value that merely follows the actor's is not reported
    twice.
    """
    actor, *others = roles_of(config)
    found = [*_tokens_or_count(actor), *_budget_problems(actor, config)]
    said = {(actor.dynamic, actor.micro)}
    for role in others:
        if (role.dynamic, role.micro) not in said:
            found += _tokens_or_count(role)
        if role.dynamic_key == "critic.use_dynamic_bsz":  # one key of two budgets
            said.add((role.dynamic, role.micro))
        if (role.dynamic, role.budget) != (actor.dynamic, actor.budget):
            found += _budget_problems(role, config)
    return found


def _tokens_or_count(role: Role) -> Iterator[str]:
    if not role.dynamic and role.micro is None:
        yield f"{role.dynamic_key}=false needs {role.micro_key}; set it to a number such as 8"


def _budget_problems(role: Role, config: Config) -> Iterator[str]:
    yield from _large_enough(role, config)
    yield from _one_per_rank(role, config)


def _large_enough(role: Role, config: Config) -> Iterator[str]:
    if not role.dynamic or isinstance(role.budget, str):
        return
    sp = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = prompt + response
    smallest = min(role.budget) if isinstance(role.budget, list) else role.budget
    if smallest * sp < longest:
        times = f" times ulysses_sequence_parallel_size={sp}" if sp > 1 else ""
        yield (
            f"{role.budget_key}={role.budget}{times} holds fewer tokens than one sequence may "
            f"have: data.max_prompt_length={prompt} + data.max_response_length={response} = "
            f"{longest}; set {role.budget_key}={-(-longest // sp)} or more, or lower "
            "data.max_response_length"
        )


def _one_per_rank(role: Role, config: Config) -> Iterator[str]:
    trainer = config.trainer
    world = trainer.nnodes * trainer.n_gpus_per_node
    if isinstance(role.budget, list) and len(role.budget) != world:
        yield (
            f"{role.budget_key} lists {len(role.budget)} budgets for {world} rank(s) "
            f"(trainer.nnodes={trainer.nnodes} * n_gpus_per_node={trainer.n_gpus_per_node}); give "
            "one number per rank, or one for all"
        )
