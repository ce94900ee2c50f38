"""Nested mappings by dotted key: ``a.b`` is ``tree["a"]["b"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABSENT = object()
"""What ``take`` returns for a key that is not there."""


def get(tree: Any, key: str) -> Any:
    """The value under ``key``; None when it is not there."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict | Mapping) else None
    return tree


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key`` in place. Groups that are missing are made; a plain value where a group belongs
    is replaced.
    """
    *groups, name = key.split(".")
    for group in groups:
        inner = tree.get(group)
        if not isinstance(inner, dict):
            inner = tree[group] = {}
        tree = inner
    tree[name] = value


def take(tree: dict[str, Any], key: str) -> Any:
    """Remove and return the value of ``key``, and groups that this leaves empty; ``ABSENT`` when
    it is not there.
    """
    *groups, name = key.split(".")
    path: list[dict[str, Any]] = [tree]
    for group in groups:
        inner = path[-1].get(group)
        if not isinstance(inner, dict):
            return ABSENT
        path.append(inner)
    value = path[-1].pop(name, ABSENT)
    if value is ABSENT:
        return ABSENT
    for outer, group in zip(reversed(path[:-1]), reversed(groups), strict=True):
        if not outer[group]:
            del outer[group]
    return value
