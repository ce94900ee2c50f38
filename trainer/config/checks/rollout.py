"""Checks of ``actor_rollout_ref.rollout``: which settings an engine reads, and which of them need
each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.keys import dotted
from trainer.config.keys.fields import marked
from trainer.config.keys.tree import default_of
from trainer.config.schema import Config
from trainer.config.schema.algorithm import rejection_bounds
from trainer.config.schema.markers import READ_BY_VLLM, ReadBy
from trainer.config.schema.rollout import Rollout

_ROLLOUT = "actor_rollout_ref.rollout"


def rollout_problems(config: Config) -> Iterator[str]:
    """One message for each setting that the engine does not read, or that contradicts another."""
    rollout = config.actor_rollout_ref.rollout
    yield from _read_by_another_engine(config, rollout)
    yield from _shared_engine(config, rollout)
    yield from _agent(rollout)
    if config.trainer.mode == "rl":
        yield from _staleness(config, rollout)
        yield from _correction(config, rollout)


def _read_by_another_engine(config: Config, rollout: Rollout) -> Iterator[str]:
    values = config.model_dump()
    for key, reader in marked(ReadBy):
        value = dotted.get(values, key)
        if rollout.name in reader.engines or value == default_of(key):
            continue
        if reader == READ_BY_VLLM:
            yield f"{key}={value} is read by vllm only; set {_ROLLOUT}.name=vllm, or leave it out"
        else:
            yield (
                f"{key}={value} is for an engine with processes of its own; set "
                f"{_ROLLOUT}.name=vllm_server, or leave it out"
            )
    budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if rollout.name == "hf" and rollout.max_num_batched_tokens != budget:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is read by vllm "
            f"only; set {_ROLLOUT}.name=vllm, or leave it out"
        )
    if rollout.name != "vllm_server" and rollout.server.replicas != 1:
        yield (
            f"{_ROLLOUT}.server.replicas={rollout.server.replicas}, but "
            f"{_ROLLOUT}.name={rollout.name} starts no server; set name=vllm_server"
        )


def _shared_engine(config: Config, rollout: Rollout) -> Iterator[str]:
    """An engine in the trainer's process that several ranks share."""
    size = rollout.tensor_model_parallel_size
    ranks = config.trainer.n_gpus_per_node
    if rollout.name != "vllm" or size == 1:
        return
    key = f"{_ROLLOUT}.tensor_model_parallel_size={size}"
    if ranks % size:
        yield (
            f"{key}: an engine in the trainer's process is split over ranks of one node, and "
            f"trainer.n_gpus_per_node={ranks}: set it to a divisor of that, or "
            f"{_ROLLOUT}.name=vllm_server"
        )
    if rollout.agent.name is not None:
        yield (
            f"{key} with {_ROLLOUT}.agent.name={rollout.agent.name}: ranks that share an engine "
            f"generate in step, and turns are as many as they come; set {_ROLLOUT}.name="
            "vllm_server, or tensor_model_parallel_size=1"
        )


def _agent(rollout: Rollout) -> Iterator[str]:
    agent = rollout.agent
    if agent.name is None:
        if agent.path is not None:
            yield f"{_ROLLOUT}.agent.path={agent.path} needs {_ROLLOUT}.agent.name, the class in it"
        return
    if agent.max_turns < 2:
        yield (
            f"{_ROLLOUT}.agent.max_turns=1 leaves the agent no turn to answer; set 2 or more, or "
            "agent.name=null"
        )
    if agent.max_observation_length >= rollout.response_length:
        yield (
            f"{_ROLLOUT}.agent.max_observation_length={agent.max_observation_length} fills the "
            f"whole response of {rollout.response_length} tokens; lower it, or raise "
            "data.max_response_length"
        )


def _correction(config: Config, rollout: Rollout) -> Iterator[str]:
    key = "algorithm.rollout_correction"
    settings = config.algorithm.rollout_correction
    asked = [name for name in ("rollout_is", "rollout_rs") if getattr(settings, name) is not None]
    if settings.bypass_mode and asked:
        yield (
            f"{key}.bypass_mode=true takes the engine's log-probs for the trainer's, so that "
            f"{asked[0]} would compare them with themselves: set one of the two to its default"
        )
    if settings.rollout_rs is not None and rejection_bounds(settings) is None:
        yield (
            f"{key}.rollout_rs={settings.rollout_rs} needs bounds, and rollout_rs_threshold="
            f"{settings.rollout_rs_threshold} gives none: set {key}.rollout_rs_threshold=2.0, or "
            "0.5_2.0 for both bounds of a ratio"
        )
    if not config.trainer.val_only:
        for name, value, whole in (
            ("top_p", rollout.top_p, rollout.top_p == 1.0),
            ("top_k", rollout.top_k, rollout.top_k in (-1, 0)),
        ):
            if not whole:
                yield (
                    f"{_ROLLOUT}.{name}={value}: tokens would be drawn from a part of the "
                    "distribution, and trained with the log-probs of all of it, so that the "
                    f"gradient is not that of the policy that sampled; leave {_ROLLOUT}.{name} "
                    f"out. {_ROLLOUT}.val_kwargs.{name} may be set"
                )


def _staleness(config: Config, rollout: Rollout) -> Iterator[str]:
    lag = config.algorithm.max_staleness
    if rollout.one_step_off and lag < 1:
        yield (
            f"{_ROLLOUT}.one_step_off=true trains on responses of the weights before: set "
            "algorithm.max_staleness=1 to allow that"
        )
    if lag and rollout.over_sampling == 1.0 and not rollout.one_step_off:
        yield (
            f"algorithm.max_staleness={lag} does nothing here: every response is drawn by the "
            f"newest weights. Set {_ROLLOUT}.over_sampling above 1, {_ROLLOUT}.one_step_off=true "
            "(vllm_server), or max_staleness=0"
        )
    if lag and not rollout.calculate_log_probs:
        yield (
            f"algorithm.max_staleness={lag} needs the log-probs under which older tokens were "
            f"drawn: set {_ROLLOUT}.calculate_log_probs=true"
        )
