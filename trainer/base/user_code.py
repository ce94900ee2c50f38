"""A user's own Python file, named by a key of the config."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from trainer.base.errors import UserError, nearest


def load_module(path: str | Path, *, key: str) -> tuple[ModuleType, Path]:
    """The module in the file ``path``, and the file.

    Raises UserError, which names ``key``, when the file is missing or fails to load.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        siblings = sorted(p.name for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise UserError(f"{key}: there is no file {file}{nearest(file.name, siblings)}")
    module_name = f"plimsoll_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{key}: {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{key}: {file}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: {file} doesn't load: {describe_exception(error)}") from error
    return module, file


def public_names(file: Path, *, classes: bool = False) -> list[str]:
    """The names of the public functions, or ``classes``, that ``file`` defines."""
    kind = ast.ClassDef if classes else ast.FunctionDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, kind)]
    return [name for name in names if not name.startswith("_")]


def describe_exception(error: BaseException) -> str:
    """The last line of a traceback, and the file and line that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
