"""A user's own reward function, from a Python file."""

from __future__ import annotations

import inspect
from pathlib import Path

from trainer.base.errors import UserError, nearest
from trainer.base.user_code import load_module, names_in
from trainer.rewards.types import Reward

SIGNATURE = "def {name}(data_source, solution_str, ground_truth, extra_info=None)"
_KEY = "custom_reward_function"


def load_reward(path: str | Path, name: str = "compute_score") -> Reward:
    """The function ``name`` of the Python file ``path``.

    Raises UserError naming ``custom_reward_function.path`` or ``.name`` when the file is missing or
    doesn't load, when it has no such function, or when that can't be called with verl's four
    arguments.
    """
    module, file = load_module(path, key=f"{_KEY}.path")
    function = getattr(module, name, None)
    if function is None:
        known = names_in(file)
        hint = nearest(name, known) or (
            f"; it has {', '.join(known)}" if known else "; it defines no function"
        )
        raise UserError(f"{_KEY}.name: {file} has no function '{name}'{hint}")
    if not callable(function):
        raise UserError(
            f"{_KEY}.name: '{name}' in {file} is a {type(function).__name__}, not a function"
        )
    wanted = SIGNATURE.format(name=name)
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{_KEY}.name: '{name}' in {file} is async; write {wanted}")
    try:
        inspect.signature(function).bind(
            data_source="", solution_str="", ground_truth="", extra_info={}
        )
    except TypeError as e:
        raise UserError(
            f"{_KEY}.name: '{name}' in {file} can't be called ({e}); write {wanted}"
        ) from e
    except ValueError:  # a builtin without a signature
        pass
    reward: Reward = function
    return reward
