"""From ``actor_rollout_ref.rollout.agent`` to an agent."""

from __future__ import annotations

import inspect
from typing import Any

from trainer.base.errors import UserError, nearest
from trainer.base.user_code import load_module, names_in, raised_where
from trainer.rollout.agent import Agent
from trainer.rollout.calculator import Calculator

KEY = "actor_rollout_ref.rollout.agent"
BUILT_IN: dict[str, type[Agent]] = {"calculator": Calculator}


def load_agent(name: str, path: str | None) -> Agent:
    """An object of the class ``name``: a built-in one, or one of the Python file ``path``.

    Raises UserError naming the key when there is no such class, or it has no ``async def step(self,
    conversation)``.
    """
    if path is None:
        if name not in BUILT_IN:
            raise UserError(
                f"{KEY}.name={name}: no built-in agent "
                f"({', '.join(BUILT_IN)}){nearest(name, list(BUILT_IN))} "
                f"For your own class set {KEY}.path to the Python file that holds it"
            )
        return BUILT_IN[name]()
    module, file = load_module(path, key=f"{KEY}.path")
    kind = getattr(module, name, None)
    if not inspect.isclass(kind):
        known = names_in(file, classes=True)
        hint = nearest(name, known) or (
            f"; it has {', '.join(known)}" if known else "; it defines no class"
        )
        raise UserError(f"{KEY}.name: {file} has no class '{name}'{hint}")
    if not inspect.iscoroutinefunction(getattr(kind, "step", None)):
        raise UserError(
            f"{KEY}.name: '{name}' in {file} has no 'async def step(self, conversation) -> str | "
            "None'"
        )
    try:
        agent: Any = kind()
    except Exception as e:
        raise UserError(f"{KEY}.name: '{name}' in {file} can't be made: {raised_where(e)}") from e
    made: Agent = agent
    return made
