"""The key tree and its defaults, as ``conf/config.yaml`` has them. Does not import the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from trainer.config.keys import dotted
from trainer.config.keys.conf_tree import conf_dir
from trainer.config.keys.interpolation import EXPRESSIONS, PLAIN, copy

LIKE_NAME = 0.75
"""Least likeness of the last parts of two keys that may be taken for each other."""
LIKE_GROUP = 0.6
"""Least likeness of the groups before them."""
OPEN_KEYS = frozenset({"data.apply_chat_template_kwargs", "reward.rules"})
"""Groups in which the user may put any key."""
NOT_SETTINGS = ("defaults", "hydra", "cluster", "container")
"""Top-level keys of a Hydra file that are no settings of a run: Hydra's own, and those that only
``jobs`` reads.
"""


for _name, _function in EXPRESSIONS.items():
    OmegaConf.register_new_resolver(_name, _function, replace=True)


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    # Plain data: omegaconf changes a tree while it copies it, which threads must not share.
    tree = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"), resolve=False)
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items() if name not in NOT_SETTINGS}


@lru_cache(maxsize=1)
def _resolved_defaults() -> Any:
    return OmegaConf.to_container(OmegaConf.create(_defaults()), resolve=True)


def defaults() -> dict[str, Any]:
    """All settings with their defaults, interpolations unresolved: a new tree at each call."""
    tree = copy(_defaults())
    assert isinstance(tree, dict)
    return tree


def default_of(key: str) -> Any:
    """The default of ``key``, resolved; for a group a mapping, not to be changed."""
    return dotted.get(_resolved_defaults(), key)


@lru_cache(maxsize=1)
def known_keys() -> dict[str, str]:
    """Dotted key of every setting -> its default as written in the file."""
    return {key: format_value(value) for key, value in leaves(_defaults())}


@lru_cache(maxsize=1)
def known_groups() -> frozenset[str]:
    """Dotted names of the groups of keys."""
    groups: set[str] = set()
    for key in known_keys():
        while "." in key:
            key = key.rpartition(".")[0]
            groups.add(key)
    return frozenset(groups)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a nested mapping. Open and empty groups count as one
    value.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_group = not isinstance(value, PLAIN) and isinstance(value, Mapping)
        if is_group and value and key not in OPEN_KEYS:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def in_open_group(key: str) -> bool:
    """Whether ``key`` lies in a group in which the user may put any key."""
    return any(key.startswith(f"{name}.") for name in OPEN_KEYS)


def is_known(key: str) -> bool:
    """Whether ``key`` is a setting, a group of settings, or lies in an open group."""
    return key in known_keys() or key in known_groups() or in_open_group(key)


def nearest_key(key: str) -> str | None:
    """The known key that someone who typed ``key`` most likely meant: alike in the last part and in
    the groups before it, if any were typed. None when no key is.
    """
    group, _, name = key.rpartition(".")

    def likeness(known: str) -> float:
        known_group, _, known_name = known.rpartition(".")
        same_name = SequenceMatcher(None, name, known_name).ratio()
        same_group = 1.0
        if group and not f".{known_group}".endswith(f".{group}"):
            same_group = SequenceMatcher(None, group, known_group).ratio()
        if same_name < LIKE_NAME or same_group < LIKE_GROUP:
            return 0.0
        return same_name + same_group

    best = max([*known_keys(), *known_groups()], key=likeness)
    return best if likeness(best) > 0 else None


def format_value(value: Any) -> str:
    """``value`` as one types it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    return str(value)
