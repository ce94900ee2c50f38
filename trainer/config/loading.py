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
from trainer.config.checks.problems import SettingsError, with_key
from trainer.config.keys import dotted
from trainer.config.keys.describe import wrong_value
from trainer.config.keys.interpolation import NotPlain, copy, merge, resolve
from trainer.config.keys.tree import (
    NOT_SETTINGS,
    default_of,
    defaults,
    format_value,
    is_known,
    known_groups,
)
from trainer.config.schema import Config
from trainer.config.verl.translate import refusals, translate_tree


def load(settings: Mapping[str, Any] | DictConfig, *, complete: bool = True) -> Config:
    """Fill in defaults, resolve interpolations, check everything.

    ``settings`` is a nested mapping (a composed Hydra config, a frozen file, or a few keys in a
    test). ``complete=False``, for a plan, lets data and model be missing. Raises UserError with
    every unknown key, wrong value and contradiction at once.
    """
    tree = _plain(settings)
    translations, problems = translate_tree(tree)
    problems += refusals(translations) + _drop_replaced_groups(tree)
    try:
        written, resolved = _resolve(tree)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise SettingsError(
            [*problems, f"settings cannot be resolved: {with_key(error)}"]
        ) from error
    config, wrong = _validate(written, resolved)
    problems += wrong.values()
    if config is not None:
        problems += [
            problem
            for problem in cross_checks(config, complete=complete)
            if not any(key in problem for key in wrong)
        ]
    if problems or config is None:
        raise SettingsError(problems)
    return config


def _validate(
    written: dict[str, Any], resolved: dict[str, Any]
) -> tuple[Config | None, dict[str, str]]:
    """The settings, and a message for each key of a wrong value. Wrong values give way to defaults,
    so that the other settings can be checked; None where that does not help.
    """
    try:
        return Config.model_validate(resolved), {}
    except ValidationError as error:
        wrong, following = _explain(error, written, resolved)
    values = copy(resolved)
    for key in (*wrong, *following):
        dotted.put(values, key, default_of(key))
    try:
        return Config.model_validate(values), wrong
    except ValidationError:
        return None, wrong


def _plain(settings: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    raw: Any = settings
    if isinstance(settings, DictConfig):
        raw = OmegaConf.to_container(settings, resolve=False)
    if not isinstance(raw, Mapping):
        raise UserError(f"settings must be a group of keys, not {type(raw).__name__}")
    return {str(k): copy(v) for k, v in raw.items() if k not in NOT_SETTINGS}


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
) -> tuple[dict[str, str], list[str]]:
    """Key of a wrong value -> one message, however many branches of a union pydantic tried; and the
    keys that only follow a wrong one.
    """
    set_keys: dict[str, str] = {}
    following_keys: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in item["loc"])
        while key and not is_known(key):
            key = key.rpartition(".")[0]
        follows = "${" in str(dotted.get(written, key))
        messages = following_keys if follows else set_keys
        messages[key] = wrong_value(key, dotted.get(resolved, key))
    if not set_keys:
        return following_keys, []
    return set_keys, list(following_keys)
