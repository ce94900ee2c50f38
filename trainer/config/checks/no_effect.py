"""Keys that were set but that nothing reads while other keys have the values that they have. The
schema declares when that is so, beside each key (``trainer.config.schema.markers``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from trainer.config.keys import dotted
from trainer.config.keys.derived import derived_values
from trainer.config.keys.fields import marked, setting_keys
from trainer.config.keys.tree import default_of, format_value
from trainer.config.schema import Config
from trainer.config.schema.markers import NoEffect, NotBuilt

_ACTOR = "actor_rollout_ref.actor"


def no_effect_problems(config: Config) -> Iterator[str]:
    """One message for each key that was set, has no effect and is refused for that."""
    yield from _messages(config.model_dump(), refused=True)
    yield from _clip_ratio(config)


def no_effect_hints(config: Config) -> list[str]:
    """Lines for the start of the run: keys that were set, have no effect and are let pass, or have
    it twice.
    """
    values = config.model_dump()
    lines = [*_messages(values, refused=False), *_not_built(values), *_kl_twice(config)]
    return [f"[HINT] {line}." for line in lines]


def _messages(values: dict[str, Any], *, refused: bool) -> Iterator[str]:
    derived = derived_values(values)
    for key, rule in _rules():
        value = dotted.get(values, key)
        usual = (default_of(key), derived.get(key, default_of(key)), *rule.harmless)
        if rule.refused != refused or value in usual:
            continue
        switch = dotted.get(values, rule.switch)
        others_match = all(dotted.get(values, k) == v for k, v in rule.and_also.items())
        if switch in rule.values and others_match:
            shown = rule.values[rule.values.index(switch)]  # 0 rather than 0.0
            name = key.rpartition(".")[2]
            yield (
                f"{key}={format_value(value)}, but {rule.switch}={format_value(shown)} "
                f"{rule.reason}, or leave {name} out"
            )


@cache
def _rules() -> tuple[tuple[str, NoEffect], ...]:
    """Every key with each of its rules; a group's rules are those of its keys. Made once: a sweep
    asks for each of its jobs.
    """
    keys = setting_keys()
    return tuple(
        (key, rule)
        for name, rule in marked(NoEffect)
        for key in keys
        if key == name or key.startswith(f"{name}.")
    )


def _clip_ratio(config: Config) -> Iterator[str]:
    """``clip_ratio`` is the default of two other keys: no effect when both have other values."""
    actor = config.actor_rollout_ref.actor
    ratio = actor.clip_ratio
    low = actor.clip_ratio_low
    high = actor.clip_ratio_high
    if ratio != default_of(f"{_ACTOR}.clip_ratio") and ratio not in (low, high):
        yield (
            f"{_ACTOR}.clip_ratio={ratio}, but clip_ratio_low={low} and clip_ratio_high={high} are "
            "set as well and come first: set these, or leave clip_ratio out"
        )


def _kl_twice(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield (
            f"the KL to the reference counts twice: {_ACTOR}.use_kl_loss=true adds it to the loss "
            f"(weight {actor.kl_loss_coef:g}), algorithm.use_kl_in_reward=true takes it from the "
            f"reward (weight {config.algorithm.kl_ctrl.kl_coef:g}); set one of them to false, "
            "unless you want both"
        )


def _not_built(values: dict[str, Any]) -> Iterator[str]:
    derived = derived_values(values)
    for key, _ in marked(NotBuilt):
        value = dotted.get(values, key)
        if value != derived.get(key, default_of(key)):
            yield (f"{key}={format_value(value)} does nothing: reward models are not built yet")
