"""Token budgets and micro-batch sizes of every role: one of the two, and large enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.schema import Config


@dataclass(frozen=True)
class Role:
    """A role's keys and values for its micro-batches."""

    switch_key: str
    dynamic: bool
    micro_key: str
    micro: int | None
    budgets: dict[str, int | list[int] | str]
    """Key -> token budget."""


def roles_of(config: Config) -> list[Role]:
    """The roles that run, the actor first."""
    ref = config.actor_rollout_ref
    roles = [
        Role(
            "actor_rollout_ref.actor.use_dynamic_bsz",
            ref.actor.use_dynamic_bsz,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            ref.actor.ppo_micro_batch_size_per_gpu,
            {
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ref.actor.ppo_max_token_len_per_gpu
            },
        )
    ]
    for name, part in (("ref", ref.ref), ("rollout", ref.rollout)):
        key = f"actor_rollout_ref.{name}.log_prob"
        roles.append(
            Role(
                f"{key}_use_dynamic_bsz",
                part.log_prob_use_dynamic_bsz,
                f"{key}_micro_batch_size_per_gpu",
                part.log_prob_micro_batch_size_per_gpu,
                {f"{key}_max_token_len_per_gpu": part.log_prob_max_token_len_per_gpu},
            )
        )
    return roles


def budget_checks(config: Config) -> list[str]:
    """Contradictions of the roles that run. A value that merely follows the actor's is not reported
    twice.
    """
    actor, *others = roles_of(config)
    found = [*_one_of_two(actor), *_large_enough(actor, config), *_list_lengths(actor, config)]
    for role in others:
        if (role.dynamic, role.micro) != (actor.dynamic, actor.micro):
            found += _one_of_two(role)
        if (
            list(role.budgets.values()) != list(actor.budgets.values())
            or role.dynamic != actor.dynamic
        ):
            found += [*_large_enough(role, config), *_list_lengths(role, config)]
    return found


def _one_of_two(role: Role) -> Iterator[str]:
    if role.dynamic and role.micro is not None:
        yield (
            f"{role.switch_key}=true and {role.micro_key}={role.micro} exclude each other: "
            "micro-batches are "
            f"cut by tokens or by count; set {role.micro_key}=null, or {role.switch_key}=false"
        )
    if not role.dynamic and role.micro is None:
        yield f"{role.switch_key}=false needs {role.micro_key}; set it to a number such as 8"


def _large_enough(role: Role, config: Config) -> Iterator[str]:
    data, sp = config.data, config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    longest = data.max_prompt_length + data.max_response_length
    for key, budget in role.budgets.items():
        if not role.dynamic or isinstance(budget, str):
            continue
        least = (min(budget) if isinstance(budget, list) else budget) * sp
        if least < longest:
            times = f" times ulysses_sequence_parallel_size={sp}" if sp > 1 else ""
            yield (
                f"{key}={budget}{times} holds fewer tokens than one sequence may have: "
                "data.max_prompt_length="
                f"{data.max_prompt_length} + data.max_response_length={data.max_response_length} = "
                f"{longest}; "
                f"set {key}={-(-longest // sp)} or more, or lower data.max_response_length"
            )


def _list_lengths(role: Role, config: Config) -> Iterator[str]:
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    for key, budget in role.budgets.items():
        if isinstance(budget, list) and len(budget) != world:
            yield (
                f"{key} lists {len(budget)} budgets for {world} rank(s) "
                f"(trainer.nnodes={config.trainer.nnodes} * "
                f"n_gpus_per_node={config.trainer.n_gpus_per_node}); give one number per rank, or "
                "one for all"
            )
