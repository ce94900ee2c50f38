"""The tables of docs/coming-from.md that come from the code."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.config.verl.accepted import ACCEPTED, Accepted
from trainer.config.verl.names import ALIASES, GROUPS, VALUES
from trainer.config.verl.refused import REFUSED, REFUSED_VALUES

BEGIN = "## Keys with another name\n"
"""First line of what is written by ``python -m trainer.config.reference``."""


def tables() -> str:
    """All tables, in Markdown."""
    names = [(f"`{alias}`", f"`{key}`") for alias, key in {**ALIASES, **GROUPS}.items()]
    values = [(f"`{key}={value}`", f"`{ours}`") for (key, value), ours in VALUES.items()]
    accepted = [(f"`{key}`{_only(rule)}", rule.reason) for key, rule in ACCEPTED.items()]
    refused = [(f"`{key}`", reason) for key, reason in REFUSED.items()]
    refused += [(f"`{key}={value}`", reason) for (key, value), reason in REFUSED_VALUES.items()]
    return "\n".join(
        [
            BEGIN + "\n" + _table("verl", "here", [*names, *values]),
            "## Settings that change nothing here\n\nA name stands for all keys below it.\n\n"
            + _table("setting", "why", accepted),
            "## Settings that are not supported\n\n"
            + _table("setting", "why, and what to use", refused),
        ]
    )


def _only(rule: Accepted) -> str:
    if rule.values is None:
        return ""
    return " = " + ", ".join(value for value in rule.values if value)


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    return "\n".join(lines) + "\n"
