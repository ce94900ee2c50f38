"""A mapping of settings becomes a checked ``Config``, or one error that lists everything that is
wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from trainer.base.errors import UserError
from trainer.config.checks.cross import cross_checks
from trainer.config.checks.problems import raise_problems, settings_error, unknown_key
from trainer.config.keys import dotted, verl
from trainer.config.keys.describe import wrong_value
from trainer.config.keys.interpolation import NotPlain, copy, merge, resolve
from trainer.config.keys.tree import (
    NOT_SETTINGS,
    defaults,
    format_value,
    is_known,
    known_groups,
    leaves,
)
from trainer.config.schema import Config


def load(settings: Mapping[str, Any] | DictConfig, *, complete: bool = True) -> Config:
    """Fill in defaults, resolve interpolations, check everything.

    ``settings`` is a nested mapping (a composed Hydra config, a frozen file, or a few keys in a
    test). ``complete=False``, for a plan, lets data and model be missing. Raises UserError with
    every unknown key, wrong value and contradiction at once.
    """
    tree = _plain(settings)
    problems = _rename_aliases(tree) + _drop_redundant(tree) + _drop_replaced_groups(tree)
    try:
        written, resolved = _resolve(tree)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise settings_error(
            [*problems, f"settings cannot be resolved: {str(error).splitlines()[0]}"]
        ) from error
    try:
        config = Config.model_validate(resolved)
    except ValidationError as error:
        raise settings_error(problems + _explain(error, written, resolved)) from None
    raise_problems(problems + cross_checks(config, complete=complete))
    return config


def _plain(settings: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    raw: Any = settings
    if isinstance(settings, DictConfig):
        raw = OmegaConf.to_container(settings, resolve=False)
    if not isinstance(raw, Mapping):
        raise UserError(f"settings must be a group of keys, not {type(raw).__name__}")
    return {str(k): copy(v) for k, v in raw.items() if k not in NOT_SETTINGS}


def _rename_aliases(tree: dict[str, Any]) -> list[str]:
    """Move values of verl's other spellings to our keys, in place. Returns contradictions."""
    problems = []
    for alias, key in verl.ALIASES.items():
        value = dotted.take(tree, alias)
        if value is dotted.ABSENT:
            continue
        value = verl.ALIAS_VALUES.get((alias, str(value)), value)
        old = dotted.take(tree, key)
        if old is not dotted.ABSENT and old != value:
            problems.append(
                f"{alias} is another name of {key}: set one of them (now {value} and {old})"
            )
        dotted.put(tree, key, value)
    return problems


def _drop_redundant(tree: dict[str, Any]) -> list[str]:
    """Take out verl's keys that ask for what happens anyway, in place. Returns a message for each
    that asks for something else.
    """
    problems = []
    for key in verl.REDUNDANT:
        value = dotted.take(tree, key)
        if value is dotted.ABSENT:
            continue
        if not verl.is_redundant(key, format_value(value)):
            problems.append(unknown_key(key))
    return problems


def _drop_replaced_groups(tree: dict[str, Any]) -> list[str]:
    """Take out plain values that stand where a group of keys belongs, in place, so that the rest
    can still be checked. Returns a message for each.
    """
    problems = []
    for group in sorted(known_groups()):
        value = dotted.get(tree, group)
        if value is not None and not isinstance(value, Mapping):
            problems.append(f"{group}={format_value(value)}: expected a group of keys")
            dotted.take(tree, group)
    return problems


def _resolve(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """All settings, with interpolations as written and resolved."""
    merged = merge(defaults(), tree)
    try:
        return merged, resolve(merged)
    except NotPlain:
        return resolve_by_omegaconf(tree)


def resolve_by_omegaconf(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """All settings with interpolations of any form, as written and resolved.

    Raises OmegaConfBaseException, TypeError or ValueError for one that can't be resolved.
    """
    merged = OmegaConf.merge(OmegaConf.create(defaults()), OmegaConf.create(dict(tree)))
    written = OmegaConf.to_container(merged, resolve=False)
    resolved = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(written, dict) and isinstance(resolved, dict)
    return {str(k): v for k, v in written.items()}, {str(k): v for k, v in resolved.items()}


def _explain(
    error: ValidationError, written: dict[str, Any], resolved: dict[str, Any]
) -> list[str]:
    """One message per key, however many branches of a union pydantic tried. Keys that only follow
    a wrong one are left out.
    """
    set_keys: dict[str, str] = {}
    following_keys: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            set_keys.update({leaf: unknown_key(leaf) for leaf in _leaves_of(resolved, key)})
            continue
        while key and not is_known(key):
            key = key.rpartition(".")[0]
        follows = "${" in str(dotted.get(written, key))
        messages = following_keys if follows else set_keys
        messages[key] = wrong_value(key, dotted.get(resolved, key))
    return list((set_keys or following_keys).values())


def _leaves_of(tree: dict[str, Any], key: str) -> list[str]:
    """Dotted names of everything under ``key``, or ``key`` itself when it is no group."""
    value = dotted.get(tree, key)
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for leaf, _ in leaves(value, f"{key}.")]
