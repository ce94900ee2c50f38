"""Says in words what is wrong with keys."""

from __future__ import annotations

from trainer.base.errors import UserError
from trainer.config.keys import tree as keys
from trainer.config.keys import verl


def as_error(problems: list[str]) -> UserError:
    """One UserError that lists every problem."""
    if len(problems) == 1:
        return UserError(problems[0])
    return UserError(
        f"{len(problems)} problems in the settings:\n" + "\n".join(f"  - {p}" for p in problems)
    )


def raise_all(problems: list[str]) -> None:
    """Raise ``as_error`` unless there is no problem."""
    if problems:
        raise as_error(problems)


def unknown_key(key: str) -> str:
    """The message for a key that is no setting: the reason when verl has it, else the nearest known
    key.
    """
    reason = verl.reason_against(key)
    if reason:
        return f"{key} is not supported: {reason}"
    near = keys.nearest_key(key)
    return f"unknown key {key}" + (
        f"; did you mean {near}?" if near else "; docs/config.md lists all keys"
    )
