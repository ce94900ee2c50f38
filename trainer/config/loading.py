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
from trainer.config.checks.problems import as_error, raise_all, unknown_key
from trainer.config.keys import tree as keys
from trainer.config.keys import verl
from trainer.config.keys.describe import wrong_value
from trainer.config.schema import Config


def load(settings: Mapping[str, Any] | DictConfig, *, complete: bool = True) -> Config:
    """Fill in defaults, resolve interpolations, check everything.

    ``settings`` is a nested mapping (a composed Hydra config, a frozen file, or a few keys in a
    test). ``complete=False``, for a plan, lets data and model be missing. Raises UserError with
    every unknown key, wrong value and contradiction at once.
    """
    tree = _plain(settings)
    problems = rename_aliases(tree) + _drop_redundant(tree) + _drop_replaced_groups(tree)
    try:
        written, resolved = _resolve(tree)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise as_error(
            [*problems, f"settings cannot be resolved: {str(error).splitlines()[0]}"]
        ) from error
    try:
        config = Config.model_validate(resolved)
    except ValidationError as error:
        raise as_error(problems + _explain(error, written, resolved)) from None
    raise_all(problems + cross_checks(config, complete=complete))
    return config


def rename_aliases(tree: dict[str, Any]) -> list[str]:
    """Move values of other spellings to our keys, in place. Returns contradictions."""
    problems = []
    for alias, key in verl.ALIASES.items():
        if (value := _take(tree, alias)) is _ABSENT:
            continue
        value = verl.ALIAS_VALUES.get((alias, str(value)), value)
        old = _take(tree, key)
        if old is not _ABSENT and old != value:
            problems.append(
                f"{alias} is another name of {key}: set one of them (now {value} and {old})"
            )
        _put(tree, key, value)
    return problems


def _drop_redundant(tree: dict[str, Any]) -> list[str]:
    """Take out verl's keys that ask for what happens anyway; messages for those that ask for
    something else.
    """
    problems = []
    for key in verl.REDUNDANT:
        value = _take(tree, key)
        if value is not _ABSENT and not verl.is_redundant(key, keys.written(value)):
            problems.append(unknown_key(key))
    return problems


def _drop_replaced_groups(tree: dict[str, Any]) -> list[str]:
    """Take out plain values that stand where a group of keys belongs, so that the rest can still be
    checked.
    """
    problems = []
    for group in sorted(keys.known_groups()):
        value = _value(tree, group.split("."))
        if value is not None and not isinstance(value, Mapping):
            problems.append(f"{group}={keys.written(value)}: expected a group of keys")
            _take(tree, group)
    return problems


def _plain(settings: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    raw = (
        OmegaConf.to_container(settings, resolve=False)
        if isinstance(settings, DictConfig)
        else settings
    )
    if not isinstance(raw, Mapping):
        raise UserError(f"settings must be a group of keys, not {type(raw).__name__}")
    return {str(k): _copy(v) for k, v in raw.items() if k not in keys.NOT_SETTINGS}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value


def _resolve(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """All settings, with interpolations as written and resolved."""
    merged = OmegaConf.merge(keys.defaults(), OmegaConf.create(tree))
    written = OmegaConf.to_container(merged, resolve=False)
    resolved = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(written, dict) and isinstance(resolved, dict)
    return {str(k): v for k, v in written.items()}, {str(k): v for k, v in resolved.items()}


def _explain(
    error: ValidationError, written: dict[str, Any], resolved: dict[str, Any]
) -> list[str]:
    """One message per key, however many branches of a union pydantic tried; none for keys that only
    follow another.
    """
    own: dict[str, str] = {}
    followers: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        parts = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            key = ".".join(parts)
            value = _value(resolved, parts)
            inside = (
                [k for k, _ in keys.leaves(value, f"{key}.")]
                if isinstance(value, Mapping) and value
                else [key]
            )
            own.update({leaf: unknown_key(leaf) for leaf in inside})
            continue
        while parts and not keys.is_known(".".join(parts)):
            parts.pop()
        follows = "${" in str(_value(written, parts))
        (followers if follows else own)[".".join(parts)] = wrong_value(
            ".".join(parts), _value(resolved, parts)
        )
    return list((own or followers).values())


_ABSENT = object()


def _value(tree: Any, parts: list[str]) -> Any:
    for part in parts:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _take(tree: dict[str, Any], key: str) -> Any:
    """Remove and return the value of a dotted key, and groups that it leaves empty."""
    *path, name = key.split(".")
    groups: list[dict[str, Any]] = [tree]
    for part in path:
        inner = groups[-1].get(part)
        if not isinstance(inner, dict):
            return _ABSENT
        groups.append(inner)
    value = groups[-1].pop(name, _ABSENT)
    for outer, part in zip(reversed(groups[:-1]), reversed(path), strict=True):
        if value is not _ABSENT and not outer[part]:
            del outer[part]
    return value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        inner = tree.get(part)
        if not isinstance(inner, dict):
            inner = tree[part] = {}
        tree = inner
    tree[name] = value
