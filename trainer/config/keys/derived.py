"""Keys derived from another one by an expression ``${...}`` in ``conf/config.yaml``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainer.config.keys import dotted
from trainer.config.keys.interpolation import EXPRESSIONS
from trainer.config.keys.tree import known_keys


def derived_keys() -> dict[str, str]:
    """Dotted key -> its expression ``${...}`` in ``conf/config.yaml``."""
    return {key: raw for key, raw in known_keys().items() if raw.startswith("${")}


def derived_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Derived key -> the value that it has in these (resolved) settings unless it is set itself."""
    return {key: _evaluate(values, expression) for key, expression in derived_keys().items()}


def with_expressions(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``values`` with its expression ``${...}`` for each derived key that was not set
    itself: whoever changes the other key later changes both.
    """
    result: dict[str, Any] = copy.deepcopy(dict(values))
    expressions = derived_keys()
    for key, derived in derived_values(values).items():
        if dotted.get(values, key) == derived:
            dotted.put(result, key, expressions[key])
    return result


def _evaluate(values: Mapping[str, Any], expression: str) -> Any:
    inner = expression.removeprefix("${").removesuffix("}")
    name, colon, argument = inner.partition(":")
    if colon:
        return EXPRESSIONS[name](_evaluate(values, argument))
    return dotted.get(values, inner)
