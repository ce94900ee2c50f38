"""Many messages become one error. Does not import the schema."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.base.errors import UserError
from trainer.config.keys import verl
from trainer.config.keys.tree import nearest_key


def settings_error(problems: Sequence[str]) -> UserError:
    """One UserError that lists every problem."""
    if len(problems) == 1:
        return UserError(problems[0])
    return UserError(
        f"{len(problems)} problems in the settings:\n" + "\n".join(f"  - {p}" for p in problems)
    )


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one UserError that lists every problem, unless there is none."""
    if problems:
        raise settings_error(problems)


def unknown_key(key: str) -> str:
    """The message for a key that is no setting: the reason when it is one of verl's, otherwise the
    nearest known key.
    """
    reason = verl.unsupported_reason(key)
    if reason:
        return f"{key} is not supported: {reason}"
    near = nearest_key(key)
    return f"unknown key {key}" + (
        f"; did you mean {near}?" if near else "; docs/config.md lists all keys"
    )
