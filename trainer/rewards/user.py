"""A user's own reward function, from a Python file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError, nearest
from trainer.base.user_code import load_module, public_names
from trainer.rewards.types import RewardFunction

SIGNATURE = "def {name}(data_source, solution_str, ground_truth, extra_info=None)"
OPTIONAL_ARGUMENTS = ("response_length", "finish_reason", "turns")
"""Fields of ``RewardRequest`` that a function gets when its signature names them."""
_KEY = "custom_reward_function"


def load_reward(path: str | Path, name: str = "compute_score") -> RewardFunction:
    """Load the function ``name`` of the Python file ``path``.

    Raises UserError naming ``custom_reward_function.path`` or ``.name`` when the file is missing or
    can't be loaded, or when it has no such function with verl's four arguments. It may be async,
    and may name arguments of ``OPTIONAL_ARGUMENTS`` as well.
    """
    module, file = load_module(path, key=f"{_KEY}.path")
    function = getattr(module, name, None)
    if function is None:
        known = public_names(file)
        contents = f"; it has {', '.join(known)}" if known else "; it defines no function"
        hint = nearest(name, known) or contents
        raise UserError(f"{_KEY}.name: {file} has no function '{name}'{hint}")
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"{_KEY}.name: '{name}' in {file} is a {kind}, not a function")
    signature = SIGNATURE.format(name=name)
    optional = {argument: None for argument in named_arguments(function)}
    try:
        inspect.signature(function).bind(
            data_source="", solution_str="", ground_truth="", extra_info={}, **optional
        )
    except TypeError as e:
        raise UserError(
            f"{_KEY}.name: '{name}' in {file} can't be called ({e}); write {signature}"
        ) from e
    except ValueError:  # a builtin without a signature
        pass
    reward: RewardFunction = function
    return reward


def named_arguments(function: Callable[..., Any]) -> list[str]:
    """Those of ``OPTIONAL_ARGUMENTS`` that the signature names; ``**kwargs`` names none."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return []
    return [name for name in OPTIONAL_ARGUMENTS if name in parameters]
