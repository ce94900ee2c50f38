"""A user's own reward function, from a Python file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from trainer.errors import UserError, nearest
from trainer.rewards.types import Reward

SIGNATURE = "def {name}(data_source, solution_str, ground_truth, extra_info=None)"
_KEY = "custom_reward_function"


def load_reward(path: str | Path, name: str = "compute_score") -> Reward:
    """The function ``name`` of the Python file ``path``.

    Raises UserError naming ``custom_reward_function.path`` or ``.name`` when the file is missing or doesn't load, when
    it has no such function, or when that can't be called with verl's four arguments.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        siblings = sorted(p.name for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise UserError(f"{_KEY}.path: there is no file {file}{nearest(file.name, siblings)}")
    module = _load(file)
    function = getattr(module, name, None)
    if function is None:
        known = _functions(file)
        hint = nearest(name, known) or (f"; it has {', '.join(known)}" if known else "; it defines no function")
        raise UserError(f"{_KEY}.name: {file} has no function '{name}'{hint}")
    if not callable(function):
        raise UserError(f"{_KEY}.name: '{name}' in {file} is a {type(function).__name__}, not a function")
    wanted = SIGNATURE.format(name=name)
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{_KEY}.name: '{name}' in {file} is async; write {wanted}")
    try:
        inspect.signature(function).bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except TypeError as e:
        raise UserError(f"{_KEY}.name: '{name}' in {file} can't be called ({e}); write {wanted}") from e
    except ValueError:  # a builtin without a signature
        pass
    reward: Reward = function
    return reward


def raised_where(error: BaseException) -> str:
    """The last line of a traceback and where in the source it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return f"{last} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else last


def _load(file: Path) -> ModuleType:
    module_name = f"plimsoll_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{_KEY}.path: {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        raise UserError(f"{_KEY}.path: {file}, line {e.lineno}: {e.msg}") from e
    except (Exception, SystemExit) as e:
        raise UserError(f"{_KEY}.path: {file} doesn't load: {raised_where(e)}") from e
    return module


def _functions(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
