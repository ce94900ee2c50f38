"""One setting of verl, or of ours, through the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import yaml

from trainer.config.keys import dotted
from trainer.config.keys.tree import (
    format_value,
    is_known,
    known_keys,
    leaves,
    nearest_key,
)
from trainer.config.verl.accepted import accepted_reason
from trainer.config.verl.names import DROPPED_ITEMS, VALUES, our_name
from trainer.config.verl.refused import REFUSED_VALUES, refused_reason

Outcome = Literal["taken", "accepted", "refused", "unknown"]


@dataclass(frozen=True)
class Translation:
    """What a setting becomes here."""

    outcome: Outcome
    """``taken``: a setting of ours. ``accepted``: it changes nothing here. ``refused``: verl's, not
    supported. ``unknown``: of neither.
    """
    key: str
    """Our name of the key."""
    value: str
    """The value, as one types it here."""
    reason: str = ""
    """Why it changes nothing, or is not supported, or what was meant."""


@lru_cache(maxsize=10_000)
def translate(key: str, value: str) -> Translation:
    """What ``key=value``, as typed, becomes here."""
    name = our_name(key)
    bare = value.strip("'\"").lower()
    value = _without_dropped_items(name, VALUES.get((name, bare), value))
    reason = accepted_reason(name, value)
    if reason is not None:
        return Translation("accepted", name, value, reason)
    reason = REFUSED_VALUES.get((name, bare))
    if reason is not None:
        return Translation("refused", name, value, reason)
    if is_known(name):
        return Translation("taken", name, value)
    reason = refused_reason(name)
    if reason is not None:
        return Translation("refused", name, value, reason)
    near = nearest_key(name)
    hint = f"did you mean {near}?" if near else "docs/config.md lists all keys"
    return Translation("unknown", name, value, hint)


def _without_dropped_items(key: str, value: str) -> str:
    """A list without verl's items that ask for what happens anyway; other values as they are."""
    dropped = DROPPED_ITEMS.get(key)
    if dropped is None or not (value.startswith("[") and value.endswith("]")):
        return value
    items = [item.strip().strip("'\"") for item in value[1:-1].split(",")]
    kept = [item for item in items if item not in dropped]
    return value if len(kept) == len(items) else f"[{','.join(kept)}]"


def refusals(settings: Mapping[str, Translation]) -> list[str]:
    """One message for each reason, which names all its settings. ``settings``: as typed -> its
    translation; only those that are refused or unknown count.
    """
    by_reason: dict[str, list[str]] = {}
    messages: list[str] = []
    for typed, found in settings.items():
        if found.outcome == "unknown":
            messages.append(f"unknown key {typed.partition('=')[0]}; {found.reason}")
        elif found.outcome == "refused":
            by_reason.setdefault(found.reason, []).append(typed)
    for reason, names in by_reason.items():
        verb = "is" if len(names) == 1 else "are"
        messages.append(f"{', '.join(names)} {verb} not supported: {reason}")
    return messages


def accepted_line(settings: Mapping[str, Translation]) -> str | None:
    """One line that names the settings which change nothing here; None without any."""
    names = [typed for typed, found in settings.items() if found.outcome == "accepted"]
    if not names:
        return None
    shown = ", ".join(sorted({_short(name) for name in names}))
    return (
        f"{len(names)} of verl's settings change nothing here: {shown} "
        "(docs/coming-from.md says why)"
    )


def translate_tree(tree: dict[str, Any]) -> tuple[dict[str, Translation], list[str]]:
    """Give verl's settings in a nested mapping their names here, and take out what is no setting,
    in place.

    Returns the translation of each setting that was renamed or taken out, by ``key=value``, and a
    message for each key that is set under two names with different values.
    """
    changed: dict[str, Translation] = {}
    problems: list[str] = []
    for key, value in list(leaves(tree)):
        text = format_value(value)
        found = translate(key, text)
        if found.outcome == "taken" and found.key == key and found.value == text:
            continue
        dotted.take(tree, key)
        changed[f"{key}={text}"] = found
        if found.outcome == "taken":
            new = value if found.value == text else yaml.safe_load(found.value)
            problems += _put_renamed(tree, key, found.key, new)
    return changed, problems


def _put_renamed(tree: dict[str, Any], alias: str, key: str, value: Any) -> list[str]:
    """Set ``key`` to the value that ``alias`` had. A message when the tree sets both, apart from
    our default.
    """
    old = dotted.get(tree, key)
    dotted.put(tree, key, value)
    if old is None or old == value or format_value(old) == known_keys().get(key):
        return []
    return [
        f"{alias} is another name of {key}: set one of them (now {format_value(value)} and "
        f"{format_value(old)})"
    ]


def _short(typed: str) -> str:
    """The last words of a key, enough to recognise it."""
    key = typed.partition("=")[0]
    return ".".join(key.rsplit(".", 2)[-2:])
