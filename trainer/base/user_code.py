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
    """The module in the file ``path``, and the file. Raises UserError naming ``key`` when it is
    missing or fails.
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
    except SyntaxError as e:
        raise UserError(f"{key}: {file}, line {e.lineno}: {e.msg}") from e
    except (Exception, SystemExit) as e:
        raise UserError(f"{key}: {file} doesn't load: {raised_where(e)}") from e
    return module, file


def names_in(file: Path, *, classes: bool = False) -> list[str]:
    """The public functions, or ``classes``, that ``file`` defines."""
    kind = ast.ClassDef if classes else ast.FunctionDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [n.name for n in tree.body if isinstance(n, kind) and not n.name.startswith("_")]


def raised_where(error: BaseException) -> str:
    """The last line of a traceback and where in the source it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return f"{last} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else last
