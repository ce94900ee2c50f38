"""Interpolations ``${...}`` in a tree of plain values.

The forms that settings are written in (another key, a function of one, ``oc.env``) are resolved
here, in well under a millisecond for all settings; OmegaConf, which knows all forms, takes 50 ms.
What is resolved here has the value that OmegaConf gives it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import ListConfig

from trainer.base.errors import UserError

MOST_VALUES = 100_000
"""More values than any settings hold: lists that repeat each other, ``[${a},${a}]``, grow without
end.
"""


def twice(budget: Any) -> Any:
    """Double a token budget: forward-only passes hold no activations. ``auto`` stays ``auto``, and
    so does what is no budget: the check of the key itself says so.
    """
    if isinstance(budget, list | tuple | ListConfig):
        return [twice(tokens) for tokens in budget]
    if isinstance(budget, int) and not isinstance(budget, bool):
        return 2 * budget
    return budget


def is_null(value: Any) -> bool:
    """Whether another key is not set: micro-batches are cut by tokens unless their count is."""
    return value is None


def zero_stage_for(param_offload: Any) -> int:
    """The ZeRO stage: 3 where weights are kept in host memory, which no other stage does."""
    return 3 if param_offload is True else 1


def fifth(tokens: Any) -> Any:
    """A fifth of a length, at least 1: DAPO's buffer is 4,096 of 20,480 tokens. What is no length
    stays: the check of the key itself says so.
    """
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        return max(tokens // 5, 1)
    return tokens


EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "twice": twice,
    "is_null": is_null,
    "zero_stage_for": zero_stage_for,
    "fifth": fifth,
}
"""Functions of ``${name:${other.key}}`` in ``conf/``."""
_DEEPEST = 32
_KEY = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_TOKEN = re.compile(
    rf"\$\{{(?:(?P<function>{'|'.join(EXPRESSIONS)}):\$\{{(?P<argument>{_KEY})\}}"
    r"|oc\.env:(?P<variable>[A-Za-z_]\w*)(?:,(?P<default>[A-Za-z./_-][\w./-]*))?"
    rf"|(?P<key>{_KEY}))\}}",
    re.ASCII,
)
_NOT_TEXTS = frozenset({"null", "true", "false", "nan", "inf"})
_MISSING = "???"
PLAIN = (str, int, float)
"""Types of values that hold no others; bool is an int."""


class NotPlain(Exception):
    """The tree holds a form of interpolation that only OmegaConf resolves."""


def copy(value: Any) -> Any:
    """A copy of nested mappings and lists with texts as keys."""
    if isinstance(value, PLAIN):  # most of them, and asking for a mapping is slow
        return value
    if isinstance(value, Mapping):
        return {str(name): copy(inner) for name, inner in value.items()}
    return [copy(inner) for inner in value] if isinstance(value, list | tuple) else value


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with everything of ``above`` in its place; mappings are merged, other values
    replaced. Changes ``below``.
    """
    for name, value in above.items():
        old = below.get(name)
        if isinstance(old, dict) and isinstance(value, Mapping):
            merge(old, value)
        else:
            below[name] = copy(value)
    return below


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` with every interpolation resolved.

    Raises NotPlain where only OmegaConf can tell, and UserError for settings that grow without end.
    """
    resolved = _Resolver(tree).value(tree, 0)
    assert isinstance(resolved, dict)
    return resolved


class _Resolver:
    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree
        self.values = 0

    def value(self, value: Any, depth: int) -> Any:
        """``value`` resolved; ``depth``: interpolations that led to it."""
        self.values += 1
        if self.values > MOST_VALUES:
            raise UserError(
                f"the settings hold more than {MOST_VALUES} values once their interpolations "
                "${...} are resolved: lists or groups that repeat each other"
            )
        if isinstance(value, str):
            return self._text(value, depth)
        if value is None or isinstance(value, PLAIN):
            return value
        if isinstance(value, Mapping):
            return {name: self.value(inner, depth) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, depth) for inner in value]
        raise NotPlain

    def _text(self, text: str, depth: int) -> Any:
        if text == _MISSING:
            raise NotPlain
        if "${" not in text:
            return text
        if "\\" in text or depth >= _DEEPEST:
            raise NotPlain
        whole = _TOKEN.fullmatch(text)
        if whole is not None:
            return self._token(whole, depth)
        if "$" in _TOKEN.sub("", text):
            raise NotPlain
        return _TOKEN.sub(lambda token: self._part(token, depth), text)

    def _part(self, token: re.Match[str], depth: int) -> str:
        value = self._token(token, depth)
        if not isinstance(value, str | int | float):
            raise NotPlain
        return str(value)

    def _token(self, token: re.Match[str], depth: int) -> Any:
        if token["variable"] is not None:
            return _environment(token["variable"], token["default"])
        if token["key"] is not None:
            return self.value(self._target(token["key"]), depth + 1)
        return _computed(token["function"], self.value(self._target(token["argument"]), depth + 1))

    def _target(self, key: str) -> Any:
        node: Any = self.tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                raise NotPlain
            node = node[part]
        return node


def _computed(function: str, argument: Any) -> Any:
    try:
        return EXPRESSIONS[function](argument)
    except TypeError:
        raise NotPlain from None  # OmegaConf's error names the key


def _environment(name: str, default: str | None) -> str:
    value = os.environ.get(name, default)
    if value is None or "${" in value or value == _MISSING or value.lower() in _NOT_TEXTS:
        raise NotPlain
    return value
