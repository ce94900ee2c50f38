"""Load the agent that ``actor_rollout_ref.rollout.agent`` names."""

from __future__ import annotations

import inspect
from typing import Any

from trainer.base.errors import UserError, nearest
from trainer.base.user_code import describe_exception, load_module, public_names
from trainer.rollout.agent import ToolAgent
from trainer.rollout.calculator import Calculator

KEY = "actor_rollout_ref.rollout.agent"
BUILT_IN: dict[str, type[ToolAgent]] = {"calculator": Calculator}


def load_agent(name: str, path: str | None) -> ToolAgent:
    """Make an object of the class ``name``: a built-in one, or one of the Python file ``path``.

    Raises UserError naming the key when there is no such class, when it has no ``async def
    step(self, conversation)``, or when its constructor fails.
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
    agent_class = getattr(module, name, None)
    if not inspect.isclass(agent_class):
        known = public_names(file, classes=True)
        contents = f"; it has {', '.join(known)}" if known else "; it defines no class"
        hint = nearest(name, known) or contents
        raise UserError(f"{KEY}.name: {file} has no class '{name}'{hint}")
    if not inspect.iscoroutinefunction(getattr(agent_class, "step", None)):
        raise UserError(
            f"{KEY}.name: '{name}' in {file} has no 'async def step(self, conversation) -> str | "
            "None'"
        )
    try:
        agent: Any = agent_class()
    except Exception as e:
        raise UserError(
            f"{KEY}.name: '{name}' in {file} can't be made: {describe_exception(e)}"
        ) from e
    loaded: ToolAgent = agent
    return loaded
