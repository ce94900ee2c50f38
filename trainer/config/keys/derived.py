"""Keys that follow another one: which they are, and what they would be by themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainer.config.keys import tree as keys

_TWICE = "${twice:"


def followers() -> dict[str, str]:
    """Dotted key -> the expression ``${...}`` that it has in ``conf/config.yaml``."""
    return {key: raw for key, raw in keys.known_keys().items() if raw.startswith("${")}


def own_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What each key that follows another one would be in these (resolved) settings, had nobody set
    it.
    """
    return {key: _of(values, raw) for key, raw in followers().items()}


def with_followers(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, with ``${...}`` for each key that has the value of the one it follows: who
    changes that one later changes both.
    """
    found: dict[str, Any] = copy.deepcopy(dict(values))
    expressions = followers()
    for key, own in own_values(values).items():
        parent, _, name = key.rpartition(".")
        section = at(found, parent)
        if section[name] == own:
            section[name] = expressions[key]
    return found


def at(values: Any, key: str) -> Any:
    """What ``values`` have under the dotted ``key``."""
    for part in key.split("."):
        values = values[part]
    return values


def _of(values: Mapping[str, Any], raw: str) -> Any:
    if raw.startswith(_TWICE):
        return keys.twice(_of(values, raw.removeprefix(_TWICE).removesuffix("}")))
    return at(values, raw.removeprefix("${").removesuffix("}"))
